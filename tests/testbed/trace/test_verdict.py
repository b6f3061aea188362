"""What is held against a run, and the bounds of each check."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testbed.methods.program.workload import ProgramPart, ProgramWorkloadPart
from testbed.network.link import Link
from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.modelled import unmodelled_effects
from testbed.trace.outcome import LinkMeasurement
from testbed.trace.verdict import verdict
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics


def test_a_trusted_run() -> None:
    judged = recorded_metrics()["verdict"]
    assert judged["kind"] == "trusted", judged
    assert judged["reasons"] == []
    assert {check["name"] for check in judged["checks"]} == {
        "course",
        "events",
        "faults",
        "links",
        "host",
        "recovery",
    }


def test_a_simulation_is_a_prediction() -> None:
    found = recorded_metrics(runtime="simulate", links=[], fidelity={})
    assert found["verdict"]["kind"] == "prediction"
    assert found["trusted"] is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"status": "failed", "error": "worker1: out of memory"},
            "the run failed: worker1: out of memory",
        ),
        ({"status": "timed out"}, "the run timed out"),
        ({"status": "interrupted"}, "the run was interrupted"),
        ({"links": []}, "no link was measured"),
        (
            {"fidelity": {"host_stolen": 0.1}},
            "a hypervisor kept 10.0% of the processors' time for others",
        ),
        (
            {
                "fidelity": {
                    "queues": {
                        "a": {"queue_dropped": 2, "sender_drops": 5},
                        "b": {"user_dropped": 1},
                    }
                }
            },
            "the emulation dropped 3 packets because the host was too slow, most at a",
        ),
        (
            {"fidelity": {"queues": {"a": {"unread": 4}, "b": {"unread": 7}}}},
            "the sockets of devices dropped 11 datagrams before their agents could read them, most at b; raise "
            "net.core.rmem_max of the host to 8388608, or give links a rate",
        ),
        (
            {"fidelity": {"lateness": {"p50": 0.0, "p99": 0.02}}},
            "delayed by 20.00 ms more than asked",
        ),
        ({"events": []}, "no events from a, b"),
    ],
)
def test_what_makes_a_run_untrusted(changes: dict[str, Any], reason: str) -> None:
    found = recorded_metrics(**changes)
    assert found["verdict"]["kind"] == "not trusted"
    assert found["trusted"] is False
    assert reason in found["verdict"]["summary"]


def test_of_many_devices_without_events_a_few_are_named() -> None:
    record = recorded.make_record(events=[])
    assignment = record.plan.assignments[0]
    assignments = tuple(
        assignment.model_copy(update={"device": f"d{number:04}"})
        for number in range(2000)
    )
    record.plan = record.plan.model_copy(update={"assignments": assignments})
    assert (
        "no events from d0000, d0001, d0002, d0003, d0004 and 1,995 more"
        in verdict(record)["summary"]
    )


def test_a_link_out_of_tolerance_names_itself() -> None:
    bad = LinkMeasurement(
        "a", "b", Link(rate=1e6), rate=5e5, problem="rate 0.5 mbit instead of 1 mbit"
    )
    assert (
        "link a -> b is out of tolerance: rate 0.5 mbit"
        in recorded_metrics(links=[bad])["verdict"]["summary"]
    )


def test_a_busy_host_that_did_no_damage_is_trusted() -> None:
    fidelity = {
        "host_load": 0.9,
        "host_saturated": 0.8,
        "queues": {"a": {"sender_drops": 7, "queue_dropped": 0}},
    }
    assert recorded_metrics(fidelity=fidelity)["trusted"]


def test_a_late_fault_and_one_that_never_came() -> None:
    late = [
        Event(event.time, event.device, event.event, {**event.fields, "intended": 1.0})
        if event.fields.get("phase") == "strike"
        else event
        for event in recorded.make_events()
    ]
    assert (
        "kill of b struck 1.32 s late"
        in recorded_metrics(events=late)["verdict"]["summary"]
    )
    assert (
        "never struck: kill"
        in recorded_metrics(events=recorded.make_events(faulty=False))["verdict"][
            "summary"
        ]
    )
    slow = [
        Event(event.time, event.device, event.event, {**event.fields, "began": 1.1})
        if event.fields.get("phase") == "strike"
        else event
        for event in late
    ]
    # A device that boots or hands over takes its time: what counts is when it began.
    assert "late" not in recorded_metrics(events=slow)["verdict"]["summary"]
    assert recorded_metrics(events=slow)["fault_list"][0]["struck"] == 1.1


def test_a_fault_that_lasts_longer_than_it_should() -> None:
    def summary(undone: float) -> str:
        strike = {"action": "pause", "target": "b", "phase": "strike", "intended": 3.0}
        undo = {**strike, "phase": "undo", "intended": 5.0}
        own = [
            Event(3.0, "testbed", "fault", strike),
            Event(undone, "testbed", "fault", undo),
        ]
        text: str = recorded_metrics(events=[*recorded.make_events(), *own])["verdict"][
            "summary"
        ]
        return text

    assert "longer than intended" not in summary(5.4)
    assert "pause of b lasted 4.20 s longer than intended" in summary(
        9.2
    )  # the engine did not answer


def test_late_changes_of_traces_and_flaps() -> None:
    flap = {"flap": {"between": ["a", "b"], "down": "60ms", "up": "1s"}, "at": "1s"}

    def verdict(*changes: Event) -> dict[str, Any]:
        events = sorted(
            [*recorded.make_events(faulty=False), *changes],
            key=lambda event: event.time,
        )
        found = metrics(
            recorded.make_outcome(events=events),
            recorded.make_trial(faults=[flap]).experiment,
            recorded.make_plan(),
        )
        return {check["name"]: check for check in found["verdict"]["checks"]}

    def flapped(time: float, phase: str, intended: float) -> Event:
        fields = {
            "action": "flap",
            "target": "a <-> b",
            "phase": phase,
            "intended": intended,
        }
        return Event(time, "testbed", "fault", fields)

    traced = Event(
        2.04,
        "testbed",
        "trace",
        {"what": "link a->b rate", "value": "1mbit", "intended": 2.0},
    )
    down, up = flapped(1.02, "strike", 1.0), flapped(1.075, "undo", 1.06)
    good = verdict(traced, down, up)
    assert good["trace"]["ok"]
    assert good["trace"]["detail"] == "1 changes by the trace, the latest 40 ms late"
    assert good["flaps"]["ok"]
    late = Event(3.06, "testbed", "trace", {**traced.fields, "intended": 3.0})
    bad = verdict(traced, late, down, flapped(1.095, "undo", 1.06))
    assert (
        bad["trace"]["detail"]
        == "1 of 2 changes by the trace, the latest 60 ms late (at most 50 ms)"
    )
    assert (
        bad["flaps"]["detail"]
        == "1 of 2 changes by the flaps, the latest 35 ms late (at most 30 ms)"
    )
    assert (bad["trace"]["ok"], bad["flaps"]["ok"]) == (False, False)


@pytest.mark.parametrize(
    ("link", "named"),
    [
        ({"delay": "10ms", "loss": "5%"}, False),
        ({"delay": "10ms", "loss": "4%", "corrupt": "3%"}, True),
        ({"delay": "1ms"}, False),
        ({"delay": "1ms", "loss": "1%"}, True),
        ({"delay": "10ms", "bursts": {"p": "10%", "r": "50%"}}, True),
        ({"delay": "10ms", "message_loss": "40%"}, False),
        ({"delay": "10ms", "jitter": "3ms"}, False),
        ({"delay": "10ms", "jitter": "4ms"}, True),
    ],
)
def test_losses_and_jitter_beyond_those_that_the_clocks_agree_on_are_named(
    link: dict[str, Any], named: bool
) -> None:
    trial = recorded.make_trial(network={"link": {"rate": "8mbit", **link}})
    assert any("TCP" in text for text in unmodelled_effects(trial.experiment)) is named


def test_a_simulation_says_what_of_the_links_it_leaves_out() -> None:
    network = {
        "link": {"rate": "8mbit", "delay": "10ms", "limit": 40, "duplicate": "1%"}
    }
    outcome = recorded.make_outcome(runtime="simulate", links=[], fidelity={})
    found = metrics(
        outcome, recorded.make_trial(network=network).experiment, recorded.make_plan()
    )["verdict"]
    assert found["summary"].endswith(
        "not in the model: queue limits and packets that arrive twice"
    )
    assert found["kind"] == "prediction"
    assert "model" not in {
        check["name"]
        for check in recorded_metrics(runtime="simulate", links=[], fidelity={})[
            "verdict"
        ]["checks"]
    }


def test_receptions_missing_from_the_log() -> None:
    events = [
        event
        for event in recorded.make_events(faulty=False)
        if event.event != "receive"
    ]
    assert (
        "lacks the reception of 10 of 10 messages"
        in calm_metrics(events=events)["verdict"]["summary"]
    )


def test_clocks_of_several_hosts_that_are_not_known_well_make_a_run_untrusted() -> None:
    near = calm_metrics(fidelity={"clocks": {"a": 1e-4, "b": 9e-4}})
    assert {
        "name": "clocks",
        "ok": True,
        "detail": "the clocks of 2 hosts are known to 0.90 ms, that of b the least",
    } in near["verdict"]["checks"]
    far = calm_metrics(fidelity={"clocks": {"a": 1e-4, "b": 4e-3}})
    assert (
        "known to 4.00 ms, that of b the least (at most 1 ms)"
        in far["verdict"]["summary"]
    )
    assert "clocks" not in [
        check["name"] for check in calm_metrics()["verdict"]["checks"]
    ]


def check(name: str, **changes: Any) -> dict[str, Any]:
    """Return one check of the run that nothing disturbed."""
    found = {
        each["name"]: each
        for each in verdict(recorded.make_calm_record(**changes))["checks"]
    }
    return found[name]


def test_packets_may_be_late_by_half_the_shortest_delay_where_that_is_more_than_a_millisecond() -> (
    None
):
    # The links take 10 ms, so the bound is 5 ms.
    assert check("delays", fidelity={"lateness": {"p99": 0.005}})["ok"]
    assert not check("delays", fidelity={"lateness": {"p99": 0.0051}})["ok"]
    network = {"link": {"rate": "8mbit", "delay": "1ms"}}
    near = recorded.make_trial(faults=(), network=network)
    assert check("delays", trial=near, fidelity={"lateness": {"p99": 0.001}})["ok"]
    found = check("delays", trial=near, fidelity={"lateness": {"p99": 0.0011}})
    assert (
        found["detail"]
        == "1% of the packets were delayed by 1.10 ms more than asked, or later (at most 1 ms)"
    )


def test_one_reception_in_a_hundred_may_be_missing_and_one_in_any_case() -> None:
    message = {"peer": "b", "message": "m", "bytes": 1, "start": 0.0, "duration": 0.1}
    done = [
        *recorded.make_events(faulty=False),
        *(Event(0.2, "a", "send", message) for _ in range(190)),
    ]
    heard = {**message, "peer": "a"}
    for received, fine in (
        (188, True),
        (187, False),
    ):  # of the 200 messages, 10 are the run's own
        events = [*done, *(Event(0.3, "b", "receive", heard) for _ in range(received))]
        assert (
            check("events", events=sorted(events, key=lambda event: event.time))["ok"]
            is fine
        )
    few = recorded.make_events(faulty=False)
    few.remove(next(event for event in few if event.event == "receive"))
    assert check("events", events=few)["ok"], (
        "the last one may be cut off by the end of the run"
    )


def test_messages_that_are_received_twice_do_not_make_up_for_others() -> None:
    events = recorded.make_events(faulty=False)
    to_a = [
        event for event in events if event.event == "receive" and event.device == "a"
    ]
    others = [
        event
        for event in events
        if not (event.event == "receive" and event.device == "b")
    ]
    found = check(
        "events", events=sorted([*others, *to_a], key=lambda event: event.time)
    )
    assert found["detail"] == "the log lacks the reception of 5 of 10 messages"


def test_a_run_without_what_its_task_is_about_says_how_to_record_it() -> None:
    events = [
        event for event in recorded.make_events(faulty=False) if event.event != "step"
    ]
    assert check("events", events=events)["detail"] == (
        'no step was recorded: programs report their work by device.record("step", ...)'
    )
    record = recorded.make_calm_record(events=events)
    programs = ProgramWorkloadPart(programs={"a": ProgramPart(command=("true",))})
    record.experiment = replace(record.experiment, workload=programs)
    [found] = [each for each in verdict(record)["checks"] if each["name"] == "events"]
    assert found["detail"] == "no exit was recorded"


def test_there_is_nothing_to_check_of_links_or_of_a_host_that_was_not_asked_anything() -> (
    None
):
    record = recorded.make_calm_record(
        links=[], events=recorded.make_events(faulty=False)[:1]
    )
    record.experiment = replace(record.experiment, links={})
    found = {each["name"]: each["ok"] for each in verdict(record)["checks"]}
    assert (found["links"], found["host"]) == (None, None)


def test_every_link_out_of_tolerance_is_counted() -> None:
    bad = [replace(each, problem="too slow") for each in recorded.make_links()]
    found = check("links", links=bad)
    assert found["detail"] == "link a -> b is out of tolerance: too slow (and 1 more)"


def test_a_fault_may_be_late_by_half_a_second() -> None:
    for late, fine in ((0.5, True), (0.51, False)):
        events = [
            event._replace(fields={**event.fields, "intended": 2.32 - late})
            if event.fields.get("phase") == "strike"
            else event
            for event in recorded.make_events()
        ]
        found = {
            each["name"]: each
            for each in verdict(recorded.make_record(events=events))["checks"]
        }
        assert found["faults"]["ok"] is fine


def test_what_the_queues_of_links_drop_is_no_fault_of_the_emulation() -> None:
    found = check(
        "queues",
        fidelity={"queues": {"a": {"sender_drops": 5}, "b": {"queue_dropped": 0}}},
    )
    assert found["ok"]
    assert found["detail"].endswith(
        "no packet of its own; 5 overflowed the queues of the links themselves"
    )


def test_a_simulation_is_not_held_to_what_it_cannot_measure() -> None:
    bad = {
        "host_stolen": 0.9,
        "queues": {"a": {"user_dropped": 9}},
        "lateness": {"p99": 1.0},
        "clocks": {"a": 1.0},
    }
    found = verdict(
        recorded.make_calm_record(runtime="simulate", links=[], fidelity=bad)
    )
    assert found["kind"] == "prediction"
    assert {each["name"] for each in found["checks"]} == {"course", "events"}
    failed = verdict(
        recorded.make_calm_record(
            runtime="simulate", status="timed out", links=[], fidelity={}
        )
    )
    assert (failed["kind"], failed["summary"]) == ("not trusted", "the run timed out")


def test_a_kernel_that_ignores_memory_limits_makes_a_run_untrusted() -> None:
    found = calm_metrics(fidelity={"unlimited": ["memory", "processes"]})["verdict"]
    assert not found["trusted"]
    assert "limits on memory and processes" in found["summary"]
    assert calm_metrics(fidelity={"unlimited": ["processes"]})["verdict"]["trusted"]
    assert calm_metrics(fidelity={"unlimited": []})["verdict"]["trusted"]
