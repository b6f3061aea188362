"""Tests of the program in timeslots under faults: a run ends whichever device fails, at any time."""

from __future__ import annotations

import random

import pytest
import torch

from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.slots import neurons
from testbed.ml.slots.program import gradient_of_cross_entropy
from tests.helpers.runs import fields_of, make_scenario, run_simulated

MODEL = {"name": "mlp", "hidden": [16, 16]}
ERRORS = (
    "the evaluation after step 10 is lost",
    "is left with no device",
    "is down; it is the coordinator of the run",
)
"""Reasons for which a run under faults may fail."""


def kill_coordinator(duration):
    """Return a fault: the coordinator stops during the backward of batch 1."""
    return {
        "kill": "source",
        "when": {"device": "worker1", "begins": "backward", "batch": 1},
        "for": duration,
    }


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
@pytest.mark.parametrize("duration", ["0.001s", "1s"])
def test_coordinator_returning_after_last_slot_reports_lost_evaluation(name, duration):
    outcome = run_simulated(
        make_scenario(
            1,
            workload={"model": MODEL, "steps": 8},
            method={"name": name, "timeslot_margin": "10ms"},
            faults=[kill_coordinator(duration)],
        )
    )
    assert outcome.status == "failed"
    assert (
        "the evaluation after step 8 is lost: the coordinator source was off or had no neurons"
        in outcome.error
    )
    # Far below the time limit of the scenario: no device waits for ever.
    assert max(event.time for event in outcome.events) < 10


def test_gradient_of_cross_entropy_equals_autograd_exactly():
    generator = torch.Generator().manual_seed(1)
    results = torch.randn(50, 10, generator=generator, requires_grad=True)
    labels = torch.arange(50) % 10
    # Any weight is possible, so the sum is not divided by the 50 samples.
    loss = torch.nn.functional.cross_entropy(results, labels, reduction="sum") / 70
    (expected,) = torch.autograd.grad(loss, [results])
    logarithms = torch.log_softmax(results.detach(), dim=1)
    assert torch.equal(gradient_of_cross_entropy(logarithms, labels, 1 / 70), expected)


@pytest.mark.parametrize("frame", [None, "400B"])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "edgepipe", "allocation": "horizontal"},
        {"name": "edgepipe", "allocation": "hybrid"},
        {"name": "versatile", "allocation": "horizontal"},
        {
            "name": "versatile",
            "allocation": "horizontal",
            "substitute_past_outputs": True,
        },
    ],
    ids=[
        "edgepipe-horizontal",
        "edgepipe-hybrid",
        "versatile",
        "versatile-past-outputs",
    ],
)
def test_equal_test_inputs_are_computed_once_with_equal_results(
    monkeypatch, method, frame
):
    calls = []
    infer = LayerShard.infer

    def counted_infer(*arguments):
        calls.append(arguments)
        return infer(*arguments)

    monkeypatch.setattr(LayerShard, "infer", counted_infer)
    tests = {
        "timeslot_margin": "10ms",
        "test_runs": 12,
        "test_batch_size": 25,
        "evaluate_every": 4,
    }
    with_tests = make_scenario(
        2,
        workload={"model": MODEL, "steps": 8},
        method=method | tests,
        network={"link": {"message_loss": "30%"}, "frame": frame},
    )

    def run_with_cache(size):
        """Run with a limit of kept outputs in bytes; return the events and the number of computations."""
        monkeypatch.setattr(neurons, "MAX_CACHED_BYTES", size)
        calls.clear()
        outcome = run_simulated(with_tests)
        assert outcome.status == "finished"
        return list(outcome.events), len(calls)

    # Devices are charged for every computation; only the host computes equal inputs once.
    events, computed = run_with_cache(neurons.MAX_CACHED_BYTES)
    events_without_cache, computed_without_cache = run_with_cache(0)
    assert events == events_without_cache
    # With substituted outputs the received parts are not the inputs, so equal parts say nothing.
    saves_work = computed < computed_without_cache
    assert saves_work == ("substitute_past_outputs" not in method)


def test_coordinator_without_peers_stops_after_last_slot():
    # From 2 s on no other device is left to answer the coordinator.
    faults = [kill_coordinator("1ms"), {"kill": "worker1", "at": "2s"}]
    outcome = run_simulated(
        make_scenario(
            1,
            workload={"model": MODEL, "steps": 40},
            method={"name": "versatile", "timeslot_margin": "100ms"},
            faults=faults,
        )
    )
    assert outcome.status == "failed"
    assert "the evaluation after step 40 is lost" in outcome.error


def random_fault(draw, names):
    """Return a random fault of one device, at a time or at a computation of another device."""
    device, other = draw.sample(names, 2)
    fault = draw.choice(
        [
            {"kill": device},
            # Twice, so that kills are as frequent as the other two together.
            {"kill": device},
            {"pause": device},
            {"partition": [[device]]},
        ]
    )
    at_time = {"at": f"{draw.randint(0, 3000)}ms"}
    computation = {
        "device": other,
        "begins": draw.choice(["forward", "backward"]),
        "batch": draw.randint(0, 9),
    }
    duration = draw.choice(["1ms", "300ms", "1s", "4s", None])
    fault |= draw.choice([at_time, {"when": computation}])
    if duration is not None:
        fault["for"] = duration
    return fault


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
@pytest.mark.parametrize("seed", range(8))
def test_run_with_random_faults_finishes_or_fails_with_known_error(name, seed):
    draw = random.Random(f"{name} {seed}")
    workers = draw.randint(1, 3)
    names = ["source", *(f"worker{number}" for number in range(1, workers + 1))]
    method = {
        "name": name,
        "recovery": draw.choice(["none", "r-tx", "ack"]),
        "evaluate_every": draw.choice([None, 5]),
        "allocation": draw.choice(["hybrid", "horizontal"]),
    }
    faults = [random_fault(draw, names) for _ in range(draw.randint(1, 3))]
    outcome = run_simulated(
        make_scenario(
            workers,
            workload={"model": MODEL, "steps": 10},
            method=method,
            faults=faults,
        )
    )
    assert outcome.status in ("finished", "failed")
    if outcome.status == "finished":
        assert fields_of(outcome, "evaluate")[-1]["step"] == 10
    else:
        assert any(error in outcome.error for error in ERRORS)
