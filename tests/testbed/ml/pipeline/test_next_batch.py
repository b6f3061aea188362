"""Recovery as FTPipeHD describes it: training continues with the first batch whose gradients were not received."""

import os
from collections import Counter

import pytest
import torch

from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.placement import RUNNING, Lineage, Point, place_newest
from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.helpers.schedules import (
    METHOD,
    MODEL,
    STEPS,
    WORKERS,
    at_span_start,
    random_keys,
)

NEXT = {**METHOD, "resume": "next-batch"}
SEEDS = int(os.environ.get("RANDOM_FAULTS", "24"))
OLD = StagePartition(("a", "b", "c"), (0, 2, 4, 6))
NEW = StagePartition(("a", "c"), (0, 3, 6))
LINEAGE = Lineage().branch(0, 1)


def disturbed(*faults, **method):
    return run_simulated(
        make_scenario(
            workload={"steps": STEPS, "model": MODEL},
            method={**NEXT, **method},
            faults=faults,
        )
    )


def steps_of(outcome):
    return [step["step"] for step in fields_of(outcome, "step")]


@pytest.mark.parametrize("victim", WORKERS)
@pytest.mark.parametrize("span", ["forward", "backward", "update"])
def test_no_batch_is_trained_again_after_a_worker_is_lost(victim, span):
    outcome = disturbed({"kill": victim, "when": at_span_start(victim, span, 13)})
    assert outcome.status == "finished", outcome.error
    assert steps_of(outcome) == list(range(STEPS))
    (resumed,) = [
        event for event in fields_of(outcome, "recovery") if event["phase"] == "resumed"
    ]
    assert 10 <= resumed["step"] <= 13
    assert victim not in [device for device, _, _ in resumed["partition"]]


def test_worker_that_came_back_empty_receives_replicas_and_no_batch_is_repeated():
    fault = {
        "kill": "worker2",
        "when": at_span_start("worker2", "backward", 17),
        "for": "1s",
    }
    outcome = disturbed(fault, rejoin_timeout="5s")
    assert outcome.status == "finished", outcome.error
    assert steps_of(outcome) == list(range(STEPS))
    cases = [event.get("case") for event in fields_of(outcome, "recovery")]
    assert "refill" in cases


def test_weights_are_those_of_an_undisturbed_run_if_every_batch_is_replicated():
    """With one batch under way and a replica of each, the newest weights of all units are one state."""
    sequential = {"in_flight": 1, "chain_replication_interval": 1}
    calm = disturbed(**sequential)
    fault = {"kill": "worker2", "when": at_span_start("worker2", "forward", 17)}
    killed = disturbed(fault, **sequential)
    assert fields_of(killed, "recovery")
    for name, tensor in calm.weights.items():
        assert torch.equal(tensor, killed.weights[name]), name


def test_remaining_devices_keep_updates_that_were_not_replicated():
    """The last replicas are of batch 12; without updates since then, losses would equal those of the other way."""
    fault = {"kill": "worker1", "when": at_span_start("worker1", "backward", 15)}
    keeping = disturbed(fault)
    returning = disturbed(fault, resume="last-replica")
    counts = Counter(steps_of(returning))
    assert [step for step, count in counts.items() if count == 2] == [12, 13, 14]
    last = STEPS - 1
    losses = [
        {step["step"]: step["loss"] for step in fields_of(outcome, "step")}
        for outcome in (keeping, returning)
    ]
    assert losses[0][last] != losses[1][last]


def test_training_begins_again_if_a_lost_unit_was_never_replicated():
    outcome = disturbed(
        {"kill": "worker2", "when": at_span_start("worker2", "backward", 2)}
    )
    assert outcome.status == "finished", outcome.error
    (resumed,) = [
        event for event in fields_of(outcome, "recovery") if event["phase"] == "resumed"
    ]
    assert resumed["step"] == 0


def test_evaluations_do_not_count_as_batches():
    fault = {"kill": "worker2", "when": at_span_start("worker2", "backward", 17)}
    outcome = disturbed(fault, evaluate_every=5)
    assert outcome.status == "finished", outcome.error
    assert steps_of(outcome) == list(range(STEPS))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_faults(seed):
    keys = random_keys(seed)
    keys["method"] = {**keys["method"], "resume": "next-batch"}
    outcome = run_simulated(make_scenario(**keys))
    if outcome.status == "failed" and "not enough devices" in outcome.error:
        return
    assert outcome.status == "finished", outcome.error
    assert set(steps_of(outcome)) == set(range(STEPS))
    assert len(fields_of(outcome, "evaluate")) == 1


def newest(inventory, step=13, running=1):
    resumed = Point(2, step)
    return place_newest(
        LINEAGE, inventory, OLD, NEW, resumed=resumed, running=running, steps=100
    )


def test_running_weights_are_preferred_and_lost_units_come_from_the_next_stage():
    inventory = {
        "a": [(1, 8, [0, 1]), (1, RUNNING, [0, 1])],
        "c": [(1, 8, [2, 3, 4, 5]), (1, RUNNING, [4, 5])],
    }
    found = newest(inventory)
    assert found.point == Point(2, 13)
    assert found.origins_of("a") == [(1, RUNNING, [0, 1]), (1, 8, [2])]
    assert found.origins_of("c") == [(1, RUNNING, [4, 5]), (1, 8, [3])]
    assert found.needs["a"].fetch == {"c": (2,)}


def test_newer_replica_is_preferred_and_running_weights_of_other_configurations_are_not():
    inventory = {
        "a": [(1, 8, range(6)), (1, RUNNING, [0, 1])],
        "c": [(1, 12, [2, 3]), (0, RUNNING, [4, 5])],
    }
    found = newest(inventory)
    assert [found.origins[unit] for unit in (0, 2, 4)] == [
        Point(1, RUNNING),
        Point(1, 12),
        Point(1, 8),
    ]


def test_unit_without_a_replica_has_no_newest_state():
    assert newest({"a": [(1, RUNNING, [0, 1])], "c": [(1, RUNNING, [4, 5])]}) is None


def test_mixture_belongs_to_the_lineage_and_voids_a_state_of_the_same_step():
    lineage = LINEAGE.branch(newest({"a": [(1, 8, range(6))]}).branch_step, 2)
    assert Point(2, 13) in lineage
    assert lineage.point(13) == Point(2, 13)
    assert Point(1, 12) in lineage
    assert Point(1, 13) not in lineage
