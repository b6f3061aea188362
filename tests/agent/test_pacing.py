"""Paced work of processors with a fake clock, and the waiting times that the kernel reports."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed_agent import pacing
from testbed_agent.pacing import (
    CATCH_UP_SECONDS,
    LEAD_SECONDS,
    Charge,
    DeviceTime,
    Pace,
    Processors,
    WaitingTime,
    WorkTimes,
    constant_charge,
    proportional_charge,
)
from tools.bench.paced import measure

START = 100.0
"""First instant of the fake clock."""


class Clock:
    """A clock advanced only by sleeping; each wake-up is late by ``lateness`` seconds."""

    def __init__(self) -> None:
        self.now = START
        self.lateness = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.lateness

    def wait(self, _event: threading.Event, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake_time = SimpleNamespace(monotonic=clock.monotonic, thread_time=clock.monotonic)
    monkeypatch.setattr(pacing, "time", fake_time)
    monkeypatch.setattr(pacing, "_wait_for_event", clock.wait)
    return clock


def do_nothing() -> None:
    pass


def always_begin(_instant: float) -> bool:
    return True


def ignore_end(*_: object) -> None:
    pass


class Recorder:
    """Records the ends of tasks."""

    def __init__(self, expected: int = 1) -> None:
        self.times: list[WorkTimes] = []
        self.failures: list[BaseException | None] = []
        self._expected = expected
        self._all_ended = threading.Event()

    def end(
        self, _result: object, failure: BaseException | None, times: WorkTimes
    ) -> None:
        self.times.append(times)
        self.failures.append(failure)
        if len(self.times) == self._expected:
            self._all_ended.set()

    def wait(self, seconds: float = 5) -> None:
        """Wait for the expected number of ends."""
        assert self._all_ended.wait(seconds)


def run_task(
    work: Callable[[], Any], charge: Charge, ready: float | None = None
) -> WorkTimes:
    """Return the times of a task on a processor of its own."""
    processors, recorder = Processors(), Recorder()
    processors.put(work, charge, always_begin, recorder.end, ready)
    recorder.wait()
    processors.close()
    return recorder.times[0]


def run_queued(works: Sequence[tuple[Callable[[], Any], float]]) -> list[WorkTimes]:
    """Return the times of tasks with constant charges, all of which are queued before the first one begins."""
    processors, recorder = Processors(), Recorder(len(works))
    gate = threading.Event()
    processors.put(gate.wait, constant_charge(0.0), always_begin, ignore_end)
    for work, seconds in works:
        processors.put(work, constant_charge(seconds), always_begin, recorder.end)
    gate.set()
    recorder.wait()
    processors.close()
    return recorder.times


def test_work_takes_charged_time(clock: Clock) -> None:
    (times,) = run_queued([(lambda: clock.sleep(0.1), 0.5)])
    assert times == WorkTimes(
        start=START,
        duration=pytest.approx(0.5),
        busy=pytest.approx(0.1),
        deficit=0.0,
        late=0.0,
    )


def test_slow_work_on_the_host_is_a_deficit(clock: Clock) -> None:
    first, second = run_queued([(lambda: clock.sleep(0.3), 0.1), (do_nothing, 0.1)])
    assert first.duration == first.busy == pytest.approx(0.3)
    assert first.deficit == pytest.approx(0.3 - 0.1)
    assert second.start == pytest.approx(START + 0.3)
    assert second.deficit == 0


def test_small_delays_of_waking_do_not_accumulate(clock: Clock) -> None:
    # Each result is 1 ms late, and the next task begins when the result was due.
    clock.lateness = LEAD_SECONDS + 0.001
    tasks = run_queued([(do_nothing, 0.01)] * 100)
    assert tasks[-1].start == pytest.approx(START + 99 * 0.01)
    for times in tasks:
        assert times.duration == pytest.approx(0.011)


def test_small_delays_of_waking_are_not_recorded(clock: Clock) -> None:
    # The result is still early, since it is handed over ahead of time.
    clock.lateness = LEAD_SECONDS / 2
    (times,) = run_queued([(do_nothing, 0.01)])
    assert times.duration == pytest.approx(0.01)


def test_results_are_handed_over_ahead_of_time(clock: Clock) -> None:
    processors, recorder = Processors(), Recorder()
    instants: list[float] = []

    def end(result: object, failure: BaseException | None, times: WorkTimes) -> None:
        instants.append(clock.now)
        recorder.end(result, failure, times)

    processors.put(do_nothing, constant_charge(0.01), always_begin, end)
    recorder.wait()
    processors.close()
    [times] = recorder.times
    due = START + 0.01
    assert instants == [pytest.approx(due - LEAD_SECONDS)]
    assert times.start + times.duration == pytest.approx(due)


def test_work_is_charged_from_triggering_event(clock: Clock) -> None:
    processors, recorder = Processors(), Recorder(expected=2)
    begin_instants: list[float] = []

    def begin(instant: float) -> bool:
        begin_instants.append(instant)
        return True

    charge = constant_charge(0.01)
    processors.put(do_nothing, charge, begin, recorder.end, ready=START - 0.002)
    # The second task waits for the end of the first one.
    processors.put(do_nothing, charge, begin, recorder.end, ready=START - 10.0)
    recorder.wait()
    processors.close()
    first, second = begin_instants
    assert first == pytest.approx(99.998)
    assert second == pytest.approx(100.008)
    assert recorder.times[0].start == pytest.approx(99.998)


def test_device_time_is_the_instant_of_the_latest_event(clock: Clock) -> None:
    device_time = DeviceTime(99.0)
    device_time.advance_to(98.0)
    assert device_time.latest == 99.0
    assert device_time.now() == START
    device_time.advance_to(100.5)
    assert device_time.now() == 100.5


def test_time_lost_in_a_pause_is_not_compensated(clock: Clock) -> None:
    clock.lateness = 3.0
    tasks = run_queued([(do_nothing, 0.01)] * 3)
    # The second task begins at the end of the first one, except for the time that may be compensated.
    first_end = START + 0.01 + 3.0 - LEAD_SECONDS
    assert tasks[1].start == pytest.approx(first_end - CATCH_UP_SECONDS)
    assert tasks[1].duration > 0.01


def divide_by_zero() -> float:
    return 1 / 0


def test_failed_work_ends_at_once(clock: Clock) -> None:
    processors, recorder = Processors(), Recorder()
    processors.put(divide_by_zero, constant_charge(10.0), always_begin, recorder.end)
    recorder.wait()
    processors.close()
    assert isinstance(recorder.failures[0], ZeroDivisionError)
    assert clock.now == START


def test_function_between_works_returns_also_after_the_end() -> None:
    processors = Processors()
    assert processors.between_works(lambda: 7) == 7
    processors.close()
    assert processors.between_works(lambda: 8) == 8
    with pytest.raises(ZeroDivisionError):
        Processors().between_works(divide_by_zero)


def test_withdrawn_work_is_skipped(clock: Clock) -> None:
    calls: list[str] = []
    processors = Processors()
    processors.put(
        lambda: calls.append("work"),
        constant_charge(1.0),
        lambda _instant: False,
        lambda *_: calls.append("end"),
    )
    # The function runs after the queued work.
    assert processors.between_works(lambda: list(calls)) == []
    processors.close()


def test_speed_applies_from_instant_of_change(clock: Clock) -> None:
    pace = Pace()
    pace.set(0.5)
    clock.now = 101.0
    assert pace.end_time(101.0, 0.2) == pytest.approx(101.0 + 0.2 / 0.5)
    clock.now = 101.1
    pace.set(0.25)
    # Until 101.1, half the speed has done 0.05 s of the charge.
    assert pace.end_time(101.0, 0.2) == pytest.approx(101.1 + 0.15 / 0.25)
    clock.now = 101.3
    pace.set(1.0)
    # From 101.1 to 101.3, a quarter of the speed has done another 0.05 s.
    assert pace.end_time(101.0, 0.2) == pytest.approx(101.3 + 0.1)
    assert pace.end_time(101.3, 0.2) == pytest.approx(101.5)
    assert pace.factor == 1.0


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_speed_must_be_positive_and_finite(factor: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Pace().set(factor)


def test_changed_speed_affects_running_work() -> None:
    pace = Pace()
    processors, recorder = Processors(pace=pace), Recorder()
    processors.put(do_nothing, constant_charge(10.0), always_begin, recorder.end)
    pace.set(1000.0)
    # Without the change, the work would take 10 s.
    recorder.wait(8)
    processors.close()
    assert recorder.times[0].duration < 8
    assert recorder.times[0].deficit == 0.0


def test_slowdown_multiplies_the_time_of_the_host(clock: Clock) -> None:
    times = run_task(lambda: clock.sleep(0.1), proportional_charge(5.0))
    assert times.duration == pytest.approx(5.0 * 0.1)
    assert times.late == 0.0


def test_late_begin_of_a_task_is_recorded(clock: Clock) -> None:
    times = run_task(do_nothing, constant_charge(0.01), ready=START - 0.1)
    assert times.deficit == 0.0
    assert times.late == pytest.approx(0.1 - CATCH_UP_SECONDS)


@pytest.mark.timed
def test_each_processor_runs_one_task_at_a_time() -> None:
    processors, recorder = Processors(2), Recorder(expected=3)
    ready = time.monotonic()
    for seconds in (0.2, 0.1, 0.2):
        processors.put(
            do_nothing, constant_charge(seconds), always_begin, recorder.end, ready
        )
    recorder.wait()
    processors.close()
    ends = [times.start + times.duration - ready for times in recorder.times]
    # The third task begins at the end of the second one, after 0.1 s.
    assert ends == pytest.approx([0.1, 0.2, 0.3], abs=0.03)


def test_changed_speed_affects_all_processors() -> None:
    pace = Pace()
    processors, recorder = Processors(2, pace), Recorder(expected=2)
    for _ in range(2):
        processors.put(do_nothing, constant_charge(10.0), always_begin, recorder.end)
    pace.set(1000.0)
    # Without the change, the work would take 10 s.
    recorder.wait(8)
    processors.close()


def write_kernel_counters(
    folder: Path, waiting_nanoseconds: dict[int, int | None]
) -> None:
    """Write the schedstat files of threads: time on a processor, time waiting for one, and number of time slices.

    The file of an ended thread (None) is empty.
    """
    for thread, nanoseconds in waiting_nanoseconds.items():
        content = "" if nanoseconds is None else f"5 {nanoseconds} 7\n"
        (folder / str(thread)).mkdir(exist_ok=True)
        (folder / str(thread) / "schedstat").write_text(content)


def test_waiting_time_is_counted_since_the_last_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_TASKS", tmp_path)
    second = 10**9
    write_kernel_counters(tmp_path, {1: second, 2: 5, 3: 0})
    waiting_time = WaitingTime(excluded_threads=[3])
    # Thread 1 has waited for another 2 s, and the new thread 4 for 1 s; thread 2 has ended, and thread 3 is excluded.
    write_kernel_counters(tmp_path, {1: 3 * second, 2: None, 3: 9 * second, 4: second})
    assert waiting_time.since_last() == pytest.approx(2.0 + 1.0)
    assert waiting_time.since_last() == 0.0


def test_counters_of_this_kernel_are_readable() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    waiting_time = WaitingTime()
    stop.set()
    thread.join()
    assert waiting_time.since_last() >= 0.0


def test_charges_of_successive_works_add_up() -> None:
    charges = [0.005, 0.01]
    measurement = measure(charges, 0.05)
    # The last result is handed over before it is due.
    assert measurement["wall"] >= 0.05 - LEAD_SECONDS
    # A busy host that is late with some works completes fewer of them.
    spans = measurement["spans"]
    measured_charges = [charge for charge, *_ in spans]
    assert measured_charges == list(islice(cycle(charges), len(spans)))
    total = 0.0
    for charge, duration, *_ in spans:
        assert duration >= charge - 0.003
        total += duration
    assert total >= 0.05 - 1e-6
