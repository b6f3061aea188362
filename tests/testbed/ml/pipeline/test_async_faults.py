"""Asynchronous pipelines outlive their devices: whatever happens, each batch counts once, in one state of the model."""

import os
from itertools import pairwise

import pytest
import torch

from testbed.scenario.schema import Scenario
from tests.helpers.delayed_gradients import DelayedReference, final_stretches
from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.helpers.schedules import (
    DEVICES,
    METHOD,
    MODEL,
    STEPS,
    WORKERS,
    at_span_start,
    random_keys,
)

SEEDS = int(os.environ.get("RANDOM_FAULTS", "24"))
"""How many random schedules; all that there are to be is 200."""


def disturbed(*faults, method=METHOD, steps=STEPS, **keys):
    return run_simulated(
        make_scenario(
            workload={"steps": steps, "model": MODEL},
            method={**METHOD, **method},
            faults=faults,
            **keys,
        )
    )


def assert_right(outcome, steps=STEPS, **keys):
    """The run ended, every batch was done, and the weights are those of the stretches that were not undone."""
    assert outcome.status == "finished", outcome.error
    assert {step["step"] for step in fields_of(outcome, "step")} == set(range(steps))
    assert len(fields_of(outcome, "evaluate")) == 1
    reference = DelayedReference(
        make_scenario(workload={"steps": steps, "model": MODEL}, **keys)
    ).replay(outcome, steps)
    assert outcome.weights.keys() == reference.newest.keys()
    for name, tensor in reference.newest.items():
        assert torch.equal(outcome.weights[name], tensor), name
    last = {step["step"]: step["loss"] for step in fields_of(outcome, "step")}
    assert [last[step] for step in range(steps)] == reference.losses


def recovered(outcome):
    return [
        event
        for event in fields_of(outcome, "recovery")
        if event["phase"] == "repartitioned"
    ]


@pytest.mark.parametrize("victim", WORKERS)
@pytest.mark.parametrize("method", ["ftpipehd", "respipe", "pipedream"])
def test_worker_killed_for_good(method, victim):
    given = {
        "name": method,
        "chain_replication_interval": 4,
        "global_replication_interval": 8,
        "stall_timeout": "500ms",
    }
    fault = {"kill": victim, "when": at_span_start(victim, "backward", 13)}
    outcome = run_simulated(
        make_scenario(
            workload={"steps": STEPS, "model": MODEL}, method=given, faults=[fault]
        )
    )
    if method != "ftpipehd":
        assert_right(outcome)
        assert final_stretches(outcome)[-1][0] == 12
    assert victim not in [device for device, _, _ in final_stretches(outcome)[-1][2]]
    assert [event["phase"] for event in fields_of(outcome, "recovery")] == [
        "detected",
        "repartitioned",
        "redistributed",
        "resumed",
        "trained",
    ]


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("batch", [2, 13, 34])
def test_central_node_dies_and_comes_back(batch, also):
    faults = [
        {
            "kill": "source",
            "when": at_span_start("source", "forward", batch),
            "for": "1s",
        }
    ]
    if also:
        faults.append(
            {"kill": "worker1", "when": at_span_start("source", "forward", batch)}
        )
    outcome = disturbed(*faults)
    assert_right(outcome)
    _, decided, *_ = fields_of(outcome, "recovery")
    assert decided["case"] == ("redistribute" if also else "restart")
    assert (
        decided["step"] == max(0, batch - 3) // 4 * 4
    )  # what was replicated, wherever; nothing starts over
    assert ("worker1" in [device for device, _, _ in decided["partition"]]) is not also


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_faults(seed):
    outcome = run_simulated(make_scenario(**random_keys(seed)))
    if outcome.status == "failed" and "not enough devices" in outcome.error:
        return
    assert_right(outcome)


def test_with_one_batch_in_flight_a_fault_changes_nothing():
    """Nothing of what was undone is left, and nothing is missing: as if nobody had died."""
    calm = disturbed(method={"in_flight": 1})
    killed = disturbed(
        {"kill": "worker2", "when": at_span_start("worker2", "update", 17)},
        method={"in_flight": 1},
    )
    assert fields_of(killed, "recovery")
    assert all(
        torch.equal(tensor, killed.weights[name])
        for name, tensor in calm.weights.items()
    )
    assert fields_of(killed, "evaluate") == fields_of(calm, "evaluate")


def test_worker_that_came_back_empty_is_filled_again():
    fault = {
        "kill": "worker2",
        "when": at_span_start("worker2", "backward", 17),
        "for": "1s",
    }
    outcome = disturbed(fault, method={"rejoin_timeout": "5s"})
    assert_right(outcome)
    (decided,) = recovered(outcome)
    assert decided["case"] == "refill"
    before, after = final_stretches(outcome)[-2:]
    assert before[2] == after[2]


def test_two_neighbours_at_once_go_back_to_the_global_replica():
    when = at_span_start("worker2", "backward", 14)
    outcome = disturbed(
        {"kill": "worker1", "when": when}, {"kill": "worker2", "when": when}
    )
    assert_right(outcome)
    (decided,) = recovered(outcome)
    assert (
        decided["step"] == 8
    )  # the chain's replica after batch 12 is not whole any more
    assert [device for device, _, _ in decided["partition"]] == ["source", "worker3"]


@pytest.mark.parametrize("name", ["ftpipehd", "respipe"])
def test_replaced_worker_joins_again_or_is_turned_away(name):
    fault = {
        "pause": "worker2",
        "when": at_span_start("worker2", "backward", 13),
        "for": "6s",
    }
    given = {
        "name": name,
        "chain_replication_interval": 4,
        "global_replication_interval": 8,
        "stall_timeout": "500ms",
    }
    method = {**METHOD, "rejoin_timeout": "0s"} if name == "ftpipehd" else given
    steps = 150
    outcome = run_simulated(
        make_scenario(
            workload={"steps": steps, "model": MODEL},
            method=method,
            faults=[fault],
            speed="2mflops",
        )
    )
    assert_right(outcome, steps)
    members = [
        [device for device, _, _ in partition]
        for _, _, partition in final_stretches(outcome)
    ]
    assert ["source", "worker1", "worker3"] in members
    assert ("worker2" in members[-1]) is (name == "ftpipehd")
    words = [event["text"] for event in fields_of(outcome, "log")]
    assert any(
        "worker2" in text and ("joins" if name == "ftpipehd" else "cannot join") in text
        for text in words
    )


@pytest.mark.parametrize("span", ["keep", "load"])
def test_worker_dies_while_the_partition_changes(span):
    devices = {name: {"speed": "2mflops"} for name in DEVICES[:3]} | {
        "worker3": {"speed": "200kflops"}
    }
    calm = disturbed(devices=devices)
    assert fields_of(calm, "repartition")
    when = (
        {"device": "source", "event": "repartition"}
        if span == "load"
        else {"device": "worker1", "begins": span}
    )
    outcome = disturbed({"kill": "worker1", "when": when}, devices=devices)
    assert_right(outcome)
    assert recovered(outcome)


def test_throttled_device_is_noticed_at_the_next_point():
    fault = {
        "throttle": {"device": "worker1", "slowdown": 8},
        "when": at_span_start("worker1", "forward", 13),
    }
    outcome = disturbed(fault, steps=60, speed="2mflops")
    assert_right(outcome, 60)
    change = next(
        event for event in fields_of(outcome, "repartition") if event["step"] > 13
    )
    assert change["step"] <= 20 + 4
    units = {device: last - first for device, first, last in change["partition"]}
    assert units["worker1"] == min(units.values())


def test_too_few_devices_is_said():
    devices = {
        name: {"speed": "20mflops", "memory": "199kB" if name == "source" else "150kB"}
        for name in DEVICES
    }
    when = at_span_start("worker2", "backward", 13)
    outcome = disturbed(
        *({"kill": worker, "when": when} for worker in WORKERS), devices=devices
    )
    assert outcome.status == "failed"
    assert "not enough devices: " in outcome.error
    assert "fit" in outcome.error  # and what would be enough


def test_worker_restarts_between_the_drain_and_the_change():
    """It answers in time, but has lost the state that the others have: nothing may be skipped for that."""
    devices = {name: {"speed": "2mflops"} for name in DEVICES[:3]} | {
        "worker3": {"speed": "200kflops"}
    }
    fault = {
        "kill": "worker1",
        "when": {"device": "source", "begins": "keep"},
        "for": "100ms",
    }
    outcome = disturbed(
        fault, devices=devices, method={"stall_timeout": "5s", "repartition_first": 6}
    )
    assert_right(outcome)
    (decided,) = recovered(outcome)
    assert decided["case"] == "refill"
    assert decided["step"] == 8  # the change was to be at 9


def test_two_runs_with_faults_are_identical():
    one, other = (run_simulated(make_scenario(**random_keys(3))) for _ in range(2))
    assert fields_of(one, "recovery")
    assert [event.to_json() for event in one.events] == [
        event.to_json() for event in other.events
    ]


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize(
    "when",
    [
        {"device": "source", "event": "recovery"},
        {"device": "worker3", "begins": "load"},
    ],
)
def test_worker_dies_while_another_is_recovered_from(when, returns):
    second = {"kill": "worker3", "when": when, **({"for": "500ms"} if returns else {})}
    outcome = disturbed(
        {"kill": "worker1", "when": at_span_start("worker1", "backward", 13)}, second
    )
    assert_right(outcome)


def test_what_a_replaced_worker_still_says_is_refused():
    """Cut off, it trains on with what it has; healed, it must not be heard as the stage that it no longer is."""
    fault = {
        "partition": [["worker2"]],
        "when": at_span_start("worker2", "forward", 13),
        "for": "4s",
    }
    outcome = disturbed(fault, steps=120, speed="2mflops")
    assert_right(outcome, 120)
    members = [
        {device for device, _, _ in partition}
        for _, _, partition in final_stretches(outcome)
    ]
    assert {"source", "worker1", "worker3"} in members
    assert "worker2" in members[-1]


@pytest.mark.parametrize(
    "ends", [{"between": ["worker1", "worker2"]}, {"from": "worker2", "to": "worker1"}]
)
def test_two_neighbours_that_never_reach_each_other_are_parted(ends):
    """Already while they measure the link between them: nobody is silent, nothing moves."""
    outcome = disturbed({"flap": {**ends, "down": "10h", "up": "1s"}, "at": "1ms"})
    assert_right(outcome)
    assert any(
        "worker2 is excluded" in event["text"] for event in fields_of(outcome, "log")
    )
    assert [device for device, _, _ in final_stretches(outcome)[-1][2]] == [
        "source",
        "worker1",
        "worker3",
    ]


def test_a_device_that_is_too_slow_to_reach_is_done_without():
    """It answers whenever it is waited for, and is late again as soon as it is a stage: neither a failure nor a way."""
    slow = {
        "degrade": {"device": "worker2", "rate": "8kbit", "delay": "100ms"},
        "at": "1ms",
    }
    outcome = disturbed(slow, method={"stall_timeout": "100ms", "rejoin_timeout": "5s"})
    assert_right(outcome)
    assert [device for device, _, _ in final_stretches(outcome)[-1][2]] == [
        "source",
        "worker1",
        "worker3",
    ]


def test_replicas_are_not_asked_of_who_is_not_reached():
    """Who came back empty is to be filled by a neighbour that it does not reach any more; that one is no stage then."""
    killed = {
        "kill": "worker1",
        "when": at_span_start("source", "forward", 22),
        "for": "100ms",
    }
    cut = {
        "flap": {"between": ["worker1", "worker2"], "down": "10h", "up": "1s"},
        "after": "200ms",
    }
    outcome = disturbed(
        killed, cut, method={"global_replication_interval": 0, "rejoin_timeout": "5s"}
    )
    assert_right(outcome)
    assert len(recovered(outcome)) == 2
    assert [device for device, _, _ in final_stretches(outcome)[-1][2]] == [
        "source",
        "worker1",
        "worker3",
    ]


def test_no_batch_that_is_gone_on_from_is_missing_in_the_record():
    """The last stage does not reach the central node any more, which then dies: what was replicated has been said."""
    cut = {
        "flap": {"from": "worker3", "to": "source", "down": "10h", "up": "1s"},
        "for": "3s",
    }
    cut["when"] = at_span_start("worker3", "forward", 1)
    killed = {"kill": "source", "after": "1s", "for": "4s"}
    outcome = disturbed(cut, killed, method={"stall_timeout": "5s"})
    assert_right(outcome)
    assert next(event["step"] for event in recovered(outcome)) == 4


@pytest.mark.parametrize("victim", ["worker1", "source"])
def test_what_is_drawn_and_normalised_is_as_if_nothing_had_been_undone(victim):
    """Dropout draws again what it drew; running averages and momentum come back with the weights."""
    work = {
        "steps": 14,
        "model": {"name": "mobilenetv2", "width": 0.1},
        "batch_size": 8,
    }
    fault = {"kill": victim, "when": at_span_start(victim, "backward", 10), "for": "1s"}
    planned = make_scenario(
        2,
        "200mflops",
        work,
        {**METHOD, "rejoin_timeout": "5s", "aggregation_interval": 1},
        faults=[fault],
    )
    outcome = run_simulated(planned)
    assert len(final_stretches(outcome)) > 1
    reference = DelayedReference(planned).replay(outcome, 14, aggregation_interval=1)
    assert all(
        torch.equal(outcome.weights[name], tensor)
        for name, tensor in reference.newest.items()
    )
    for name, tensor in reference.model.named_buffers():
        torch.testing.assert_close(outcome.weights[name], tensor)


@pytest.mark.parametrize("delay", ["2ms", "80ms"])
@pytest.mark.parametrize("workers", [1, 2])
def test_who_comes_back_is_waited_for_before_it_is_counted_in(workers, delay):
    """However few the stages are that answer before it, and however far away it is."""
    last = f"worker{workers}"
    fault = {"kill": last, "when": at_span_start(last, "backward", 6), "for": "3s"}
    far = {"between": ["source", last], "rate": "20mbit", "delay": delay}
    outcome = run_simulated(
        make_scenario(
            workers,
            "2mflops",
            {"steps": 120, "model": MODEL},
            METHOD,
            faults=[fault],
            network={"link": {"rate": "20mbit", "delay": "2ms"}, "links": [far]},
        )
    )
    members = [
        [device for device, _, _ in partition]
        for _, _, partition in final_stretches(outcome)
    ]
    assert any(last not in each for each in members)
    assert last in members[-1]
    assert all(
        one != other for (*_, one), (*_, other) in pairwise(final_stretches(outcome))
    )  # no change in vain


def test_the_central_node_gone_for_good_is_said_in_one_line():
    outcome = disturbed(
        {"kill": "source", "when": at_span_start("source", "forward", 13)}
    )
    assert outcome.status == "failed"
    assert (
        outcome.error
        == "source is down; it is the coordinator of the run: end its fault by 'for', or restart it"
    )


@pytest.mark.parametrize(("replicas", "step"), [(1, 0), (2, 12)])
def test_as_many_replicas_as_neighbours_that_are_lost_at_once(replicas, step):
    when = at_span_start("worker2", "backward", 14)
    given = {
        "name": "respipe",
        "chain_replication_interval": 4,
        "replicas": replicas,
        "stall_timeout": "500ms",
        "rejoin_timeout": "0s",
    }
    faults = [{"kill": "worker1", "when": when}, {"kill": "worker2", "when": when}]
    outcome = run_simulated(
        make_scenario(
            workload={"steps": STEPS, "model": MODEL}, method=given, faults=faults
        )
    )
    assert_right(outcome)
    (decided,) = recovered(outcome)
    assert decided["step"] == step


def test_a_batch_that_ends_while_silent_devices_are_waited_for_is_recorded():
    """Training goes on after a batch whose last gradient left just before the others were cut off: it has to count."""
    names = ("source", "w0", "w1", "w2", "w3")
    speeds = {"w2": {"speed": "300mflops"}, "w3": {"speed": "100mflops"}}
    method = {
        "name": "ftpipehd",
        "stall_timeout": "200ms",
        "rejoin_timeout": "3s",
        "chain_replication_interval": 1,
        "in_flight": 3,
    }
    planned = Scenario.model_validate(
        {
            "name": "test",
            "devices": {name: speeds.get(name, {}) for name in names},
            "workload": {
                "model": {"name": "mlp", "hidden": [12, 10, 8, 8]},
                "method": {
                    **method,
                    "evaluate_every": 5,
                    "profile_runs": 1,
                    "repartition_first": 1,
                },
                "steps": 23,
            },
            "faults": [
                {
                    "partition": [["w1", "w3"]],
                    "when": at_span_start("w3", "backward", 2),
                    "for": "2.5s",
                }
            ],
        }
    )
    outcome = run_simulated(planned)
    assert outcome.status == "finished", outcome.error
    assert recovered(outcome)
    assert {step["step"] for step in fields_of(outcome, "step")} == set(range(23))
