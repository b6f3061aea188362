"""The device's time: one processor whose real work is stretched to what the device would need, and nothing else.

The host's own share, Python between a message and the work that it sets off or between that work and the next message,
differs from host to host and is no part of any device. It is kept out twice. Work is charged from the instant of what
the program last heard of (`DeviceTime`), not from when this process got round to it. And a result is handed over
``LEAD_SECONDS`` before it is due: the program prepares its next message meanwhile, and the message leaves when the
result was due. What the host cannot make up for in this way is late, and shows.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

CATCH_UP_SECONDS = 0.005
"""Lateness of the host that the next piece of work may make up for."""
LEAD_SECONDS = 0.001
"""How long before it is due a result is handed over."""
_PR_SET_TIMERSLACK = 29

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """How one piece of work went; all in seconds, ``start`` being a monotonic instant."""

    start: float
    duration: float
    """Until the result was due: what was charged, and whatever the host was late by."""
    busy: float
    """What the host needed."""
    deficit: float
    """By how much the host needed more than was charged."""


class DeviceTime:
    """The instant that a program lives in; used from its loop only."""

    def __init__(self, origin: float) -> None:
        self.heard = origin
        """Monotonic instant of the latest thing the program has heard of: a message's last byte, the end of a piece of
        work (which may be a moment ahead), an acknowledgement, the end of a sleep. What it does next, it does then.
        """

    def hear(self, instant: float) -> None:
        """Note that the program is about to hear of something."""
        self.heard = max(self.heard, instant)

    def now(self) -> float:
        """Return the monotonic instant as the program sees it."""
        return max(self.heard, time.monotonic())


@dataclass(frozen=True)
class _Work:
    work: Callable[[], Any]
    charge: float
    begin: Callable[[float], bool]
    end: Callable[[Any, BaseException | None, Measured], None]
    ready: float
    """Monotonic instant from which it could begin."""


class Processor:
    """Runs work in the order it is put, one piece at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._free = 0.0
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def put(
        self,
        work: Callable[[], Any],
        charge: float,
        begin: Callable[[float], bool],
        end: Callable[[Any, BaseException | None, Measured], None],
        ready: float | None = None,
    ) -> None:
        """Queue work that is to take ``charge`` seconds from the monotonic instant ``ready`` on (now, where None).

        ``begin`` is called with the instant at which it begins for the device and may return False to skip it; ``end``
        gets its result or exception ``LEAD_SECONDS`` before the time has passed. Both are called in the processor's
        thread.
        """
        self._queue.put(_Work(work, charge, begin, end, time.monotonic() if ready is None else ready))

    def between_works(self, call: Callable[[], T]) -> T:
        """Call something in the processor's thread, or here once that has ended; blocks until it is done."""
        if self._stop.is_set():
            self._thread.join()
            return call()
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self.put(call, 0.0, lambda _: True, lambda result, failure, _: outcome.put((result, failure)))
        while True:
            try:
                result, failure = outcome.get(timeout=0.1)
            except queue.Empty:
                if not self._thread.is_alive() and outcome.empty():
                    return call()
                continue
            if failure is not None:
                raise failure
            return result  # type: ignore[return-value]

    @property
    def waiting(self) -> int:
        """Pieces of work that have not begun."""
        return self._queue.qsize()

    def close(self) -> None:
        """End the thread after the work under way, without waiting its time out."""
        self._stop.set()
        self._queue.put(None)

    def _run(self) -> None:
        precise_sleep()
        while (item := self._queue.get()) is not None and not self._stop.is_set():
            start = time.monotonic()
            # For the device, work that waited began when the work before it was over. That this thread wakes up a
            # little late must not add up over thousands of pieces; but time lost for good, as in a pause, is not
            # caught up.
            origin = max(item.ready, self._free, start - CATCH_UP_SECONDS)
            if item.begin(origin):
                self._perform(item, start, origin)

    def _perform(self, item: _Work, start: float, origin: float) -> None:
        result, failure = None, None
        try:
            result = item.work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the work
            failure = error
        busy = time.monotonic() - start
        if failure is not None:
            item.end(None, failure, Measured(start, busy, busy, 0.0))
            return
        self._free = max(origin + item.charge, start + busy)
        _sleep_until(self._free - LEAD_SECONDS, self._stop)
        if not self._stop.is_set():
            duration = max(self._free, time.monotonic()) - origin
            item.end(result, None, Measured(origin, duration, busy, max(0.0, busy - item.charge)))


def precise_sleep() -> None:
    """Ask the kernel to wake this thread when told, not up to 50 us later to save power."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


def _sleep_until(instant: float, stop: threading.Event) -> None:
    """Sleep to a monotonic instant; looks up now and then whether to stop."""
    while (left := instant - time.monotonic()) > 0 and not stop.is_set():
        time.sleep(min(left, 0.25))
