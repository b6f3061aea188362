"""Faults that struck, and how they were outlived."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.trace.events import Event
from testbed.trace.recovery import LAST_ROWS, METRICS, ROWS, faults, recovery_list
from tests.helpers import recorded
from tests.helpers.recorded import recorded_metrics


def test_recovery_runs_from_strike_over_detection_to_resumption() -> None:
    found = recorded_metrics()
    assert (found["faults"], found["recoveries"], found["unrecovered"]) == (1, 1, 0)
    assert found["recovery_time"] == pytest.approx(4.0 - 2.32)
    assert found["detection_time"] == pytest.approx(3.0 - 2.32)
    assert found["resume_time"] == pytest.approx(1.0)
    assert found["recovery_list"][0]["missing"] == ["b"]
    fault = found["fault_list"][0]
    assert (fault["struck"], fault["undone"], fault["recovered"]) == (2.32, 3.3, 4.0)
    assert fault["late"] == pytest.approx(0.02)


def test_a_recovery_that_the_host_prolonged() -> None:
    slow = {
        "span": "load",
        "start": 3.4,
        "duration": 0.5,
        "flops": 0.0,
        "busy": 0.5,
        "deficit": 0.5,
    }
    events = sorted(
        [*recorded.make_events(), Event(3.9, "b", "compute", slow)],
        key=lambda event: event.time,
    )
    found = recorded_metrics(events=events)
    assert found["recovery_list"][0]["deficit"] == pytest.approx(0.5)
    assert found["deficit_share"] == pytest.approx(0.01), (
        "what happens in a recovery says nothing of undisturbed steps"
    )
    assert found["verdict"]["reasons"] == [
        "computing slower than asked made up 29.8% of a recovery (at most 10%)"
    ]


def fault(time: float, action: str, target: str, phase: str = "strike") -> Event:
    fields = {"action": action, "target": target, "phase": phase, "intended": time}
    return Event(time, "testbed", "fault", fields)


def recovering(time: float, phase: str, **fields: Any) -> Event:
    return Event(time, "a", "recovery", {"phase": phase, **fields})


def values(*events: Event) -> dict[str, Any]:
    whole = sorted(
        [*recorded.make_events(faulty=False), *events], key=lambda event: event.time
    )
    record = recorded.make_record(events=whole)
    return {figure.name: figure.compute(record) for figure in METRICS}


def test_the_longest_of_several_recoveries_counts_in_each_of_its_parts() -> None:
    found = values(
        fault(0.5, "kill", "b"),
        recovering(0.9, "detected", missing=["b"]),
        fault(1.0, "kill", "b", "undo"),
        recovering(1.1, "resumed", step=0),
        fault(2.0, "kill", "b"),
        recovering(2.1, "detected", missing=["b"]),
        fault(2.3, "kill", "b", "undo"),
        recovering(2.8, "resumed", step=1),
    )
    assert found["detection_time"] == pytest.approx(0.4)
    assert found["resume_time"] == pytest.approx(0.7)
    assert found["recovery_time"] == pytest.approx(0.8)
    assert (found["faults"], found["recoveries"], found["unrecovered"]) == (2, 2, 0)
    assert (
        ROWS[0].note(found)
        == "the longest of {recoveries}, from the fault until work continued"
    )


def test_what_is_not_outlived_has_no_recovery_time() -> None:
    found = values(fault(0.5, "kill", "b"), recovering(0.9, "detected", missing=["b"]))
    assert (
        found["recoveries"],
        found["unrecovered"],
        found["recovery_time"],
        found["resume_time"],
    ) == (
        0,
        1,
        None,
        None,
    )
    assert found["detection_time"] == pytest.approx(0.4)
    assert LAST_ROWS[0].when is not None
    assert LAST_ROWS[0].when(found)


def test_a_detection_that_no_fault_explains_counts_from_itself() -> None:
    found = values(recovering(0.9, "detected"), recovering(1.4, "resumed", step=0))
    assert found["faults"] == 0
    assert found["detection_time"] is None
    assert (found["resume_time"], found["recovery_time"]) == (
        pytest.approx(0.5),
        pytest.approx(0.5),
    )


def test_what_mends_is_listed_and_not_counted_as_a_fault() -> None:
    whole = [
        *recorded.make_events(faulty=False),
        fault(2.0, "kill", "b"),
        fault(3.0, "restart", "b"),
    ]
    record = recorded.make_record(events=sorted(whole, key=lambda event: event.time))
    listed = faults(record)
    assert [(each["action"], each["mends"], each["undone"]) for each in listed] == [
        ("kill", False, 3.0),
        ("restart", True, None),
    ]
    assert (
        next(figure for figure in METRICS if figure.name == "faults").compute(record)
        == 1
    )


def test_a_recoverys_deficit_is_the_worst_devices_on_the_mean_of_its_processors() -> (
    None
):
    def late(time: float, device: str, seconds: float) -> Event:
        fields = {
            "span": "load",
            "start": time - 0.1,
            "duration": 0.1,
            "flops": 0.0,
            "busy": 0.1,
            "late": seconds,
        }
        return Event(time, device, "compute", fields)

    # The recovery is from 2.32 to 4.0: what ends at 2.2 or 4.2 is outside of it.
    work = [
        late(2.2, "a", 9.0),
        late(2.6, "a", 0.3),
        late(2.9, "b", 0.25),
        late(3.9, "b", 0.35),
        late(4.2, "b", 9.0),
    ]
    record = recorded.make_record(
        events=sorted([*recorded.make_events(), *work], key=lambda event: event.time)
    )
    assert recovery_list(record)[0]["deficit"] == pytest.approx(0.6)
    several = tuple(
        replace(spec, processors=4 if spec.name == "b" else 1)
        for spec in record.experiment.devices
    )
    record.experiment = replace(record.experiment, devices=several)
    assert recovery_list(record)[0]["deficit"] == pytest.approx(0.3), (
        "b's 0.6 s are of four processors"
    )


def test_a_method_adds_what_it_reports_of_its_own_recovery() -> None:
    record = recorded.make_record()
    record.describe_recovery = lambda item, _: {"redistributed": item.resumed}
    assert recovery_list(record)[0]["redistributed"] == 4.0
