"""What a device keeps where a restart does not reach."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.common.errors import HostError
from testbed.common.quantities import format_size
from testbed.wire.message import Message, decode, encode

if TYPE_CHECKING:
    from testbed_agent.settings import Settings


def used(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk, with all that is in it."""
    blocks = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone meanwhile
                blocks += os.lstat(os.path.join(path, name)).st_blocks  # noqa: PTH118 - of many files, quickly
    return 512 * blocks


class Disk:
    """Messages by name, in a folder of the workload's own: another workload on this device finds none of them."""

    def __init__(self, settings: Settings, origin: float) -> None:
        """``origin`` is when the workload began: the same for every start of a device in it."""
        self._device = settings.device
        self._root = Path(settings.disk)
        self._limit = settings.disk_limit
        self._folder = self._root / origin.hex().replace(".", "_")

    def check(self) -> None:
        """Raise HostError where more is on the disk than there may be, whoever wrote it."""
        held = used(self._root)
        if held > self._limit:
            limit = format_size(self._limit)
            raise HostError(f"{self._root} of {self._device} holds {format_size(held)}, more than its quota of {limit}")

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
