"""Steps and requests by phase: before, during and after what disturbs a run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.phases import TABLE, phases
from tests.helpers import recorded


def steps(times: list[float], evaluate: bool = False) -> list[Event]:
    """Return a step of the source at each of these times, with an evaluation right before each if asked for."""
    found = []
    for number, time in enumerate(times):
        if evaluate:
            found.append(
                Event(time - 0.01, "source", "evaluate", {"accuracy": 0.5, "loss": 1.0})
            )
        found.append(
            Event(time, "source", "step", {"step": number, "loss": 1.0, "samples": 8})
        )
    return found


def fault(time: float, action: str, target: str, phase: str = "strike") -> Event:
    return Event(
        time,
        "testbed",
        "fault",
        {"action": action, "target": target, "phase": phase, "intended": time},
    )


def measured(events: list[Event], end: float):
    ended = Event(end, "source", "state", {"state": "finished"})
    events = sorted([*events, ended], key=lambda event: event.time)
    return metrics(
        recorded.make_outcome(events=events),
        recorded.make_trial().experiment,
        recorded.make_plan(),
    )


SLOW = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 11.0, 12.0, 13.0]
"""A second a step; two seconds between 4 and 10."""


def test_a_fault_that_is_undone_divides_a_run_in_three() -> None:
    strikes = [
        fault(4.0, "throttle", "worker1"),
        fault(10.0, "throttle", "worker1", "undo"),
    ]
    found = measured([*steps(SLOW), *strikes], 13.0)
    assert [
        (each["name"], each["steps"], each["step_time"]) for each in found["phase_list"]
    ] == [
        ("before", 3, 1.0),
        ("throttle worker1", 3, 2.0),
        ("after", 3, 1.0),
    ]
    assert found["step_time_disturbed"] == 2.0
    assert found["step_time"] == 1.0


def test_a_throttle_to_the_end_has_a_step_time() -> None:
    found = measured(
        [*steps([0.5, 1.0, 3.0, 5.0, 7.0]), fault(0.2, "throttle", "worker1")], 7.0
    )
    assert found["steady_steps"] == 0
    assert found["step_time_disturbed"] == 2.0
    assert [(each["name"], each["steps"]) for each in found["phase_list"]] == [
        ("before", 0),
        ("throttle worker1", 4),
    ]


def test_disturbances_at_once_are_a_phase_of_their_own_and_pieces_of_one_kind_are_one() -> (
    None
):
    strikes = [
        fault(2.0, "degrade", "a-b"),
        fault(4.0, "throttle", "worker1"),
        fault(6.0, "throttle", "worker1", "undo"),
        fault(8.0, "degrade", "a-b", "undo"),
        fault(10.0, "pause", "worker2"),
        fault(11.0, "pause", "worker2", "undo"),
    ]
    found = measured([*steps([float(each) for each in range(1, 14)]), *strikes], 13.0)
    assert [
        (each["name"], each["seconds"], each["steps"]) for each in found["phase_list"]
    ] == [
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
        return (
            event._replace(fields={**event.fields, "samples": 6})
            if 4.0 < event.time <= 10.0
            else event
        )

    strikes = [fault(4.0, "kill", "worker1"), fault(10.0, "kill", "worker1", "undo")]
    found = measured([*map(sized, steps(SLOW, evaluate=True)), *strikes], 13.0)
    assert [
        (each["name"], each["steps"], each["step_time"]) for each in found["phase_list"]
    ] == [
        ("before", 3, 1.0),
        ("kill worker1", 3, 2.0),
        ("after", 3, 1.0),
    ]


@given(st.integers(0, 10**6))
def test_phases_cover_the_run_once_and_are_named_after_what_goes_on_at_each_instant(
    seed: int,
) -> None:
    draw = random.Random(seed)
    events, windows = [], []
    for number in range(draw.randint(0, 4)):
        begin = draw.randint(0, 18)
        end = draw.randint(begin, 20)
        action, target = draw.choice(["throttle", "degrade"]), f"worker{number}"
        events.append(fault(float(begin), action, target))
        if draw.random() < 0.8:
            events.append(fault(float(end), action, target, "undo"))
        else:
            end = 20
        windows.append((f"{action} {target}", begin, end))
    ended = Event(20.0, "a", "state", {"state": "finished"})
    ordered = sorted(
        [*steps([float(each) for each in range(1, 20)]), *events],
        key=lambda event: event.time,
    )
    record = recorded.make_record(events=[*ordered, ended])
    found = {phase["name"]: phase["seconds"] for phase in phases(record)}
    seconds: dict[frozenset[str], float] = {}
    for second in range(20):
        active = frozenset(
            name for name, begin, end in windows if begin <= second < end
        )
        seconds[active] = seconds.get(active, 0) + 1
    named = {
        frozenset(name.split(" + ")): each
        for name, each in found.items()
        if " " in name
    }
    quiet = sum(each for name, each in found.items() if " " not in name)
    if found:
        assert named == {active: each for active, each in seconds.items() if active}
        assert quiet == seconds.get(frozenset(), 0)
        assert sum(found.values()) == pytest.approx(20.0)
    else:
        assert all(begin in (0, 20) and end in (0, 20) for _, begin, end in windows)


def test_requests_count_where_they_lie_whole() -> None:
    served = [
        Event(time, "source", "request", {"request": place, "latency": 1.0})
        for place, time in enumerate((1.5, 4.5, 6.0, 9.0))
    ]
    ended = Event(10.0, "a", "state", {"state": "finished"})
    strikes = [fault(4.0, "throttle", "b"), fault(8.0, "throttle", "b", "undo")]
    events = sorted([*served, *strikes, ended], key=lambda event: event.time)
    found = phases(recorded.make_record(events=events))
    # The second was under way when the fault struck; the last began as it was undone.
    assert [(each["name"], each["requests"], each["latency"]) for each in found] == [
        ("before", 1, 1.0),
        ("throttle b", 1, 1.0),
        ("after", 1, 1.0),
    ]


def test_a_phase_with_neither_steps_nor_requests_is_no_row_of_the_table() -> None:
    found = measured(
        [*steps([0.5, 1.0, 3.0, 5.0, 7.0]), fault(0.2, "throttle", "worker1")], 7.0
    )
    assert len(found["phase_list"]) == 2
    assert [each["name"] for each in TABLE.listed(found)] == ["throttle worker1"]


def test_a_phase_of_hundreds_of_faults_has_a_short_name_in_the_report() -> None:
    named = TABLE.columns[0].of
    few, many = (
        " + ".join(f"kill d{number}" for number in range(8)),
        " + ".join(["kill a", "kill b"] + ["pause c"] * 98),
    )
    assert named({"name": few}) == few
    assert named({"name": many}) == "kill a + kill b + 98 more"
