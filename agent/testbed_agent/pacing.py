"""Emulated computing time: real work is stretched to the duration on the emulated device.

Python code between a message and its work, or between work and the next message, costs time of the host and not of the
emulated device. Two rules keep this time out of the results. Work is charged from the instant of the event that caused
it (`DeviceTime`), not from the instant at which the process handled the event. And a result is handed over
``LEAD_SECONDS`` before it is due: the program prepares its next message meanwhile, and the message leaves when the
result was due. Any remaining delay is recorded as late (`WorkTimes.late`).
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
"""Maximum lateness of the host, in seconds, for which a task may begin earlier on the device than on the host."""
LEAD_SECONDS = 0.001
"""Time between the delivery of a result and its due instant, in seconds."""
_PR_SET_TIMERSLACK = 29
"""Constant of linux/prctl.h."""

T = TypeVar("T")

Charge = Callable[[float], float]
"""Function from the processor time on the host to the charged computing time on the device, both in seconds."""
_TASKS = Path("/proc/self/task")
"""Folder with an entry for each thread of this process; Linux calls a thread a task."""


@dataclass(frozen=True)
class WorkTimes:
    """The timing of one task, in seconds; ``start`` is a monotonic instant."""

    start: float
    duration: float
    """Time until the result was due: the charged time plus any lateness of the host."""
    busy: float
    """Wall-clock time of the work on the host."""
    deficit: float
    """Time by which the host exceeded the charged time."""
    late: float
    """Time by which the host delayed the device: the work began too late to compensate, exceeded the charged time, or
    its thread woke up too late."""


class Pace:
    """The speed of the processors over time, as a multiple of their speed in the scenario. Thread-safe.

    >>> pace = Pace()
    >>> pace.end_time(origin=10.0, charge=0.5)
    10.5
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[tuple[float, float]] = [(-math.inf, 1.0)]
        """Monotonic instant of each change, and the speed from then on."""
        self._change_events: list[threading.Event] = []
        """Events set at each change; see `watch`."""

    def watch(self) -> threading.Event:
        """Return an event that is set at each speed change, for a thread that waits for the end of a task."""
        changed = threading.Event()
        with self._lock:
            self._change_events.append(changed)
        return changed

    def forget(self, changed: threading.Event) -> None:
        """Stop setting an event of `watch`."""
        with self._lock:
            self._change_events.remove(changed)

    @property
    def factor(self) -> float:
        """The current speed as a multiple of the speed in the scenario."""
        return self._steps[-1][1]

    def set(self, factor: float) -> None:
        """Compute at a multiple of the speed in the scenario from now on.

        Raises ValueError if the factor is not positive and finite.
        """
        if not 0 < factor < math.inf:
            raise ValueError(
                f"the speed factor must be positive and finite, not {factor}"
            )
        with self._lock:
            self._steps.append((time.monotonic(), factor))
            for changed in self._change_events:
                changed.set()

    def end_time(self, origin: float, charge: float) -> float:
        """Return the end of a task that needs ``charge`` seconds at full speed and starts at ``origin``.

        Both instants are monotonic. The result holds as long as the speed does not change again.
        """
        with self._lock:
            # The task starts at the speed of the last change up to the origin. The first step has no earlier one.
            first = bisect_right(self._steps, (origin, math.inf)) - 1
            steps = self._steps[max(0, first) :]
        # Integrate the piecewise constant speed until the charge is used up.
        instant = origin
        remaining = charge
        for (_, factor), (until, _) in pairwise([*steps, (math.inf, 0.0)]):
            duration = remaining / factor
            if instant + duration <= until:
                return instant + duration
            remaining -= (until - instant) * factor
            instant = until
        raise AssertionError("the last step lasts for ever")


def constant_charge(seconds: float) -> Charge:
    """Charge a constant time in seconds for a task, independent of the host.

    >>> constant_charge(0.5)(0.02)
    0.5
    """
    return lambda _: seconds


def proportional_charge(slowdown: float) -> Charge:
    """Charge a multiple of the task's processor time on the host.

    Processor time excludes the time that the host spends on other processes, which the device does not run.

    >>> proportional_charge(slowdown=10)(0.02)
    0.2
    """
    return lambda processor_time: processor_time * slowdown


class DeviceTime:
    """The current instant of a program; used from the program's event loop only."""

    def __init__(self, origin: float) -> None:
        self.latest = origin
        """Monotonic instant of the latest event that the program knows: the last byte of a message, the end of a task
        (possibly a moment ahead), an acknowledgement, or the end of a sleep. The program's next action happens at this
        instant."""

    def advance_to(self, instant: float) -> None:
        """Advance to the monotonic instant of an event, before the program is informed about the event."""
        self.latest = max(self.latest, instant)

    def now(self) -> float:
        """Return the present instant of the program, which may be a moment ahead of the monotonic clock."""
        return max(self.latest, time.monotonic())


@dataclass(frozen=True)
class _PacedWork:
    """The arguments of `Processors.put`."""

    work: Callable[[], Any]
    charge: Charge
    begin: Callable[[float], bool]
    end: Callable[[Any, BaseException | None, WorkTimes], None]
    ready: float
    """Earliest monotonic instant at which the work could begin."""


class Processors:
    """The processors of a device: tasks begin in order, each in the thread of a processor.

    Example::

        processors = Processors(count=2)
        processors.put(work, constant_charge(0.5), lambda start: True, report)  # occupies a processor for 0.5 s
    """

    def __init__(self, count: int = 1, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self.computed = 0.0
        """Processor time of all work so far, in seconds."""
        self._queue: queue.SimpleQueue[_PacedWork | None] = queue.SimpleQueue()
        """Waiting work of all processors; None ends a thread."""
        self._stop = threading.Event()
        # One event for each thread, since a thread clears its own.
        self._change_events = [self._pace.watch() for _ in range(count)]
        self._threads = [
            threading.Thread(
                target=self._run_tasks, args=(changed,), name="compute", daemon=True
            )
            for changed in self._change_events
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
        """Queue work, charged from the monotonic instant ``ready`` on (default: now).

        ``begin`` gets the start instant on the device and returns False to skip the work; ``end`` gets the result or
        exception ``LEAD_SECONDS`` before the charged time has passed. Both run in the processor's thread.
        """
        if ready is None:
            ready = time.monotonic()
        self._queue.put(_PacedWork(work, charge, begin, end, ready))

    def between_works(self, call: Callable[[], T]) -> T:
        """Call a function in a processor's thread, or directly after the processors have closed.

        Blocks until the function returns, and raises its errors.
        """
        if self._stop.is_set():
            for thread in self._threads:
                thread.join()
            return call()
        outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self.put(
            call,
            constant_charge(0.0),
            lambda _: True,
            lambda result, failure, _: outcome.put((result, failure)),
        )
        # Polled, since the threads may end before they reach the call.
        while True:
            try:
                result, failure = outcome.get(timeout=0.1)
            except queue.Empty:
                have_ended = not any(thread.is_alive() for thread in self._threads)
                if have_ended and outcome.empty():
                    return call()
                continue
            if failure is not None:
                raise failure
            return result  # type: ignore[return-value]

    @property
    def threads(self) -> list[int]:
        """The kernel's IDs of the computing threads."""
        return [
            thread.native_id for thread in self._threads if thread.native_id is not None
        ]

    @property
    def waiting(self) -> int:
        """Number of waiting tasks."""
        return self._queue.qsize()

    def close(self) -> None:
        """End the threads after their current work, without the rest of the charged time."""
        self._stop.set()
        # None ends a thread that waits for work; the event ends the wait for the charged time.
        for changed in self._change_events:
            self._queue.put(None)
            changed.set()

    def _run_tasks(self, changed: threading.Event) -> None:
        request_precise_wakeups()
        # The monotonic instant from which the processor is free, on the emulated device.
        free_from = 0.0
        while True:
            item = self._queue.get()
            if item is None or self._stop.is_set():
                break
            start = time.monotonic()
            # On the device, queued work begins at the end of the previous task, whereas this thread wakes up a little
            # later. The task is charged from the earlier instant, so that these delays do not add up over thousands of
            # tasks. A delay beyond CATCH_UP_SECONDS, such as a pause, is not compensated.
            device_start = max(item.ready, free_from)
            origin = max(device_start, start - CATCH_UP_SECONDS)
            if item.begin(origin):
                free_from = self._perform(
                    item, start, origin, origin - device_start, changed
                )
        self._pace.forget(changed)

    def _perform(
        self,
        item: _PacedWork,
        start: float,
        origin: float,
        lateness: float,
        changed: threading.Event,
    ) -> float:
        """Execute a task; return the instant at which the processor is free again.

        ``start`` is the begin on the host, ``origin`` the begin on the device, and ``lateness`` the delay of ``origin``
        by the host, in seconds.
        """
        processor_time = time.thread_time()
        try:
            result = item.work()
        except BaseException as failure:  # noqa: BLE001 - raised where the work is awaited
            # A failed task is not charged, and the program gets the error at once.
            busy = time.monotonic() - start
            item.end(None, failure, WorkTimes(start, busy, busy, 0.0, lateness))
            return origin
        busy = time.monotonic() - start
        processor_time = time.thread_time() - processor_time
        self.computed += processor_time
        charge = item.charge(processor_time)
        due = self._wait_until_due(origin, charge, start + busy, changed)
        free_from = max(due, start + busy)
        if not self._stop.is_set():
            duration = max(free_from, time.monotonic()) - origin
            deficit = max(0.0, busy - (due - origin))
            lateness += max(0.0, origin + duration - due)
            item.end(result, None, WorkTimes(origin, duration, busy, deficit, lateness))
        return free_from

    def _wait_until_due(
        self, origin: float, charge: float, busy_until: float, changed: threading.Event
    ) -> float:
        """Wait until ``LEAD_SECONDS`` before the due instant of a task on the device; return the due instant."""
        while True:
            # Cleared before the speed is read, since a change after the reading must end the wait.
            changed.clear()
            due = self._pace.end_time(origin, charge)
            remaining = max(due, busy_until) - LEAD_SECONDS - time.monotonic()
            if remaining <= 0 or self._stop.is_set():
                return due
            _wait_for_event(changed, remaining)


def request_precise_wakeups() -> None:
    """Ask the kernel to wake up the calling thread punctually; by default, it may do so up to 50 us later."""
    import ctypes

    # In nanoseconds; the kernel's default is 50,000.
    slack = ctypes.c_ulong(1000)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, slack, 0, 0, 0)


def _wait_for_event(event: threading.Event, seconds: float) -> None:
    """Wait for an event, at most ``seconds``; a separate function which tests replace."""
    event.wait(seconds)


class WaitingTime:
    """A meter of the process's waiting time for a processor of the host."""

    def __init__(self, excluded_threads: Collection[int] = ()) -> None:
        """``excluded_threads`` are the kernel IDs of threads that are not counted."""
        self._excluded_threads = frozenset(map(str, excluded_threads))
        self._last_counters = self._read_counters()

    def since_last(self) -> float:
        """Return the waiting time in seconds since the last call, summed over threads; 0 without kernel statistics."""
        now = self._read_counters()
        waited = 0
        for thread, nanoseconds in now.items():
            waited += nanoseconds - self._last_counters.get(thread, 0)
        self._last_counters = now
        return waited * 1e-9

    def _read_counters(self) -> dict[str, int]:
        """Return the nanoseconds that each thread has waited: the second field of its ``schedstat``."""
        counters = {}
        for task in _TASKS.iterdir():
            if task.name in self._excluded_threads:
                continue
            try:
                fields = (task / "schedstat").read_text().split()
                counters[task.name] = int(fields[1])
            except (OSError, IndexError):
                continue  # the thread has ended, or the kernel has no statistics
        return counters
