"""Tests of `resume: next-batch`: as in FTPipeHD, training continues with the first batch without gradients."""

import os
from collections import Counter

import pytest

from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.pipeline.placement import RUNNING_STEP, Lineage, Point, restore_newest
from tests.helpers.runs import fields_of, make_scenario, run_simulated
from tests.helpers.schedules import STEPS, WORKERS, at_span_start, random_keys
from tests.testbed.ml.outcomes import assert_equal_weights, field_values, loss_by_step
from tests.testbed.ml.pipeline.fault_runs import (
    assert_all_steps,
    devices_of,
    recovery_events,
    run_with_faults,
)

SEEDS = int(os.environ.get("RANDOM_FAULTS", "24"))
"""Number of random fault schedules; a full run has 200."""
OLD = StagePartition(("a", "b", "c"), (0, 2, 4, 6))
NEW = StagePartition(("a", "c"), (0, 3, 6))
LINEAGE = Lineage().branch(0, 1)


def run_with_next_batch(*faults, **options):
    """Run with faults; ``options`` change options of the method."""
    return run_with_faults(*faults, method={"resume": "next-batch", **options})


def assert_no_batch_is_repeated(outcome):
    assert outcome.status == "finished", outcome.error
    assert field_values(outcome, "step", "step") == list(range(STEPS))


@pytest.mark.parametrize("device", WORKERS)
@pytest.mark.parametrize("span", ["forward", "backward", "update"])
def test_no_batch_is_repeated_after_loss_of_worker(device, span):
    fault = {"kill": device, "when": at_span_start(device, span, 13)}
    outcome = run_with_next_batch(fault)
    assert_no_batch_is_repeated(outcome)
    (resumed,) = recovery_events(outcome, "resumed")
    # Up to three batches before the one under way have no gradients yet.
    assert 10 <= resumed["step"] <= 13
    assert device not in devices_of(resumed["partition"])


def test_no_batch_is_repeated_after_worker_is_refilled():
    fault = {
        "kill": "worker2",
        "when": at_span_start("worker2", "backward", 17),
        "for": "1s",
    }
    outcome = run_with_next_batch(fault, rejoin_timeout="5s")
    assert_no_batch_is_repeated(outcome)
    cases = [event.get("case") for event in fields_of(outcome, "recovery")]
    assert "refill" in cases


def test_fault_changes_no_weights_if_every_batch_is_replicated():
    # With one batch in flight and a replica of each, the newest weights of all units are one state.
    sequential = {"in_flight": 1, "chain_replication_interval": 1}
    undisturbed = run_with_next_batch(**sequential)
    fault = {"kill": "worker2", "when": at_span_start("worker2", "forward", 17)}
    disturbed = run_with_next_batch(fault, **sequential)
    assert fields_of(disturbed, "recovery")
    assert_equal_weights(disturbed.weights, undisturbed.weights)


def test_remaining_devices_keep_updates_since_last_replication():
    # The last replicas are of batch 12. Without the updates since then, both ways of resuming would give one result.
    fault = {"kill": "worker1", "when": at_span_start("worker1", "backward", 15)}
    continuing = run_with_next_batch(fault)
    returning = run_with_next_batch(fault, resume="last-replica")
    counts = Counter(field_values(returning, "step", "step"))
    assert [step for step, count in counts.items() if count == 2] == [12, 13, 14]
    last = STEPS - 1
    assert loss_by_step(continuing)[last] != loss_by_step(returning)[last]


def test_training_restarts_if_lost_unit_was_never_replicated():
    # The first replication is after batch 4.
    fault = {"kill": "worker2", "when": at_span_start("worker2", "backward", 2)}
    outcome = run_with_next_batch(fault)
    assert outcome.status == "finished", outcome.error
    (resumed,) = recovery_events(outcome, "resumed")
    assert resumed["step"] == 0


def test_no_batch_is_repeated_with_evaluations():
    # Evaluations forward batches too, which must not count as batches of training.
    fault = {"kill": "worker2", "when": at_span_start("worker2", "backward", 17)}
    assert_no_batch_is_repeated(run_with_next_batch(fault, evaluate_every=5))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_batch_is_trained_despite_random_faults(seed):
    keys = random_keys(seed)
    keys["method"] = {**keys["method"], "resume": "next-batch"}
    outcome = run_simulated(make_scenario(**keys))
    # Some schedules kill more devices than the pipeline can do without.
    if outcome.status == "failed" and "not enough devices" in outcome.error:
        return
    assert_all_steps(outcome, STEPS)
    assert len(fields_of(outcome, "evaluate")) == 1


def place_with(inventory):
    """Choose the newest weights after the loss of b, when training resumes with batch 13 in configuration 2."""
    return restore_newest(
        LINEAGE, inventory, OLD, NEW, resumed=Point(2, 13), running=1, steps=100
    )


def test_running_weights_are_preferred_and_lost_units_come_from_next_stage():
    inventory = {
        "a": [(1, 8, [0, 1]), (1, RUNNING_STEP, [0, 1])],
        "c": [(1, 8, [2, 3, 4, 5]), (1, RUNNING_STEP, [4, 5])],
    }
    plan = place_with(inventory)
    assert plan.point == Point(2, 13)
    assert plan.origins_of("a") == [(1, RUNNING_STEP, [0, 1]), (1, 8, [2])]
    assert plan.origins_of("c") == [(1, RUNNING_STEP, [4, 5]), (1, 8, [3])]
    assert plan.needs["a"].fetch == {"c": (2,)}


def test_newer_replica_is_preferred_to_running_weights_of_other_configuration():
    inventory = {
        "a": [(1, 8, range(6)), (1, RUNNING_STEP, [0, 1])],
        "c": [(1, 12, [2, 3]), (0, RUNNING_STEP, [4, 5])],
    }
    plan = place_with(inventory)
    assert plan.origins[0] == Point(1, RUNNING_STEP)
    assert plan.origins[2] == Point(1, 12)
    # Configuration 0 was not the one under training.
    assert plan.origins[4] == Point(1, 8)


def test_unit_without_replica_has_no_newest_state():
    inventory = {"a": [(1, RUNNING_STEP, [0, 1])], "c": [(1, RUNNING_STEP, [4, 5])]}
    assert place_with(inventory) is None


def test_mixture_is_part_of_lineage_and_replaces_state_of_same_step():
    mixture = place_with({"a": [(1, 8, range(6))]})
    lineage = LINEAGE.branch(mixture.branch_step, 2)
    assert Point(2, 13) in lineage
    assert lineage.point(13) == Point(2, 13)
    assert Point(1, 12) in lineage
    assert Point(1, 13) not in lineage
