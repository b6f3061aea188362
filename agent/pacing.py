"""The device's one processor: real work, stretched to the time the device would need."""

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
_PR_SET_TIMERSLACK = 29

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """How one piece of work went; all in seconds, ``start`` being a monotonic instant."""

    start: float
    duration: float
    """Until the result was handed over: what was charged, and whatever the host was late by."""
    busy: float
    """What the host needed."""
    deficit: float
    """By how much the host needed more than was charged."""


@dataclass(frozen=True)
class _Work:
    work: Callable[[], Any]
    charge: float
    begin: Callable[[], bool]
    end: Callable[[Any, BaseException | None, Measured], None]
    put: float
    """Monotonic instant at which it was queued."""


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
        begin: Callable[[], bool],
        end: Callable[[Any, BaseException | None, Measured], None],
    ) -> None:
        """Queue work that is to take ``charge`` seconds.

        ``begin`` is called as it starts and may return False to skip it; ``end`` gets its result or exception once
        the time has passed. Both are called in the processor's thread.
        """
        self._queue.put(_Work(work, charge, begin, end, time.monotonic()))

    def between_works(self, call: Callable[[], T]) -> T:
        """Call something in the processor's thread, or here once that has ended; blocks until it is done."""
        if self._stop.is_set():
            self._thread.join()
            return call()
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self.put(call, 0.0, lambda: True, lambda result, failure, _: outcome.put((result, failure)))
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
        _precise_sleep()
        while (item := self._queue.get()) is not None and not self._stop.is_set():
            if item.begin():
                self._perform(item)

    def _perform(self, item: _Work) -> None:
        start = time.monotonic()
        result, failure = None, None
        try:
            result = item.work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the work
            failure = error
        busy = time.monotonic() - start
        if failure is not None:
            item.end(None, failure, Measured(start, busy, busy, 0.0))
            return
        # For the device, work that waited began when the work before it was over. That this thread wakes up a little
        # late must not add up over thousands of pieces; but time lost for good, as in a pause, is not caught up.
        origin = max(item.put, self._free, start - CATCH_UP_SECONDS)
        self._free = max(origin + item.charge, start + busy)
        _sleep_until(self._free, self._stop)
        if not self._stop.is_set():
            item.end(result, None, Measured(origin, time.monotonic() - origin, busy, max(0.0, busy - item.charge)))


def _precise_sleep() -> None:
    """Ask the kernel to wake this thread when told, not up to 50 us later to save power."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


def _sleep_until(instant: float, stop: threading.Event) -> None:
    """Sleep to a monotonic instant; looks up now and then whether to stop."""
    while (left := instant - time.monotonic()) > 0 and not stop.is_set():
        time.sleep(min(left, 0.25))
