"""The device's event log: an ordered buffer with live streams."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from time import monotonic, sleep

from testbed_agent.http import Refused

HEARTBEAT_SECONDS = 2.0
"""Interval of empty lines on a quiet stream, in seconds; writing one fails if the reader has disconnected."""
GATHER_SECONDS = 0.01
"""Minimum time between two batches of lines, in seconds; waking a reader for each line would load the host."""
BLOCK_BYTES = 1 << 15
"""Size of a block before compression, in bytes. Compression takes 0.25 ms and saves nine tenths of the memory."""


class EventLog:
    """The events since the device's boot, or the newest ones within ``limit`` bytes of memory.

    An event is one line of JSON, numbered from 0. The newest lines are stored uncompressed for live readers; older
    lines are compressed in blocks. Writing never waits for a reader. A reader whose next line was dropped is refused,
    so no reader has a gap.

    >>> log = EventLog(limit=1 << 20)
    >>> log.append('{"event": "step"}')
    >>> log.close()
    >>> list(log.follow(0))
    [b'{"event": "step"}\\n']
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._dropped = 0
        """Number of lines dropped so far, and thus the number of the oldest line kept."""
        self._blocks: deque[tuple[int, bytes]] = deque()
        """Blocks of (number of lines, compressed lines), the oldest first."""
        self._block_lines = 0
        """Number of lines in all blocks."""
        self._block_bytes = 0
        """Compressed bytes of all blocks."""
        self._recent: deque[bytes] = deque()
        """The newest lines, uncompressed."""
        self._recent_bytes = 0
        self._is_open = True
        """Whether more lines may follow."""
        self._changed = threading.Condition()

    def append(self, line: str) -> None:
        """Add one event and wake up all followers."""
        data = line.encode() + b"\n"
        with self._changed:
            self._recent.append(data)
            self._recent_bytes += len(data)
            self._changed.notify_all()
            # The newer half of the lines stays uncompressed, where live readers read.
            if self._recent_bytes > 2 * BLOCK_BYTES:
                self._compress_oldest()

    @property
    def count(self) -> int:
        """Number of events written so far."""
        return self._dropped + self._block_lines + len(self._recent)

    def close(self) -> None:
        """End all streams after their remaining lines: the program has ended."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def reopen(self) -> None:
        """Accept events of another run of a program."""
        with self._changed:
            self._is_open = True

    def follow(self, after: int) -> Iterator[bytes]:
        """Yield lines from number ``after`` on, in batches, until the log is closed.

        Raises Refused if the next line was dropped, or if the log has fewer lines, as after a restart of the device.
        Example::

            for lines in log.follow(0):
                socket.sendall(lines)
        """
        if after < self._dropped:
            raise self._refuse_position(after)
        if after > self.count:
            # The device has restarted. A reader that waited for this position would miss earlier lines of the new log.
            raise Refused(
                409,
                f"event {after} does not exist: {self.count} were recorded since the boot",
            )
        return self._follow(after)

    def _follow(self, position: int) -> Iterator[bytes]:
        # The monotonic instant of the last batch of recent lines.
        last_batch = 0.0
        while True:
            sleep(max(0.0, last_batch + GATHER_SECONDS - monotonic()))
            with self._changed:
                if position >= self.count and self._is_open:
                    self._changed.wait(HEARTBEAT_SECONDS)
                if position >= self.count and not self._is_open:
                    return
                skip, lines = self._lines_from(position)
            # Decompress outside the lock, so that writing does not wait.
            if isinstance(lines, bytes):
                lines = zlib.decompress(lines).splitlines(keepends=True)[skip:]
            else:
                last_batch = monotonic()
            position += len(lines)
            yield b"".join(lines) or b"\n"

    def _lines_from(self, position: int) -> tuple[int, list[bytes] | bytes]:
        """Return (0, lines from a position on), or (number of lines to skip, compressed block)."""
        if position < self._dropped:
            raise self._refuse_position(position)
        first = self._dropped + self._block_lines
        if position >= first:
            # Iterated from the end, because a live reader is near the end and a deque has no slices.
            newest_first = list(islice(reversed(self._recent), self.count - position))
            return 0, newest_first[::-1]
        for count, block in reversed(self._blocks):
            first -= count
            if position >= first:
                return position - first, block
        raise AssertionError("every line is dropped, in a block, or recent")

    def _refuse_position(self, position: int) -> Refused:
        return Refused(
            409,
            f"event {position} was dropped, the oldest is {self._dropped}: read faster",
        )

    def _compress_oldest(self) -> None:
        """Compress the older half of the recent lines; drop the oldest blocks beyond the limit."""
        lines = []
        size = 0
        while size < BLOCK_BYTES:
            lines.append(self._recent.popleft())
            size += len(lines[-1])
        # Level 1 is the fastest, and appending waits for the compression.
        block = zlib.compress(b"".join(lines), 1)
        self._recent_bytes -= size
        self._blocks.append((len(lines), block))
        self._block_lines += len(lines)
        self._block_bytes += len(block)
        while self._block_bytes > self._limit:
            count, block = self._blocks.popleft()
            self._block_lines -= count
            self._block_bytes -= len(block)
            self._dropped += count
