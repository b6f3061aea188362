"""Steps and requests by phase: before, during and after what disturbs a run."""

from __future__ import annotations

import pytest

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from tests.helpers import recorded


def steps(times: list[float], evaluate: bool = False) -> list[Event]:
    """Return a step of the source at each of these times, with an evaluation right before each if asked for."""
    found = []
    for number, time in enumerate(times):
        if evaluate:
            found.append(Event(time - 0.01, "source", "evaluate", {"accuracy": 0.5, "loss": 1.0}))
        found.append(Event(time, "source", "step", {"step": number, "loss": 1.0, "samples": 8}))
    return found


def fault(time: float, action: str, target: str, phase: str = "strike") -> Event:
    return Event(time, "testbed", "fault", {"action": action, "target": target, "phase": phase, "intended": time})


def measured(events: list[Event], end: float):
    ended = Event(end, "source", "state", {"state": "finished"})
    events = sorted([*events, ended], key=lambda event: event.time)
    return metrics(recorded.outcome(events=events), recorded.trial().experiment, recorded.plan())


SLOW = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 11.0, 12.0, 13.0]
"""A second a step; two seconds between 4 and 10."""


def test_a_fault_that_is_undone_divides_a_run_in_three() -> None:
    strikes = [fault(4.0, "throttle", "worker1"), fault(10.0, "throttle", "worker1", "undo")]
    found = measured([*steps(SLOW), *strikes], 13.0)
    assert [(each["name"], each["steps"], each["step_time"]) for each in found["phase_list"]] == [
        ("before", 3, 1.0),
        ("throttle worker1", 3, 2.0),
        ("after", 3, 1.0),
    ]
    assert found["step_time_disturbed"] == 2.0
    assert found["step_time"] == 1.0


def test_a_throttle_to_the_end_has_a_step_time() -> None:
    found = measured([*steps([0.5, 1.0, 3.0, 5.0, 7.0]), fault(0.2, "throttle", "worker1")], 7.0)
    assert found["steady_steps"] == 0
    assert found["step_time_disturbed"] == 2.0
    assert [(each["name"], each["steps"]) for each in found["phase_list"]] == [("before", 0), ("throttle worker1", 4)]


def test_disturbances_at_once_are_a_phase_of_their_own_and_pieces_of_one_kind_are_one() -> None:
    strikes = [
        fault(2.0, "degrade", "a-b"),
        fault(4.0, "throttle", "worker1"),
        fault(6.0, "throttle", "worker1", "undo"),
        fault(8.0, "degrade", "a-b", "undo"),
        fault(10.0, "pause", "worker2"),
        fault(11.0, "pause", "worker2", "undo"),
    ]
    found = measured([*steps([float(each) for each in range(1, 14)]), *strikes], 13.0)
    assert [(each["name"], each["seconds"], each["steps"]) for each in found["phase_list"]] == [
        ("before", 2.0, 1),
        ("degrade a-b", 4.0, 4),
        ("degrade a-b + throttle worker1", 2.0, 2),
        ("between", 2.0, 2),
        ("pause worker2", 1.0, 1),
        ("after", 2.0, 2),
    ]


def test_where_every_round_ends_with_an_evaluation_it_belongs_to_the_step() -> None:
    found = measured(steps([1.0, 2.0, 3.0, 4.0], evaluate=True), 4.0)
    assert found["steady_steps"] == 3
    assert found["step_time"] == pytest.approx(1.0)
    assert found["phase_list"] == []


def test_rounds_without_a_device_that_is_out_are_a_phase() -> None:
    def sized(event: Event) -> Event:
        return event._replace(fields={**event.fields, "samples": 6}) if 4.0 < event.time <= 10.0 else event

    strikes = [fault(4.0, "kill", "worker1"), fault(10.0, "kill", "worker1", "undo")]
    found = measured([*map(sized, steps(SLOW, evaluate=True)), *strikes], 13.0)
    assert [(each["name"], each["steps"], each["step_time"]) for each in found["phase_list"]] == [
        ("before", 3, 1.0),
        ("kill worker1", 3, 2.0),
        ("after", 3, 1.0),
    ]
