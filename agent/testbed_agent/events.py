"""The device's events: kept in order, followed live."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from time import monotonic, sleep

from testbed_agent.http import Refused

HEARTBEAT = 2.0
"""Seconds after which a quiet stream carries an empty line, so that a reader who left is noticed."""
GATHER = 0.01
"""Seconds after some lines in which more of them gather: a reader that is woken for each line takes the host longer."""
BLOCK = 1 << 15
"""Bytes of lines that are compressed together: a quarter of a millisecond's work, and a tenth of the memory."""


class EventLog:
    """Every line since the device booted, or the newest that fit into ``limit`` bytes of memory.

    The newest lines, which a reader that keeps up asks for, are kept as they were written; older ones are compressed.
    Writing never waits for a reader. A reader for which lines have been dropped is refused, and never gets a gap.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dropped = 0
        self._sealed: deque[tuple[int, bytes]] = deque()
        """Number of lines, and the lines compressed."""
        self._sealed_lines = 0
        self._sealed_bytes = 0
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0
        self._open = True
        self._changed = threading.Condition()

    def append(self, line: str) -> None:
        """Add one event; wakes everybody who follows."""
        data = line.encode() + b"\n"
        with self._changed:
            self._recent.append(data)
            self._recent_bytes += len(data)
            self._changed.notify_all()
            if self._recent_bytes > 2 * BLOCK:
                self._seal()

    @property
    def count(self) -> int:
        """Number of events written so far."""
        return self._dropped + self._sealed_lines + len(self._recent)

    def close(self) -> None:
        """End the streams once they have delivered what there is: the program is over."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def reopen(self) -> None:
        """A program is to run (again)."""
        with self._changed:
            self._open = True

    def follow(self, after: int) -> Iterator[bytes]:
        """Yield lines from number ``after`` on, several at once where there are, until the log is closed.

        Raises Refused when the next line is no longer kept, or when there are fewer lines, as after a restart of the
        device.
        """
        if after < self._dropped:
            raise self._fell_behind(after)
        if after > self.count:
            raise Refused(409, f"only {self.count} events were recorded since this device booted, not {after}")
        return self._follow(after)

    def _follow(self, position: int) -> Iterator[bytes]:
        sent = 0.0
        while True:
            sleep(max(0.0, sent + GATHER - monotonic()))
            with self._changed:
                if position >= self.count and self._open:
                    self._changed.wait(HEARTBEAT)
                if position >= self.count and not self._open:
                    return
                skip, lines = self._from(position)
            if isinstance(lines, bytes):
                lines = zlib.decompress(lines).splitlines(keepends=True)[skip:]
            else:
                sent = monotonic()
            position += len(lines)
            yield b"".join(lines) or b"\n"

    def _from(self, position: int) -> tuple[int, list[bytes] | bytes]:
        """Return lines from a position on, or a compressed block with how many of its lines to skip."""
        if position < self._dropped:
            raise self._fell_behind(position)
        first = self._dropped + self._sealed_lines
        if position >= first:
            return 0, list(islice(reversed(self._recent), self.count - position))[::-1]
        for count, block in reversed(self._sealed):
            first -= count
            if position >= first:
                return position - first, block
        raise AssertionError("every line is dropped, sealed or recent")

    def _fell_behind(self, position: int) -> Refused:
        return Refused(409, f"event {position} is no longer kept, the oldest is {self._dropped}: read faster")

    def _seal(self) -> None:
        """Compress the older half of what is recent; drop the oldest beyond the limit."""
        lines = []
        size = 0
        while size < BLOCK:
            lines.append(self._recent.popleft())
            size += len(lines[-1])
        block = zlib.compress(b"".join(lines), 1)
        self._recent_bytes -= size
        self._sealed.append((len(lines), block))
        self._sealed_lines += len(lines)
        self._sealed_bytes += len(block)
        while self._sealed_bytes > self._limit:
            count, block = self._sealed.popleft()
            self._sealed_lines -= count
            self._sealed_bytes -= len(block)
            self._dropped += count
