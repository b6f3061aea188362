"""Phases of a run before, during and after faults, with their steps and requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.phases import TABLE, phases
from tests.helpers import recorded
from tests.testbed.trace.records import (
    columns_of,
    fault_event,
    in_order,
    with_fields,
)


def step_events(times: list[float], evaluate: bool = False) -> list[Event]:
    """Return a step of the source at each time, preceded by an evaluation if asked for."""
    events = []
    for number, time in enumerate(times):
        if evaluate:
            fields = {"accuracy": 0.5, "loss": 1.0}
            events.append(Event(time - 0.01, "source", "evaluate", fields))
        step = {"step": number, "loss": 1.0, "samples": 8}
        events.append(Event(time, "source", "step", step))
    return events


def temporary_fault(begin: float, end: float, action: str, target: str) -> list[Event]:
    return [
        fault_event(begin, action, target),
        fault_event(end, action, target, "undo"),
    ]


def metrics_until(end: float, *groups: list[Event]) -> dict[str, Any]:
    """Return the metrics of a run with an end time."""
    finished = Event(end, "source", "state", {"state": "finished"})
    return metrics(
        recorded.make_outcome(events=in_order(*groups, [finished])),
        recorded.make_trial().experiment,
        recorded.make_plan(),
    )


SLOWER_FROM_4_TO_10 = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 11.0, 12.0, 13.0]
"""Ends of steps of 1 s; of 2 s between 4 and 10 s."""
PERMANENTLY_SLOWER = [0.5, 1.0, 3.0, 5.0, 7.0]


def test_temporary_fault_divides_run_into_three_phases() -> None:
    throttle = temporary_fault(4.0, 10.0, "throttle", "worker1")
    values = metrics_until(13.0, step_events(SLOWER_FROM_4_TO_10), throttle)
    # Every step but the first, which is warm-up, lies entirely in one phase.
    rows = columns_of(values["phase_list"], "name", "steps", "step_time")
    assert rows == [
        ("before", 3, 1.0),
        ("throttle worker1", 3, 2.0),
        ("after", 3, 1.0),
    ]
    assert values["step_time_disturbed"] == 2.0
    assert values["step_time"] == 1.0


def test_permanent_throttle_has_step_time() -> None:
    throttle = [fault_event(0.2, "throttle", "worker1")]
    values = metrics_until(7.0, step_events(PERMANENTLY_SLOWER), throttle)
    assert values["steady_steps"] == 0
    assert values["step_time_disturbed"] == 2.0
    rows = columns_of(values["phase_list"], "name", "steps")
    assert rows == [("before", 0), ("throttle worker1", 4)]


def test_overlapping_faults_are_one_phase_and_equal_conditions_are_merged() -> None:
    faults = [
        *temporary_fault(2.0, 8.0, "degrade", "a-b"),
        *temporary_fault(4.0, 6.0, "throttle", "worker1"),
        *temporary_fault(10.0, 11.0, "pause", "worker2"),
    ]
    each_second = [float(second) for second in range(1, 14)]
    values = metrics_until(13.0, step_events(each_second), faults)
    # The degradation alone lasts from 2 to 4 s and from 6 to 8 s.
    rows = columns_of(values["phase_list"], "name", "seconds", "steps")
    assert rows == [
        ("before", 2.0, 1),
        ("degrade a-b", 4.0, 4),
        ("degrade a-b + throttle worker1", 2.0, 2),
        ("between", 2.0, 2),
        ("pause worker2", 1.0, 1),
        ("after", 2.0, 2),
    ]


def test_evaluation_at_end_of_every_round_belongs_to_step() -> None:
    values = metrics_until(4.0, step_events([1.0, 2.0, 3.0, 4.0], evaluate=True))
    # An evaluation after some steps only would disturb these steps.
    assert values["steady_steps"] == 3
    assert values["step_time"] == pytest.approx(1.0)
    assert values["phase_list"] == []


def test_rounds_without_killed_device_are_phase() -> None:
    # Rounds without the device have fewer samples; within the phase this is the usual number.
    steps = with_fields(
        step_events(SLOWER_FROM_4_TO_10, evaluate=True),
        lambda event: 4.0 < event.time <= 10.0,
        samples=6,
    )
    kill = temporary_fault(4.0, 10.0, "kill", "worker1")
    values = metrics_until(13.0, steps, kill)
    rows = columns_of(values["phase_list"], "name", "steps", "step_time")
    assert rows == [
        ("before", 3, 1.0),
        ("kill worker1", 3, 2.0),
        ("after", 3, 1.0),
    ]


Window = tuple[str, int, int]
"""Name of a fault, with its begin and end in seconds."""


def random_faults(seed: int) -> tuple[list[Event], list[Window]]:
    """Return the events of up to four faults in 20 s, and their windows; some faults never end."""
    draw = random.Random(seed)
    events, windows = [], []
    for number in range(draw.randint(0, 4)):
        begin = draw.randint(0, 18)
        end = draw.randint(begin, 20)
        action, target = draw.choice(["throttle", "degrade"]), f"worker{number}"
        events.append(fault_event(float(begin), action, target))
        if draw.random() < 0.8:
            events.append(fault_event(float(end), action, target, "undo"))
        else:
            end = 20
        windows.append((f"{action} {target}", begin, end))
    return events, windows


def seconds_by_faults(windows: list[Window]) -> dict[frozenset[str], int]:
    """Return for each set of faults the number of seconds in which exactly these are in force."""
    seconds: dict[frozenset[str], int] = {}
    for second in range(20):
        active = set()
        for name, begin, end in windows:
            if begin <= second < end:
                active.add(name)
        key = frozenset(active)
        seconds[key] = seconds.get(key, 0) + 1
    return seconds


@given(st.integers(0, 10**6))
def test_phases_partition_run_and_are_named_after_faults_in_force(seed: int) -> None:
    faults, windows = random_faults(seed)
    steps = step_events([float(second) for second in range(1, 20)])
    finished = Event(20.0, "a", "state", {"state": "finished"})
    record = recorded.make_record(events=in_order(steps, faults, [finished]))
    rows = phases(record)
    if not rows:
        # A run has no phases if faults last for all of it or for no time.
        for _, begin, end in windows:
            assert begin in (0, 20)
            assert end in (0, 20)
        return
    expected = seconds_by_faults(windows)
    expected_undisturbed = expected.pop(frozenset(), 0)
    disturbed: dict[frozenset[str], float] = {}
    undisturbed = 0.0
    for row in rows:
        # Names of faults have a target, and "before", "between" and "after" have none.
        if " " in row["name"]:
            disturbed[frozenset(row["name"].split(" + "))] = row["seconds"]
        else:
            undisturbed += row["seconds"]
    assert disturbed == expected
    assert undisturbed == expected_undisturbed
    assert undisturbed + sum(disturbed.values()) == pytest.approx(20.0)


def test_request_across_phase_boundary_is_not_counted() -> None:
    requests = []
    for number, time in enumerate((1.5, 4.5, 6.0, 9.0)):
        fields = {"request": number, "latency": 1.0}
        requests.append(Event(time, "source", "request", fields))
    finished = Event(10.0, "a", "state", {"state": "finished"})
    throttle = temporary_fault(4.0, 8.0, "throttle", "b")
    record = recorded.make_record(events=in_order(requests, throttle, [finished]))
    # The second request was in progress when the fault struck; the last one began as the fault ended.
    rows = columns_of(phases(record), "name", "requests", "latency")
    assert rows == [("before", 1, 1.0), ("throttle b", 1, 1.0), ("after", 1, 1.0)]


def test_table_omits_phase_without_steps_and_requests() -> None:
    throttle = [fault_event(0.2, "throttle", "worker1")]
    values = metrics_until(7.0, step_events(PERMANENTLY_SLOWER), throttle)
    assert len(values["phase_list"]) == 2
    assert [row["name"] for row in TABLE.listed(values)] == ["throttle worker1"]


def test_name_of_phase_with_many_faults_is_shortened_in_report() -> None:
    format_name = TABLE.columns[0].of
    eight = " + ".join(f"kill d{number}" for number in range(8))
    assert format_name({"name": eight}) == eight
    hundred = " + ".join(["kill a", "kill b"] + ["pause c"] * 98)
    assert format_name({"name": hundred}) == "kill a + kill b + 98 more"
