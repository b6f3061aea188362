"""Step times of several devices, around recoveries and pauses, and the busiest device or link."""

from typing import Any

import pytest

from testbed.trace.events import Event, EventType
from testbed.trace.metrics import metrics
from testbed.trace.metrics_spec import MetricsSpec
from testbed.wire.framing import wire_bytes
from tests.helpers import recorded
from tests.testbed.trace.records import (
    columns_of,
    fault_event,
    in_order,
    recovery_event,
    steadiness,
)

WITH_PAUSES = MetricsSpec(
    events=(EventType("pause", "nothing was trained", pause=True),)
)
"""Metrics of a method whose event "pause" marks an interruption of its own."""


def metrics_of(events: list[Event], faulty: bool = False) -> dict[str, Any]:
    trial = recorded.make_trial() if faulty else recorded.make_trial(faults=())
    outcome = recorded.make_outcome(events=in_order(events))
    return metrics(outcome, trial.experiment, recorded.make_plan(), WITH_PAUSES)


def pause_event(time: float, seconds: float) -> Event:
    return Event(time, "a", "pause", {"seconds": seconds})


def step_event(time: float, device: str, number: int) -> Event:
    fields = {"step": number, "loss": 1.0, "samples": 32}
    return Event(time, device, "step", fields)


def test_step_times_before_and_after_fault() -> None:
    values = metrics_of(recorded.make_events(), faulty=True)
    assert values["step_time_before"] == pytest.approx(1.0)
    assert values["step_time_after"] == pytest.approx(1.0)
    assert values["step_time_mean_before"] == pytest.approx(1.0)
    assert values["step_time_mean_after"] == pytest.approx(1.0)


def test_run_without_fault_has_only_step_time_after() -> None:
    values = metrics_of(recorded.make_events(faulty=False))
    assert "step_time_before" not in values
    assert "step_time_mean_before" not in values
    assert values["step_time_after"] == pytest.approx(1.0)


def alternating_steps() -> list[Event]:
    """Return ten steps of 5 s until 50 s, then eight of 1 and 2 s in turn, of which a median is one or the other."""
    durations = [5.0] * 10 + [1.0, 2.0] * 4
    steps = []
    time = 0.0
    for number, seconds in enumerate(durations):
        time += seconds
        steps.append(step_event(time, "a", number))
    return steps


def test_mean_step_time_after_begins_at_last_pause() -> None:
    values = metrics_of([*alternating_steps(), pause_event(50.0, seconds=0.5)])
    assert values["step_time_mean_after"] == pytest.approx(1.5)
    assert values["step_time_after"] in (1.0, 1.5, 2.0)


def test_mean_step_time_before_is_between_last_pause_and_fault() -> None:
    disturbance = [
        pause_event(50.0, seconds=0.5),
        fault_event(58.5, "kill", "b"),
        recovery_event(58.6, "detected", step=15, missing=["b"]),
        recovery_event(58.7, "resumed", step=15, missing=["b"]),
    ]
    values = metrics_of([*alternating_steps(), *disturbance], faulty=True)
    # Steps of 1, 2, 1, 2 and 1 s end before the fault.
    assert values["step_time_mean_before"] == pytest.approx(7 / 5)


def test_step_with_pause_is_disturbed() -> None:
    pause = pause_event(2.9, seconds=0.5)
    values = metrics_of([*recorded.make_events(faulty=False), pause])
    assert steadiness(values) == [False, True, False, True, True]
    assert values["step_time_after"] == pytest.approx(1.0)


def test_step_time_after_permanent_throttle_begins_at_next_pause() -> None:
    # The method adapts to the throttle in a pause, and the steps after it count although the throttle persists.
    throttle = fault_event(1.5, "throttle", "b")
    pause = pause_event(2.0, seconds=0.1)
    values = metrics_of([*recorded.make_events(faulty=False), throttle, pause])
    assert values["step_time_after"] == pytest.approx(1.0)


def test_step_takes_time_since_previous_step_of_same_device() -> None:
    # a ends a step every second from 1.5 s, b every two seconds from 2.75 s.
    steps = []
    for number in range(4):
        steps.append(step_event(1.5 + number, "a", number))
        steps.append(step_event(2.75 + 2 * number, "b", number))
    values = metrics_of(steps)
    rows = columns_of(values["series"]["steps"], "device", "seconds")
    assert rows[:4] == [("a", 1.5), ("a", 1.0), ("b", 2.75), ("a", 1.0)]
    assert values["steps"] == 8
    assert values["steps_repeated"] == 0
    assert values["samples"] == 8 * 32
    # All but the first step of each device.
    assert values["steady_steps"] == 6
    assert values["step_time"] == pytest.approx(1.5)


@pytest.mark.parametrize("faulty", [False, True])
def test_busiest_device_of_recorded_run_computes_two_fifths_of_step(
    faulty: bool,
) -> None:
    # In each second a and b compute 0.4 s each, and a link carries 100 kB at 8 Mbit/s in 0.105 s.
    values = metrics_of(recorded.make_events(faulty=faulty), faulty=faulty)
    assert values["busiest_share"] == pytest.approx(0.4)


def test_busiest_share_of_link_includes_headers() -> None:
    sends = []
    for time in (1.9, 2.9, 3.9, 4.9):
        fields = {
            "peer": "b",
            "message": "m",
            "bytes": 800_000,
            "start": time - 0.5,
            "duration": 0.5,
        }
        sends.append(Event(time, "a", "send", fields))
    values = metrics_of([*recorded.make_events(faulty=False), *sends])
    # Each of four undisturbed steps of 1 s has two messages; the link carries a megabyte a second.
    seconds_per_step = (wire_bytes(100_000) + wire_bytes(800_000)) / 1e6
    assert values["busiest_share"] == pytest.approx(seconds_per_step)
