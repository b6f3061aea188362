"""The device's events: kept in order, followed live."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice

HEARTBEAT = 2.0
"""Seconds after which a quiet stream carries an empty line, so that a reader who left is noticed."""


class EventLog:
    """Lines in memory, the newest ``limit`` bytes of them.

    Writing never waits for a reader: whoever falls so far behind that lines were dropped is told by
    `FellBehind` instead of being given a gap.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._first = 0
        self._open = True
        self._changed = threading.Condition()

    def append(self, line: str) -> None:
        """Add one event; wakes everybody who follows."""
        data = line.encode() + b"\n"
        with self._changed:
            self._lines.append(data)
            self._bytes += len(data)
            while self._bytes > self._limit:
                self._bytes -= len(self._lines.popleft())
                self._first += 1
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """Number of events written so far."""
        return self._first + len(self._lines)

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

        Raises:
            FellBehind: when the next line is no longer kept.
            NotYet: when there are fewer lines: whoever asks speaks of the time before the device restarted.
        """
        if after < self._first:
            raise FellBehind(after, self._first)
        if after > self.count:
            raise NotYet(after, self.count)
        return self._follow(after)

    def _follow(self, position: int) -> Iterator[bytes]:
        while True:
            with self._changed:
                if position >= self.count and self._open:
                    self._changed.wait(HEARTBEAT)
                if position < self._first:
                    raise FellBehind(position, self._first)
                ready = list(islice(reversed(self._lines), self.count - position))[::-1]
                finished = not ready and not self._open
            if finished:
                return
            position += len(ready)
            yield b"".join(ready) or b"\n"


class FellBehind(Exception):  # noqa: N818 - says what the reader did
    """The events asked for are no longer kept."""

    def __init__(self, asked: int, first: int) -> None:
        super().__init__(f"event {asked} is no longer kept, the oldest is {first}; read the stream faster")


class NotYet(Exception):  # noqa: N818 - says where the log is
    """The events asked for have not been written."""

    def __init__(self, asked: int, count: int) -> None:
        super().__init__(f"only {count} events were recorded since this device booted, none numbered {asked}")
