"""What a device keeps where a restart does not reach."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.wire.message import Message, decode, encode

if TYPE_CHECKING:
    from agent.settings import Settings


class Disk:
    """Messages by name, in a folder of the workload's own: another workload on this device finds none of them."""

    def __init__(self, settings: Settings, origin: float) -> None:
        """``origin`` is when the workload began: the same for every start of a device in it."""
        self._device = settings.device
        self._root = Path(settings.disk)
        self._folder = self._root / origin.hex().replace(".", "_")

    def save(self, name: str, message: Message) -> None:
        """Write a message, or leave the one that was there as it is.

        Raises OSError when there is no such disk, or no room on it.
        """
        if not self._folder.exists():
            for other in self._root.iterdir() if self._root.exists() else ():
                shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(parents=True)
        path = self._folder / name
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.write(encode(message, self._device))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def saved(self, name: str) -> Message | None:
        """Return what was last written under a name; None where nothing was."""
        with suppress(FileNotFoundError):
            return decode(bytearray((self._folder / name).read_bytes())).message
        return None
