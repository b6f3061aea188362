"""When faults struck and were undone, and which recovery is whose."""

from __future__ import annotations

from time import process_time

from testbed.trace.disturbances import recoveries, strikes
from testbed.trace.events import Event
from testbed.trace.gantt import outages
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics


def test_what_is_done_by_hand_is_neither_late_nor_missed() -> None:
    def flapped(time: float, phase: str) -> Event:
        return Event(
            time,
            "testbed",
            "fault",
            {"action": "flap", "target": "a <-> b", "phase": phase},
        )

    events = [
        event
        for event in recorded.make_events(faulty=False)
        if event.event != "receive"
    ]
    by_hand = sorted(
        [*events, flapped(1.0, "strike"), flapped(1.5, "undo")],
        key=lambda event: event.time,
    )
    found = calm_metrics(events=by_hand)
    assert found["verdict"]["trusted"]
    assert [
        (row["action"], row["late"], row["undone"]) for row in found["fault_list"]
    ] == [("flap", 0.0, 1.5)]


def test_a_fault_that_is_never_undone_disturbs_until_the_end() -> None:
    events = [
        event
        for event in recorded.make_events()
        if event.event != "recovery" and event.fields.get("phase") != "undo"
    ]
    found = recorded_metrics(events=events)
    assert found["fault_list"][0]["undone"] is None
    assert [row["steady"] for row in found["series"]["steps"]] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]


def test_heal_undoes_partitions_and_degradations() -> None:
    fault = {"phase": "strike", "intended": 0.5}
    events = [
        *recorded.make_events(faulty=False),
        Event(
            0.5, "testbed", "fault", {**fault, "action": "partition", "target": "a | b"}
        ),
        Event(0.9, "testbed", "fault", {**fault, "action": "heal", "target": "all"}),
    ]
    found = calm_metrics(events=sorted(events, key=lambda event: event.time))
    assert [(item["action"], item["undone"]) for item in found["fault_list"]] == [
        ("partition", 0.9),
        ("heal", None),
    ]
    assert found["faults"] == 1


def test_a_recovery_is_not_blamed_on_a_fault_that_was_outlived_before() -> None:
    def fault(time: float, action: str, target: str, phase: str) -> Event:
        return Event(
            time,
            "testbed",
            "fault",
            {"action": action, "target": target, "phase": phase, "intended": time},
        )

    events = [
        fault(45, "kill", "b", "strike"),
        Event(49, "a", "recovery", {"phase": "detected", "missing": ["b"]}),
        fault(55, "kill", "b", "undo"),
        Event(57, "a", "recovery", {"phase": "resumed", "step": 4}),
        fault(110, "partition", "a | b,c", "strike"),
        Event(114, "a", "recovery", {"phase": "detected", "missing": ["b", "c"]}),
        fault(125, "partition", "a | b,c", "undo"),
        Event(126, "a", "recovery", {"phase": "resumed", "step": 8}),
    ]
    assert [(found.struck, found.duration) for found in recoveries(events)] == [
        (45, 12),
        (110, 16),
    ]
    lasting = [event for event in events if event.time not in (55, 110, 125)]
    assert [found.struck for found in recoveries(lasting)] == [45, 45], (
        "it was never undone, and nothing else struck"
    )


def test_two_faults_at_one_instant_were_both_outlived() -> None:
    events = [
        *(
            Event(
                at,
                "testbed",
                "fault",
                {"action": "kill", "target": name, "phase": "strike", "intended": 10},
            )
            for at, name in ((10.01, "b"), (10.05, "c"))
        ),
        Event(
            10.06,
            "testbed",
            "fault",
            {"action": "throttle", "target": "a", "phase": "strike", "intended": 10},
        ),
        Event(14, "a", "recovery", {"phase": "detected", "missing": ["b", "c"]}),
        Event(17, "a", "recovery", {"phase": "resumed", "step": 4}),
    ]
    assert [strike.recovered for strike in strikes(events)] == [17, 17, None], (
        "nobody recovers from a throttle"
    )


def test_hundreds_of_outages_are_found_without_looking_at_all_devices_for_each() -> (
    None
):
    names = [f"d{number}" for number in range(400)]
    up = [Event(0.0, f"d{number}", "state", {"state": "up"}) for number in range(8_000)]
    killed = [
        Event(
            1.0,
            "testbed",
            "fault",
            {"action": "kill", "target": name, "phase": "strike", "intended": 1.0},
        )
        for name in names
    ]
    back = [
        Event(2.0 + number / 1000, name, "state", {"state": "started"})
        for number, name in enumerate(names[1:])
    ]
    began = process_time()
    found = {
        bar.device: (bar.start, bar.end) for bar in outages([*up, *killed, *back], 9.0)
    }
    assert process_time() - began < 1.5
    assert found == {"d0": (1.0, 9.0)} | {
        event.device: (1.0, event.time) for event in back
    }
