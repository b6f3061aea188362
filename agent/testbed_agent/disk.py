"""The device's disk, which outlives a restart of the device."""

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


def disk_usage(folder: Path) -> int:
    """Return the disk space of a folder with all content, in bytes."""
    blocks = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted in the meantime
                blocks += os.lstat(os.path.join(path, name)).st_blocks  # noqa: PTH118 - faster for many files
    return 512 * blocks


class Disk:
    """The messages that a program saves on its device, by name.

    Each workload has its own folder, named by its start, so a program never reads messages of an earlier workload.
    """

    def __init__(self, settings: Settings, origin: float) -> None:
        """``origin`` is the start of the workload, equal for all starts of the device within the workload."""
        self._device = settings.device
        self._root = Path(settings.disk)
        self._limit = settings.disk_limit
        self._folder = self._root / origin.hex().replace(".", "_")

    def check(self) -> None:
        """Raise HostError if the disk usage exceeds the quota."""
        usage = disk_usage(self._root)
        if usage > self._limit:
            limit = format_size(self._limit)
            raise HostError(
                f"{self._root} of {self._device} contains {format_size(usage)}, above its quota of {limit}"
            )

    def save(self, name: str, message: Message) -> None:
        """Write a message atomically: after an error, an earlier message of the name remains.

        Raises OSError if the disk is missing or full.
        """
        if not self._folder.exists():
            # Files of earlier workloads are not needed any more, and would count towards the quota.
            if self._root.exists():
                for other in self._root.iterdir():
                    shutil.rmtree(other, ignore_errors=True)
            self._folder.mkdir(parents=True)
        path = self._folder / name
        # A draft is written and renamed, because a kill during the write must leave a complete file.
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(encode(message, self._device))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def saved(self, name: str) -> Message | None:
        """Return the latest message saved under a name; None if none was saved."""
        with suppress(FileNotFoundError):
            return decode(bytearray((self._folder / name).read_bytes())).message
        return None
