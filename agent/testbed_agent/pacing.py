"""The device's time: processors whose real work is stretched to what the device would need, and nothing else.

The host's own share, Python between a message and the work that it sets off or between that work and the next message,
differs from host to host and is no part of any device. It is kept out twice. Work is charged from the instant of what
the program last heard of (`DeviceTime`), not from when this process got round to it. And a result is handed over
``LEAD_SECONDS`` before it is due: the program prepares its next message meanwhile, and the message leaves when the
result was due. What the host cannot make up for in this way is late, and shows (`WorkTimes.late`).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

CATCH_UP_SECONDS = 0.005
"""Lateness of the host that the next piece of work may make up for."""
LEAD_SECONDS = 0.001
"""How long before it is due a result is handed over."""
_PR_SET_TIMERSLACK = 29

T = TypeVar("T")

Charge = Callable[[float], float]
"""Processor seconds that work took the host -> seconds that it takes the device at its own speed."""
_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class WorkTimes:
    """How one piece of work went; all in seconds, ``start`` being a monotonic instant."""

    start: float
    duration: float
    """Until the result was due: what was charged, and whatever the host was late by."""
    busy: float
    """What the host needed."""
    deficit: float
    """By how much the host needed more than was charged."""
    late: float
    """By how much the host made the device later than its speed would: it began the work too late to make up for it,
    needed more than was charged, or woke up too late to hand the result over.
    """


class Pace:
    """How fast processors go as a share of their own speed, and since when. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[tuple[float, float]] = [(-math.inf, 1.0)]
        self._watchers: list[threading.Event] = []

    def watch(self) -> threading.Event:
        """Return an event that is set at each change from now on, for one thread that waits for work to be over."""
        changed = threading.Event()
        with self._lock:
            self._watchers.append(changed)
        return changed

    def forget(self, changed: threading.Event) -> None:
        """Set this event no more."""
        with self._lock:
            self._watchers.remove(changed)

    @property
    def factor(self) -> float:
        """The share in force."""
        return self._steps[-1][1]

    def set(self, factor: float) -> None:
        """Go at this share of the own speed from now on; raises ValueError unless it is a positive number."""
        if not 0 < factor < math.inf:
            raise ValueError(f"a processor goes at a positive share of its speed, not {factor}")
        with self._lock:
            self._steps.append((time.monotonic(), factor))
            for changed in self._watchers:
                changed.set()

    def due(self, origin: float, charge: float) -> float:
        """Return when work is over that takes ``charge`` seconds at full speed and begins at ``origin``.

        As far as is known now: a change that is still to come moves it.
        """
        with self._lock:
            steps = self._steps[max(0, bisect_right(self._steps, (origin, math.inf)) - 1) :]
        instant, left = origin, charge
        for (_, factor), (until, _) in pairwise([*steps, (math.inf, 0.0)]):
            took = left / factor
            if instant + took <= until:
                return instant + took
            left -= (until - instant) * factor
            instant = until
        raise AssertionError("the last step lasts for ever")


def fixed(seconds: float) -> Charge:
    """Charge work this time, whatever it takes the host."""
    return lambda _: seconds


def slowed(slowdown: float) -> Charge:
    """Charge work a multiple of the processor time that it takes the host.

    Processor time and not time: what else the host does meanwhile is no property of the device.
    """
    return lambda took: took * slowdown


class DeviceTime:
    """The instant that a program lives in; used from its loop only."""

    def __init__(self, origin: float) -> None:
        self.latest = origin
        """Monotonic instant of the latest thing the program has heard of: a message's last byte, the end of a piece of
        work (which may be a moment ahead), an acknowledgement, the end of a sleep. What it does next, it does then.
        """

    def advance_to(self, instant: float) -> None:
        """Note that the program is about to hear of something."""
        self.latest = max(self.latest, instant)

    def now(self) -> float:
        """Return the monotonic instant as the program sees it."""
        return max(self.latest, time.monotonic())


@dataclass(frozen=True)
class _PacedWork:
    work: Callable[[], Any]
    charge: Charge
    begin: Callable[[float], bool]
    end: Callable[[Any, BaseException | None, WorkTimes], None]
    ready: float
    """Monotonic instant from which it could begin."""


class Processors:
    """Begin work in the order it is put, each in a thread of its own with one piece at a time."""

    def __init__(self, count: int = 1, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self.computed = 0.0
        """Seconds of processor time that the work itself has taken."""
        self._queue: queue.SimpleQueue[_PacedWork | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._changed = [self._pace.watch() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(changed,), name="compute", daemon=True)
            for changed in self._changed
        ]
        for thread in self._threads:
            thread.start()

    def put(
        self,
        work: Callable[[], Any],
        charge: Charge,
        begin: Callable[[float], bool],
        end: Callable[[Any, BaseException | None, WorkTimes], None],
        ready: float | None = None,
    ) -> None:
        """Queue work that is to take what it is charged from the monotonic instant ``ready`` on (now, where None).

        ``begin`` is called with the instant at which it begins for the device and may return False to skip it; ``end``
        gets its result or exception ``LEAD_SECONDS`` before the time has passed. Both are called in the
        processor's thread.
        """
        self._queue.put(_PacedWork(work, charge, begin, end, time.monotonic() if ready is None else ready))

    def between_works(self, call: Callable[[], T]) -> T:
        """Call something in a processor's thread, or here once those have ended.

        Blocks until it is done, and raises what that raises.
        """
        if self._stop.is_set():
            for thread in self._threads:
                thread.join()
            return call()
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self.put(call, fixed(0.0), lambda _: True, lambda result, failure, _: outcome.put((result, failure)))
        while True:
            try:
                result, failure = outcome.get(timeout=0.1)
            except queue.Empty:
                if not any(thread.is_alive() for thread in self._threads) and outcome.empty():
                    return call()
                continue
            if failure is not None:
                raise failure
            return result  # type: ignore[return-value]

    @property
    def threads(self) -> list[int]:
        """The kernel's numbers of the threads that compute."""
        return [thread.native_id for thread in self._threads if thread.native_id is not None]

    @property
    def waiting(self) -> int:
        """Pieces of work that have not begun."""
        return self._queue.qsize()

    def close(self) -> None:
        """End the threads after the work under way, without waiting its time out."""
        self._stop.set()
        for changed in self._changed:
            self._queue.put(None)
            changed.set()

    def _run(self, changed: threading.Event) -> None:
        precise_sleep()
        free = 0.0
        while (item := self._queue.get()) is not None and not self._stop.is_set():
            start = time.monotonic()
            # For the device, work that waited began when the work before it was over. That this thread wakes up a
            # little late must not add up over thousands of pieces; but time lost for good, as in a pause, is not
            # caught up.
            wanted = max(item.ready, free)
            origin = max(wanted, start - CATCH_UP_SECONDS)
            if item.begin(origin):
                free = self._perform(item, start, origin, origin - wanted, changed)
        self._pace.forget(changed)

    def _perform(self, item: _PacedWork, start: float, origin: float, late: float, changed: threading.Event) -> float:
        """Do a piece of work; return when this processor is free again."""
        result, failure = None, None
        processor_time = time.thread_time()
        try:
            result = item.work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits the work
            failure = error
        busy = time.monotonic() - start
        if failure is not None:
            item.end(None, failure, WorkTimes(start, busy, busy, 0.0, late))
            return origin
        processor_time = time.thread_time() - processor_time
        self.computed += processor_time
        charge = item.charge(processor_time)
        due = self._wait(origin, charge, start + busy, changed)
        free = max(due, start + busy)
        if not self._stop.is_set():
            duration = max(free, time.monotonic()) - origin
            late += max(0.0, origin + duration - due)
            item.end(result, None, WorkTimes(origin, duration, busy, max(0.0, busy - (due - origin)), late))
        return free

    def _wait(self, origin: float, charge: float, busy_until: float, changed: threading.Event) -> float:
        """Wait until ``LEAD_SECONDS`` before the work is over for the device; return when it is over."""
        while True:
            changed.clear()
            due = self._pace.due(origin, charge)
            left = max(due, busy_until) - LEAD_SECONDS - time.monotonic()
            if left <= 0 or self._stop.is_set():
                return due
            _wait(changed, left)


def precise_sleep() -> None:
    """Ask the kernel to wake this thread on time, not up to 50 us later to save power."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


def _wait(event: threading.Event, seconds: float) -> None:
    """Wait for an event, or so long."""
    event.wait(seconds)


class WaitingTime:
    """Reads the counters; each call of `since_last` returns what came to them since the call before."""

    def __init__(self, without: Collection[int] = ()) -> None:
        """``without`` are the kernel's numbers of threads to leave out."""
        self._without = frozenset(map(str, without))
        self._known = self._read()

    def since_last(self) -> float:
        """Return seconds, summed over the threads that run now; 0 where the kernel does not count."""
        now = self._read()
        waited = sum(nanoseconds - self._known.get(thread, 0) for thread, nanoseconds in now.items())
        self._known = now
        return waited * 1e-9

    def _read(self) -> dict[str, int]:
        found = {}
        for task in _TASKS.iterdir():
            if task.name not in self._without:
                try:
                    found[task.name] = int((task / "schedstat").read_text().split()[1])
                except (OSError, IndexError):  # the thread has ended, or the kernel does not count
                    continue
        return found
