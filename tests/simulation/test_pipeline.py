"""Synchronous pipeline training on the virtual clock, without faults: it computes what the undivided model does."""

import itertools

import pytest
import torch
from runs import events, of, plain, problem_of, run, scenario

from testbed.errors import InputError
from testbed.methods import METHODS
from testbed.methods.base import Assignment, Plan

UNITS = 5


def cut_at(*cuts):
    """Return the plan whose stages begin at these units."""
    names = ["source", "worker1", "worker2", "worker3"]
    parts = tuple(
        Assignment(device=name, first=first, last=last, memory=0)
        for name, (first, last) in zip(names, itertools.pairwise((0, *cuts, UNITS)), strict=False)
    )
    return Plan(method="pipeline", lead="source", assignments=parts)


def assert_same(weights, model, tolerance=2e-6):
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


SPLITS = [cuts for count in range(4) for cuts in itertools.combinations(range(1, UNITS), count)]


@pytest.mark.parametrize("cuts", SPLITS, ids=lambda cuts: "-".join(map(str, cuts)) or "whole")
@pytest.mark.parametrize("schedule", ["model-parallelism", "gpipe", "1f1b"])
def test_every_split_trains_the_undivided_model(schedule, cuts):
    micro_batches = 4 if len(cuts) % 2 else 3  # 16 samples: 4 even micro-batches, or 6, 5 and 5
    spec = scenario(workload={"steps": 4}, method={"schedule": schedule, "micro_batches": micro_batches})
    outcome = run(spec, cut_at(*cuts))
    assert outcome.status == "finished", outcome.error
    model, losses = plain(spec)
    assert_same(outcome.weights, model)
    assert [step["loss"] for step in of(outcome, "step")] == pytest.approx(losses, abs=1e-6)
