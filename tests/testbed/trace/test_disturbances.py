"""Intervals of faults, and the assignment of recoveries to faults."""

from __future__ import annotations

from time import process_time

from testbed.trace.disturbances import recoveries, strikes
from testbed.trace.events import Event
from testbed.trace.gantt import outages
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics
from tests.testbed.trace.records import (
    columns_of,
    fault_event,
    in_order,
    recovery_event,
    steadiness,
    without,
)


def manual_fault(time: float, phase: str) -> Event:
    """Return the event of a fault by hand, which has no intended time."""
    fields = {"action": "flap", "target": "a <-> b", "phase": phase}
    return Event(time, "testbed", "fault", fields)


def test_manual_fault_is_not_late_and_excuses_lost_receptions() -> None:
    faults = [manual_fault(1.0, "strike"), manual_fault(1.5, "undo")]
    # All receptions are missing: a run without faults would not be trusted.
    events = without(recorded.make_events(faulty=False), "receive")
    metrics = calm_metrics(events=in_order(events, faults))
    assert metrics["verdict"]["trusted"]
    rows = columns_of(metrics["fault_list"], "action", "late", "undone")
    assert rows == [("flap", 0.0, 1.5)]


def test_fault_without_end_disturbs_all_later_steps() -> None:
    events = [
        event
        for event in without(recorded.make_events(), "recovery")
        if event.fields.get("phase") != "undo"
    ]
    metrics = recorded_metrics(events=events)
    assert metrics["fault_list"][0]["undone"] is None
    # The first step is no undisturbed one in any run; the fault strikes in the third.
    assert steadiness(metrics) == [False, True, False, False, False, False]


def test_heal_ends_network_partition_and_is_no_fault() -> None:
    faults = [
        fault_event(0.5, "partition", "a | b"),
        fault_event(0.9, "heal", "all", intended=0.5),
    ]
    events = in_order(recorded.make_events(faulty=False), faults)
    metrics = calm_metrics(events=events)
    rows = columns_of(metrics["fault_list"], "action", "undone")
    assert rows == [("partition", 0.9), ("heal", None)]
    assert metrics["faults"] == 1


KILL_AND_PARTITION = [
    fault_event(45, "kill", "b"),
    recovery_event(49, "detected", missing=["b"]),
    fault_event(55, "kill", "b", "undo"),
    recovery_event(57, "resumed", step=4),
    fault_event(110, "partition", "a | b,c"),
    recovery_event(114, "detected", missing=["b", "c"]),
    fault_event(125, "partition", "a | b,c", "undo"),
    recovery_event(126, "resumed", step=8),
]


def test_recovery_is_assigned_to_fault_in_force() -> None:
    first, second = recoveries(KILL_AND_PARTITION)
    assert (first.struck, first.duration) == (45, 57 - 45)
    assert (second.struck, second.duration) == (110, 126 - 110)


def test_later_recovery_is_assigned_to_only_fault_that_never_ended() -> None:
    # Without the end of the kill and without the partition.
    events = [event for event in KILL_AND_PARTITION if event.time not in (55, 110, 125)]
    assert [item.struck for item in recoveries(events)] == [45, 45]


def test_recovery_completes_all_simultaneous_faults_except_throttles() -> None:
    events = [
        fault_event(10.01, "kill", "b", intended=10),
        fault_event(10.05, "kill", "c", intended=10),
        fault_event(10.06, "throttle", "a", intended=10),
        recovery_event(14, "detected", missing=["b", "c"]),
        recovery_event(17, "resumed", step=4),
    ]
    # Methods do not recover from a throttle.
    assert [strike.recovered for strike in strikes(events)] == [17, 17, None]


def test_time_for_many_outages_is_not_proportional_to_devices() -> None:
    up, killed, restarted = [], [], []
    for number in range(8_000):
        up.append(Event(0.0, f"d{number}", "state", {"state": "up"}))
    for number in range(400):
        killed.append(fault_event(1.0, "kill", f"d{number}"))
    # All but the first killed device start again.
    for number in range(1, 400):
        time = 2.0 + (number - 1) / 1000
        restarted.append(Event(time, f"d{number}", "state", {"state": "started"}))
    began = process_time()
    bars = outages([*up, *killed, *restarted], 9.0)
    # A search of all devices for each outage would take several times as long.
    assert process_time() - began < 1.5
    expected = {event.device: (1.0, event.time) for event in restarted}
    expected["d0"] = (1.0, 9.0)
    assert {bar.device: (bar.start, bar.end) for bar in bars} == expected
