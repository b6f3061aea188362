"""A pipeline outlives its devices: every kind of fault ends in the weights of a run without one, or a clear error."""

import pytest
import torch

from tests.helpers.runs import fields_of, make_scenario, run_simulated

METHOD = {"checkpoint_every": 4, "stall_timeout": "1s", "rejoin_timeout": "6s"}
WORKERS = ("worker1", "worker2", "worker3")


def faulty(*faults, method=METHOD, **keys):
    return run_simulated(make_scenario(method=method, faults=faults, **keys))


@pytest.fixture(scope="module")
def undisturbed():
    return faulty()


def assert_recovered(outcome, undisturbed, recoveries=1):
    """The run ended as one without faults: same weights, same losses, each step done, same accuracy."""
    assert outcome.status == "finished", outcome.error
    for name, tensor in undisturbed.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name
    expected = {step["step"]: step["loss"] for step in fields_of(undisturbed, "step")}
    assert {
        step["step"]: step["loss"] for step in fields_of(outcome, "step")
    } == expected
    assert fields_of(outcome, "evaluate")[-1] == fields_of(undisturbed, "evaluate")[-1]
    phases = [event["phase"] for event in fields_of(outcome, "recovery")]
    assert phases == ["detected", "resumed"] * recoveries


def partition_at_the_end(outcome):
    return [device for device, _, _ in fields_of(outcome, "recovery")[-1]["partition"]]


@pytest.mark.parametrize("victim", WORKERS)
@pytest.mark.parametrize("span", ["forward", "backward", "update"])
def test_killed_stage_comes_back(undisturbed, victim, span):
    when = {"device": victim, "begins": span, "batch": 6}
    outcome = faulty({"kill": victim, "when": when, "for": "2s"})
    assert_recovered(outcome, undisturbed)
    detected, resumed = fields_of(outcome, "recovery")
    assert detected["missing"] == [victim]
    assert detected["step"] == resumed["step"] == 4
    assert [step["step"] for step in fields_of(outcome, "step")] == [
        *range(6),
        *range(4, 12),
    ]


def test_restarted_device_announces_itself_before_stall_timeout_ends(undisturbed):
    fault = {
        "kill": "worker2",
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
        "for": "1s",
    }
    outcome = faulty(fault, method={**METHOD, "stall_timeout": "60s"})
    assert_recovered(outcome, undisturbed)
    assert outcome.events[-1].time < 10


@pytest.mark.parametrize("victim", WORKERS)
def test_killed_stage_stays_away(undisturbed, victim):
    outcome = faulty(
        {"kill": victim, "when": {"device": victim, "begins": "forward", "batch": 6}}
    )
    assert_recovered(outcome, undisturbed)
    assert partition_at_the_end(outcome) == [
        "source",
        *(name for name in WORKERS if name != victim),
    ]


def test_two_at_once(undisturbed):
    when = {"device": "worker1", "begins": "backward", "batch": 5}
    outcome = faulty(
        {"kill": "worker1", "when": when, "for": "2s"},
        {"kill": "worker3", "when": when, "for": "3s"},
    )
    assert_recovered(outcome, undisturbed)
    assert fields_of(outcome, "recovery")[0]["missing"] == ["worker1", "worker3"]


def test_one_comes_back_and_one_does_not(undisturbed):
    when = {"device": "worker1", "begins": "backward", "batch": 5}
    outcome = faulty(
        {"kill": "worker1", "when": when},
        {"kill": "worker3", "when": when, "for": "3s"},
    )
    assert_recovered(outcome, undisturbed)
    assert partition_at_the_end(outcome) == ["source", "worker2", "worker3"]


def test_lead_continues_alone_after_losing_all_devices(undisturbed):
    when = {"device": "worker1", "begins": "backward", "batch": 5}
    outcome = faulty(*({"kill": victim, "when": when} for victim in WORKERS))
    assert_recovered(outcome, undisturbed)
    assert partition_at_the_end(outcome) == ["source"]


@pytest.mark.parametrize("event", ["recovery", "configured"])
@pytest.mark.parametrize("second", [{"for": "2s"}, {}])
def test_kill_during_recovery(undisturbed, event, second):
    when = (
        {"device": "source", "event": "recovery"}
        if event == "recovery"
        else {"device": "worker3", "begins": "load"}
    )
    outcome = faulty(
        {
            "kill": "worker2",
            "when": {"device": "worker2", "begins": "backward", "batch": 6},
            "for": "2s",
        },
        {"kill": "worker3", "when": when, **second},
    )
    assert outcome.status == "finished", outcome.error
    for name, tensor in undisturbed.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name


def test_kill_while_the_final_weights_are_gathered(undisturbed):
    when = {"device": "worker2", "begins": "checkpoint", "batch": 11}
    assert_recovered(
        faulty({"kill": "worker2", "when": when, "for": "2s"}), undisturbed
    )


def test_kill_in_the_evaluation(undisturbed):
    when = {"device": "worker2", "begins": "evaluate"}
    assert_recovered(
        faulty({"kill": "worker2", "when": when, "for": "2s"}), undisturbed
    )


def test_partition_heals_within_the_window(undisturbed):
    fault = {
        "partition": [["worker2"]],
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
        "for": "4s",
    }
    assert_recovered(faulty(fault), undisturbed)


def test_short_partition_needs_no_recovery(undisturbed):
    fault = {
        "partition": [["worker2"]],
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
    }
    assert_recovered(faulty({**fault, "for": "500ms"}), undisturbed, recoveries=0)


def test_devices_cut_off_for_good_are_done_without(undisturbed):
    fault = {
        "partition": [["worker2", "worker3"]],
        "when": {"device": "worker2", "begins": "update", "batch": 6},
    }
    outcome = faulty(fault)
    assert_recovered(outcome, undisturbed)
    assert partition_at_the_end(outcome) == ["source", "worker1"]


def test_pause_and_resume(undisturbed):
    fault = {
        "pause": "worker2",
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
        "for": "4s",
    }
    assert_recovered(faulty(fault), undisturbed)


def test_paused_for_long_is_replaced_and_joins_again(undisturbed):
    fault = {
        "pause": "worker2",
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
        "for": "10s",
    }
    outcome = faulty(fault, workload={"steps": 600, "numerics": "none"})
    assert outcome.status == "finished", outcome.error
    assert partition_at_the_end(outcome) == ["source", "worker1", "worker3"]
    assert any("worker2 join" in event["text"] for event in fields_of(outcome, "log"))
    updates = [
        event
        for event in outcome.events
        if event.event == "compute" and event.fields["span"] == "update"
    ]
    assert {event.device for event in updates if event.fields["batch"] == 599} == {
        "source",
        *WORKERS,
    }


def test_devices_without_contact_to_each_other_are_identified(undisturbed):
    link = {"between": ["worker1", "worker2"], "rate": "1bit"}
    fault = {
        "degrade": link,
        "when": {"device": "worker2", "begins": "backward", "batch": 6},
    }
    outcome = faulty(fault)
    assert_recovered(outcome, undisturbed)
    assert fields_of(outcome, "recovery")[0]["missing"] == ["worker2"]
    assert partition_at_the_end(outcome) == ["source", "worker1", "worker3"]


def test_slow_device_is_waited_for():
    outcome = faulty(
        workload={"steps": 2},
        speed="5kflops",
        method={**METHOD, "stall_timeout": "200ms"},
    )
    assert outcome.status == "finished", outcome.error
    assert not fields_of(outcome, "recovery")
    assert outcome.events[-1].time > 20


def test_lead_that_restarts_starts_over(undisturbed):
    fault = {
        "kill": "source",
        "when": {"device": "source", "begins": "backward", "batch": 6},
        "for": "1s",
    }
    outcome = faulty(fault)
    assert outcome.status == "finished", outcome.error
    for name, tensor in undisturbed.weights.items():
        assert torch.equal(outcome.weights[name], tensor), name
    assert [step["step"] for step in fields_of(outcome, "step")] == [
        *range(6),
        *range(12),
    ]


def test_device_off_at_the_start_delays_the_run():
    outcome = faulty({"kill": "worker2", "at": "0s"})
    assert outcome.status == "finished", outcome.error
    detected, _resumed = fields_of(outcome, "recovery")
    assert detected["missing"] == ["worker2"]
    assert next(event.time for event in outcome.events if event.event == "step") < 30
