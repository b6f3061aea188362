"""Paced work against a clock of the test's own, and what the host keeps a device waiting for."""

from __future__ import annotations

import math
import threading
import time
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed_agent import pacing
from testbed_agent.pacing import (
    CATCH_UP_SECONDS,
    LEAD_SECONDS,
    DeviceTime,
    Pace,
    Processors,
    WaitingTime,
    WorkTimes,
    constant_charge,
    proportional_charge,
)
from tools.bench.paced import measure


class Clock:
    """Sleeping moves it, and waking up takes ``lateness`` more."""

    def __init__(self) -> None:
        self.now = 100.0
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
    monkeypatch.setattr(
        pacing,
        "time",
        SimpleNamespace(monotonic=clock.monotonic, thread_time=clock.monotonic),
    )
    monkeypatch.setattr(pacing, "_wait_for_event", clock.wait)
    return clock


def perform(processors: Processors, works: list[tuple[Any, float]]) -> list[WorkTimes]:
    """Queue works behind a first one, so that all wait before any begins; return how they went."""
    measured: list[WorkTimes] = []
    gate, over = threading.Event(), threading.Event()
    processors.put(gate.wait, constant_charge(0.0), lambda _: True, lambda *_: None)
    for work, charge in works:
        processors.put(
            work,
            constant_charge(charge),
            lambda _: True,
            lambda _result, _failure, how: measured.append(how),
        )
    processors.put(
        lambda: None, constant_charge(0.0), lambda _: True, lambda *_: over.set()
    )
    gate.set()
    assert over.wait(5)
    processors.close()
    return measured


def test_work_takes_what_is_charged(clock: Clock) -> None:
    (how,) = perform(Processors(), [(lambda: clock.sleep(0.1), 0.5)])
    assert how == WorkTimes(100.0, pytest.approx(0.5), pytest.approx(0.1), 0.0, 0.0)


def test_a_slow_host_is_a_deficit(clock: Clock) -> None:
    first, second = perform(
        Processors(), [(lambda: clock.sleep(0.3), 0.1), (lambda: None, 0.1)]
    )
    assert first.duration == first.busy == pytest.approx(0.3)
    assert first.deficit == pytest.approx(0.2)
    assert second.start == pytest.approx(100.3)
    assert second.deficit == 0


def test_small_delays_of_waking_do_not_accumulate(clock: Clock) -> None:
    clock.lateness = LEAD_SECONDS + 0.001
    measured = perform(Processors(), [(lambda: None, 0.01)] * 100)
    assert measured[-1].start == pytest.approx(100.99)
    assert all(how.duration == pytest.approx(0.011) for how in measured)


def test_small_delays_of_waking_are_not_recorded(clock: Clock) -> None:
    clock.lateness = LEAD_SECONDS / 2
    (how,) = perform(Processors(), [(lambda: None, 0.01)])
    assert how.duration == pytest.approx(0.01)


def test_results_are_handed_over_ahead_of_time(clock: Clock) -> None:
    processors, over = Processors(), threading.Event()
    handed_over: list[float] = []

    def end(_result: object, _failure: BaseException | None, how: WorkTimes) -> None:
        handed_over.extend([clock.now, how.start + how.duration])
        over.set()

    processors.put(lambda: None, constant_charge(0.01), lambda _: True, end)
    assert over.wait(5)
    processors.close()
    assert handed_over == [pytest.approx(100.01 - LEAD_SECONDS), pytest.approx(100.01)]


def test_work_is_charged_from_the_event_that_caused_it(clock: Clock) -> None:
    processors, over = Processors(), threading.Event()
    began: list[float] = []
    measured: list[WorkTimes] = []

    def begin(instant: float) -> bool:
        began.append(instant)
        return True

    processors.put(
        lambda: None,
        constant_charge(0.01),
        begin,
        lambda _result, _failure, how: measured.append(how),
        ready=99.998,
    )
    processors.put(
        lambda: None, constant_charge(0.01), begin, lambda *_: over.set(), ready=90.0
    )
    assert over.wait(5)
    processors.close()
    assert began == [pytest.approx(99.998), pytest.approx(100.008)]
    assert measured[0].start == pytest.approx(99.998)


def test_device_time_is_the_instant_of_the_latest_event(clock: Clock) -> None:
    time = DeviceTime(99.0)
    time.advance_to(98.0)
    assert time.latest == 99.0
    assert time.now() == 100.0
    time.advance_to(100.5)
    assert time.now() == 100.5


def test_time_lost_in_a_pause_is_not_compensated(clock: Clock) -> None:

    works: list[tuple[Any, float]] = [(lambda: None, 0.01)] * 3
    clock.lateness = 3.0
    measured = perform(Processors(), works)
    assert measured[1].start == pytest.approx(103.01 - LEAD_SECONDS - CATCH_UP_SECONDS)
    assert measured[1].duration > 0.01


def test_work_that_fails_is_over_at_once(clock: Clock) -> None:
    failures: list[BaseException | None] = []
    processors = Processors()
    over = threading.Event()

    def end(
        _result: object, failure: BaseException | None, _measured: WorkTimes
    ) -> None:
        failures.append(failure)
        over.set()

    processors.put(lambda: 1 // 0, constant_charge(10.0), lambda _: True, end)
    assert over.wait(5)
    assert isinstance(failures[0], ZeroDivisionError)
    assert clock.now == 100.0
    assert processors.between_works(lambda: 7) == 7
    processors.close()
    assert processors.between_works(lambda: 8) == 8
    with pytest.raises(ZeroDivisionError):
        Processors().between_works(lambda: 1 // 0)


def test_work_that_nobody_awaits_is_skipped(clock: Clock) -> None:
    done: list[int] = []
    processors = Processors()
    processors.put(
        lambda: done.append(1),
        constant_charge(1.0),
        lambda _: False,
        lambda *_: done.append(2),
    )
    assert processors.between_works(lambda: list(done)) == []
    processors.close()


def test_a_throttled_processor_takes_longer_from_that_moment_on(clock: Clock) -> None:
    pace = Pace()
    pace.set(0.5)
    clock.now += 1.0
    assert pace.due(101.0, 0.2) == pytest.approx(101.4)
    clock.now += 0.1
    pace.set(0.25)  # 0.05 of 0.2 is done by now
    assert pace.due(101.0, 0.2) == pytest.approx(101.1 + 0.15 / 0.25)
    clock.now += 0.2
    pace.set(1.0)
    assert pace.due(101.0, 0.2) == pytest.approx(101.3 + 0.1)
    assert pace.due(101.3, 0.2) == pytest.approx(101.5)
    assert pace.factor == 1.0
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            pace.set(factor)


def test_work_under_way_feels_a_change_of_speed() -> None:
    pace = Pace()
    processors, over = Processors(pace=pace), threading.Event()
    measured: list[WorkTimes] = []

    def end(_result: object, _failure: BaseException | None, how: WorkTimes) -> None:
        measured.append(how)
        over.set()

    processors.put(lambda: None, constant_charge(10.0), lambda _: True, end)
    pace.set(1000.0)
    assert over.wait(8)
    processors.close()
    assert measured[0].duration < 8  # instead of 10
    assert measured[0].deficit == 0.0


def test_slowdown_multiplies_what_the_host_needs(clock: Clock) -> None:
    processors, over = Processors(), threading.Event()
    measured: list[WorkTimes] = []

    def end(_result: object, _failure: BaseException | None, how: WorkTimes) -> None:
        measured.append(how)
        over.set()

    processors.put(
        lambda: clock.sleep(0.1), proportional_charge(5.0), lambda _: True, end
    )
    assert over.wait(5)
    processors.close()
    assert measured[0].duration == pytest.approx(0.5)
    assert measured[0].late == 0.0


def test_late_begin_of_a_task_is_recorded(clock: Clock) -> None:
    processors, over = Processors(), threading.Event()
    measured: list[WorkTimes] = []

    def end(_result: object, _failure: BaseException | None, how: WorkTimes) -> None:
        measured.append(how)
        over.set()

    processors.put(lambda: None, constant_charge(0.01), lambda _: True, end, ready=99.9)
    assert over.wait(5)
    processors.close()
    assert measured[0].deficit == 0.0
    assert measured[0].late == pytest.approx(0.1 - CATCH_UP_SECONDS)


@pytest.mark.timed
def test_each_processor_runs_one_task_at_a_time() -> None:
    processors, over = Processors(2), threading.Event()
    measured: list[WorkTimes] = []

    def end(_result: object, _failure: BaseException | None, how: WorkTimes) -> None:
        measured.append(how)
        if len(measured) == 3:
            over.set()

    ready = time.monotonic()
    for charge in (0.2, 0.1, 0.2):
        processors.put(
            lambda: None, constant_charge(charge), lambda _: True, end, ready
        )
    assert over.wait(5)
    processors.close()
    ends = [how.start + how.duration - ready for how in measured]
    # The third begins when the second is over.
    assert ends == pytest.approx([0.1, 0.2, 0.3], abs=0.03)


def test_all_processors_feel_a_change_of_speed() -> None:
    pace = Pace()
    processors, over = Processors(2, pace), threading.Semaphore(0)
    for _ in range(2):
        processors.put(
            lambda: None,
            constant_charge(10.0),
            lambda _: True,
            lambda *_: over.release(),
        )
    pace.set(1000.0)
    assert over.acquire(timeout=8)  # not 10
    assert over.acquire(timeout=8)
    processors.close()


def counted(folder: Path, **threads: object) -> None:
    """Write what the kernel counted of some threads: time on a processor, waiting for one, and how often."""
    for number, nanoseconds in threads.items():
        (folder / number[1:]).mkdir(exist_ok=True)
        (folder / number[1:] / "schedstat").write_text(
            f"5 {nanoseconds} 7\n" if nanoseconds is not None else ""
        )


def test_waiting_time_is_that_since_the_last_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "_TASKS", tmp_path)
    counted(tmp_path, t1=10**9, t2=5, t3=0)
    found = WaitingTime(without=[3])
    counted(
        tmp_path, t1=3 * 10**9, t2=None, t3=9 * 10**9, t4=10**9
    )  # one has ended, one begun
    assert found.since_last() == pytest.approx(3.0)
    assert found.since_last() == 0.0


def test_the_kernel_of_this_host_is_understood() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    found = WaitingTime()
    over.set()
    thread.join()
    assert found.since_last() >= 0.0


def test_work_takes_what_it_is_charged_one_after_the_other() -> None:
    found = measure([0.005, 0.01], 0.05)
    # The last result is handed over a little before the device is done with it.
    assert found["wall"] >= 0.05 - LEAD_SECONDS
    charges = [charge for charge, *_ in found["spans"]]
    assert charges == list(
        islice(cycle([0.005, 0.01]), len(charges))
    )  # fewer where the host is late with some
    assert all(duration >= charge - 0.003 for charge, duration, *_ in found["spans"])
    assert sum(duration for _, duration, *_ in found["spans"]) >= 0.05 - 1e-6
