"""Verdicts: the reasons not to trust a run, and the limits of each check."""

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
from testbed.trace.record import RunView
from testbed.trace.verdict import verdict
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics
from tests.testbed.trace.records import checks_by_name, in_order, without


def calm_verdict(**changes: Any) -> dict[str, Any]:
    """Return the verdict of a run without faults."""
    judged: dict[str, Any] = calm_metrics(**changes)["verdict"]
    return judged


def calm_check(name: str, **changes: Any) -> dict[str, Any]:
    """Return one check of a run without faults."""
    record = recorded.make_calm_record(**changes)
    return checks_by_name(verdict(record))[name]


def test_undamaged_run_is_trusted() -> None:
    # The fault of the recorded run is intended.
    judged = recorded_metrics()["verdict"]
    assert judged["kind"] == "trusted", judged
    assert judged["reasons"] == []
    names = {"course", "events", "faults", "links", "host", "recovery"}
    assert checks_by_name(judged).keys() == names


def test_simulation_is_prediction() -> None:
    values = recorded_metrics(runtime="simulate", links=[], fidelity={})
    assert values["verdict"]["kind"] == "prediction"
    assert values["trusted"] is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param(
            {"status": "failed", "error": "worker1: out of memory"},
            "the run failed: worker1: out of memory",
            id="failed",
        ),
        pytest.param({"status": "timed out"}, "the run timed out", id="timed-out"),
        pytest.param(
            {"status": "interrupted"}, "the run was interrupted", id="interrupted"
        ),
        pytest.param({"links": []}, "no link was measured", id="unmeasured-links"),
        pytest.param(
            {"fidelity": {"host_stolen": 0.1}},
            "a hypervisor kept 10.0% of the processors' time for others",
            id="stolen-time",
        ),
        pytest.param(
            {
                "fidelity": {
                    "queues": {
                        "a": {"queue_dropped": 2, "sender_drops": 5},
                        "b": {"user_dropped": 1},
                    }
                }
            },
            "the emulation dropped 3 packets because the host was too slow, most at a",
            id="dropped-packets",
        ),
        pytest.param(
            {"fidelity": {"queues": {"a": {"unread": 4}, "b": {"unread": 7}}}},
            "the sockets of devices dropped 11 datagrams before their agents could read them, most at b; raise "
            "net.core.rmem_max of the host to 8388608, or give links a rate",
            id="unread-datagrams",
        ),
        pytest.param(
            {"fidelity": {"lateness": {"p50": 0.0, "p99": 0.02}}},
            "delayed by 20.00 ms more than asked",
            id="late-packets",
        ),
        pytest.param({"events": []}, "no events from a, b", id="silent-devices"),
    ],
)
def test_damaged_run_is_not_trusted(changes: dict[str, Any], reason: str) -> None:
    values = recorded_metrics(**changes)
    assert values["verdict"]["kind"] == "not trusted"
    assert values["trusted"] is False
    assert reason in values["verdict"]["summary"]


def test_only_first_of_many_devices_without_events_are_named() -> None:
    record = recorded.make_record(events=[])
    assignment = record.plan.assignments[0]
    assignments = []
    for number in range(2000):
        device = f"d{number:04}"
        assignments.append(assignment.model_copy(update={"device": device}))
    changes = {"assignments": tuple(assignments)}
    record.plan = record.plan.model_copy(update=changes)
    assert (
        "no events from d0000, d0001, d0002, d0003, d0004 and 1,995 more"
        in verdict(record)["summary"]
    )


def test_link_out_of_tolerance_is_named() -> None:
    problem = "rate 0.5 mbit instead of 1 mbit"
    link = LinkMeasurement("a", "b", Link(rate=1e6), rate=5e5, problem=problem)
    summary = recorded_metrics(links=[link])["verdict"]["summary"]
    assert "link a -> b is out of tolerance: rate 0.5 mbit" in summary


def test_busy_host_without_damage_is_trusted() -> None:
    fidelity = {
        "host_load": 0.9,
        "host_saturated": 0.8,
        "queues": {"a": {"sender_drops": 7, "queue_dropped": 0}},
    }
    assert recorded_metrics(fidelity=fidelity)["trusted"]


# Loss and jitter for which both clocks have been compared; see docs/fidelity.md.
@pytest.mark.parametrize(
    ("link", "is_named"),
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
    ids=str,
)
def test_loss_and_jitter_beyond_validated_range_are_named(
    link: dict[str, Any], is_named: bool
) -> None:
    trial = recorded.make_trial(network={"link": {"rate": "8mbit", **link}})
    effects = unmodelled_effects(trial.experiment)
    assert any("TCP" in text for text in effects) is is_named


def test_simulation_names_unmodelled_link_properties() -> None:
    link = {"rate": "8mbit", "delay": "10ms", "limit": 40, "duplicate": "1%"}
    experiment = recorded.make_trial(network={"link": link}).experiment
    outcome = recorded.make_outcome(runtime="simulate", links=[], fidelity={})
    judged = metrics(outcome, experiment, recorded.make_plan())["verdict"]
    assert judged["summary"].endswith(
        "not in the model: queue limits and packets that arrive twice"
    )
    assert judged["kind"] == "prediction"


def test_simulation_of_modelled_links_has_no_check_of_model() -> None:
    judged = recorded_metrics(runtime="simulate", links=[], fidelity={})["verdict"]
    assert "model" not in checks_by_name(judged)


def test_missing_receptions_are_reported() -> None:
    events = without(recorded.make_events(faulty=False), "receive")
    summary = calm_verdict(events=events)["summary"]
    assert "lacks the reception of 10 of 10 messages" in summary


def test_clocks_of_several_hosts_must_be_known_precisely() -> None:
    judged = calm_verdict(fidelity={"clocks": {"a": 1e-4, "b": 9e-4}})
    assert {
        "name": "clocks",
        "ok": True,
        "detail": "the clocks of 2 hosts are known to 0.90 ms, that of b the least",
    } in judged["checks"]
    summary = calm_verdict(fidelity={"clocks": {"a": 1e-4, "b": 4e-3}})["summary"]
    assert "known to 4.00 ms, that of b the least (at most 1 ms)" in summary
    # A run on one host has one clock.
    assert "clocks" not in checks_by_name(calm_verdict())


def lateness(seconds: float) -> dict[str, Any]:
    """Return the fidelity of a run in which 1 % of the packets were later."""
    return {"lateness": {"p99": seconds}}


def test_packets_may_be_late_by_half_of_shortest_delay() -> None:
    # Links of 10 ms.
    assert calm_check("delays", fidelity=lateness(0.005))["ok"]
    assert not calm_check("delays", fidelity=lateness(0.0051))["ok"]


def test_packets_may_be_late_by_millisecond_on_short_links() -> None:
    network = {"link": {"rate": "8mbit", "delay": "1ms"}}
    trial = recorded.make_trial(faults=(), network=network)
    assert calm_check("delays", trial=trial, fidelity=lateness(0.001))["ok"]
    check = calm_check("delays", trial=trial, fidelity=lateness(0.0011))
    assert not check["ok"]
    assert (
        check["detail"]
        == "1% of the packets were delayed by 1.10 ms more than asked, or later (at most 1 ms)"
    )


@pytest.mark.parametrize(("received", "is_ok"), [(188, True), (187, False)])
def test_one_percent_of_receptions_may_be_missing(received: int, is_ok: bool) -> None:
    # The recorded run has 10 messages of its own, so that there are 200 in all.
    message = {"peer": "b", "message": "m", "bytes": 1, "start": 0.0, "duration": 0.1}
    sends = [Event(0.2, "a", "send", message)] * 190
    receptions = [Event(0.3, "b", "receive", {**message, "peer": "a"})] * received
    events = in_order(recorded.make_events(faulty=False), sends, receptions)
    assert calm_check("events", events=events)["ok"] is is_ok


def test_single_reception_may_be_missing_in_short_run() -> None:
    # The end of the run may cut off the last one.
    events = recorded.make_events(faulty=False)
    events.remove(next(event for event in events if event.event == "receive"))
    assert calm_check("events", events=events)["ok"]


def test_duplicate_receptions_do_not_compensate_missing_ones() -> None:
    by_a, others = [], []
    for event in recorded.make_events(faulty=False):
        if event.event == "receive" and event.device == "a":
            by_a.append(event)
        elif event.event != "receive":
            others.append(event)
    # All receptions by b are missing, and those by a are there twice.
    check = calm_check("events", events=in_order(others, by_a, by_a))
    assert check["detail"] == "the log lacks the reception of 5 of 10 messages"


def test_run_without_steps_explains_how_to_record_them() -> None:
    events = without(recorded.make_events(faulty=False), "step")
    assert calm_check("events", events=events)["detail"] == (
        'no step was recorded: programs report their work by device.record("step", ...)'
    )


def test_run_of_programs_without_exit_is_reported() -> None:
    record = recorded.make_calm_record(
        events=without(recorded.make_events(faulty=False), "step")
    )
    programs = ProgramWorkloadPart(programs={"a": ProgramPart(command=("true",))})
    record.experiment = replace(record.experiment, workload=programs)
    check = checks_by_name(verdict(record))["events"]
    # The testbed records exits itself, so there is no hint.
    assert check["detail"] == "no exit was recorded"


def test_checks_without_links_and_host_measurements_are_undecided() -> None:
    record = recorded.make_calm_record(
        links=[], events=recorded.make_events(faulty=False)[:1]
    )
    record.experiment = replace(record.experiment, links={})
    checks = checks_by_name(verdict(record))
    assert checks["links"]["ok"] is None
    assert checks["host"]["ok"] is None


def test_links_out_of_tolerance_are_counted() -> None:
    measurements = []
    for measurement in recorded.make_links():
        measurements.append(replace(measurement, problem="too slow"))
    check = calm_check("links", links=measurements)
    assert check["detail"] == "link a -> b is out of tolerance: too slow (and 1 more)"


def test_packets_dropped_by_queues_of_links_are_no_damage() -> None:
    queues = {"a": {"sender_drops": 5}, "b": {"queue_dropped": 0}}
    check = calm_check("queues", fidelity={"queues": queues})
    assert check["ok"]
    assert check["detail"].endswith(
        "no packet of its own; 5 overflowed the queues of the links themselves"
    )


def simulated_record(**changes: Any) -> RunView:
    return recorded.make_calm_record(runtime="simulate", links=[], **changes)


def test_simulation_is_not_checked_for_damage_by_host() -> None:
    damage = {
        "host_stolen": 0.9,
        "queues": {"a": {"user_dropped": 9}},
        "lateness": {"p99": 1.0},
        "clocks": {"a": 1.0},
    }
    judged = verdict(simulated_record(fidelity=damage))
    assert judged["kind"] == "prediction"
    assert checks_by_name(judged).keys() == {"course", "events"}


def test_simulation_that_timed_out_is_not_trusted() -> None:
    judged = verdict(simulated_record(status="timed out", fidelity={}))
    assert judged["kind"] == "not trusted"
    assert judged["summary"] == "the run timed out"


def test_kernel_without_memory_limits_makes_run_untrusted() -> None:
    judged = calm_verdict(fidelity={"unlimited": ["memory", "processes"]})
    assert not judged["trusted"]
    assert "limits on memory and processes" in judged["summary"]


@pytest.mark.parametrize("unlimited", [["processes"], []])
def test_kernel_with_memory_limits_is_trusted(unlimited: list[str]) -> None:
    assert calm_verdict(fidelity={"unlimited": unlimited})["trusted"]
