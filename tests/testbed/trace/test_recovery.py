"""Metrics of faults and recoveries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.trace.events import Event
from testbed.trace.recovery import LAST_ROWS, METRICS, ROWS, faults, recovery_list
from tests.helpers import recorded
from tests.helpers.recorded import recorded_metrics
from tests.testbed.trace.records import (
    columns_of,
    fault_event,
    in_order,
    metric_values,
    recovery_event,
)

STRUCK, DETECTED, RESUMED = 2.32, 3.0, 4.0
"""Times of the recorded run's kill and its recovery."""


def test_recovery_lasts_from_fault_through_detection_until_resumption() -> None:
    metrics = recorded_metrics()
    assert metrics["faults"] == 1
    assert metrics["recoveries"] == 1
    assert metrics["unrecovered"] == 0
    assert metrics["recovery_time"] == pytest.approx(RESUMED - STRUCK)
    assert metrics["detection_time"] == pytest.approx(DETECTED - STRUCK)
    assert metrics["resume_time"] == pytest.approx(RESUMED - DETECTED)
    assert metrics["recovery_list"][0]["missing"] == ["b"]
    rows = columns_of(metrics["fault_list"], "struck", "undone", "recovered")
    assert rows == [(STRUCK, 3.3, RESUMED)]
    # Intended at 2.3 s.
    assert metrics["fault_list"][0]["late"] == pytest.approx(0.02)


def load_event(end: float, device: str, seconds: float, **lateness: float) -> Event:
    """Return the event of loading weights in a recovery."""
    fields = {"span": "load", "start": end - seconds, "duration": seconds}
    fields |= {"flops": 0.0, "busy": seconds, **lateness}
    return Event(end, device, "compute", fields)


def test_recovery_prolonged_by_host_makes_run_untrusted() -> None:
    slow = load_event(3.9, "b", 0.5, deficit=0.5)
    metrics = recorded_metrics(events=in_order(recorded.make_events(), [slow]))
    assert metrics["recovery_list"][0]["deficit"] == pytest.approx(0.5)
    # Undisturbed steps have a deficit of their own, to which the recovery does not add.
    assert metrics["deficit_share"] == pytest.approx(0.01)
    # 0.5 s of 4.0 - 2.32 s.
    assert metrics["verdict"]["reasons"] == [
        "computing slower than asked made up 29.8% of a recovery (at most 10%)"
    ]


def recovery_metrics(*events: Event) -> dict[str, Any]:
    """Return the metrics of a run with only these faults and recoveries."""
    undisturbed = recorded.make_events(faulty=False)
    record = recorded.make_record(events=in_order(undisturbed, events))
    return metric_values(METRICS, record)


def test_longest_of_several_recoveries_counts_for_each_part() -> None:
    metrics = recovery_metrics(
        fault_event(0.5, "kill", "b"),
        recovery_event(0.9, "detected", missing=["b"]),
        fault_event(1.0, "kill", "b", "undo"),
        recovery_event(1.1, "resumed", step=0),
        fault_event(2.0, "kill", "b"),
        recovery_event(2.1, "detected", missing=["b"]),
        fault_event(2.3, "kill", "b", "undo"),
        recovery_event(2.8, "resumed", step=1),
    )
    # Detected after 0.4 and 0.1 s, resumed after 0.2 and 0.7 s, in all 0.6 and 0.8 s.
    assert metrics["detection_time"] == pytest.approx(0.4)
    assert metrics["resume_time"] == pytest.approx(0.7)
    assert metrics["recovery_time"] == pytest.approx(0.8)
    assert metrics["faults"] == 2
    assert metrics["recoveries"] == 2
    assert metrics["unrecovered"] == 0
    note = "the longest of {recoveries}, from the fault until work continued"
    assert ROWS[0].note(metrics) == note


def test_unrecovered_fault_has_detection_time_only() -> None:
    metrics = recovery_metrics(
        fault_event(0.5, "kill", "b"), recovery_event(0.9, "detected", missing=["b"])
    )
    assert metrics["recoveries"] == 0
    assert metrics["unrecovered"] == 1
    assert metrics["recovery_time"] is None
    assert metrics["resume_time"] is None
    assert metrics["detection_time"] == pytest.approx(0.4)
    # The report has a row for it.
    assert LAST_ROWS[0].when is not None
    assert LAST_ROWS[0].when(metrics)


def test_recovery_without_fault_begins_with_detection() -> None:
    metrics = recovery_metrics(
        recovery_event(0.9, "detected"), recovery_event(1.4, "resumed", step=0)
    )
    assert metrics["faults"] == 0
    assert metrics["detection_time"] is None
    assert metrics["resume_time"] == pytest.approx(0.5)
    assert metrics["recovery_time"] == pytest.approx(0.5)


def test_repair_is_listed_but_not_counted_as_fault() -> None:
    events = [fault_event(2.0, "kill", "b"), fault_event(3.0, "restart", "b")]
    undisturbed = recorded.make_events(faulty=False)
    record = recorded.make_record(events=in_order(undisturbed, events))
    rows = columns_of(faults(record), "action", "mends", "undone")
    assert rows == [("kill", False, 3.0), ("restart", True, None)]
    assert metric_values(METRICS, record)["faults"] == 1


def test_deficit_of_recovery_is_maximum_of_devices_per_processor() -> None:
    # The recovery lasts from 2.32 to 4.0 s: events that end at 2.2 or 4.2 s are outside of it.
    loads = [
        load_event(2.2, "a", 0.1, late=9.0),
        load_event(2.6, "a", 0.1, late=0.3),
        load_event(2.9, "b", 0.1, late=0.25),
        load_event(3.9, "b", 0.1, late=0.35),
        load_event(4.2, "b", 0.1, late=9.0),
    ]
    record = recorded.make_record(events=in_order(recorded.make_events(), loads))
    assert recovery_list(record)[0]["deficit"] == pytest.approx(0.25 + 0.35)
    a, b = record.experiment.devices
    devices = (a, replace(b, processors=4))
    record.experiment = replace(record.experiment, devices=devices)
    # With four processors b has 0.15 s, so that the 0.3 s of a are the maximum.
    assert recovery_list(record)[0]["deficit"] == pytest.approx(0.3)


def test_method_adds_values_to_recovery() -> None:
    record = recorded.make_record()
    record.describe_recovery = lambda item, _: {"redistributed": item.resumed}
    assert recovery_list(record)[0]["redistributed"] == RESUMED
