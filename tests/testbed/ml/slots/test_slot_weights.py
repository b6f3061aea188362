"""Weights that methods in timeslots begin with, and those that they leave."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.runs import (
    fields_of,
    problem_of,
    run_simulated,
    scenario,
    train_with_torch,
)

MODEL = {"name": "mlp", "hidden": [16, 16]}
TRAINING = {"optimizer": {"learning_rate": 0.1}}


def horizontal(name, given=False, **keys):
    """Return a scenario without losses, in which a batch begins when the one before it is through."""
    model = MODEL | ({"weights": "given.safetensors"} if given else {})
    workload = {"model": model, "training": TRAINING, "steps": 12}
    method = {"name": name, "allocation": "horizontal", "final_weights": True}
    return scenario(2, workload=workload, method=method, **keys)


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], atol=1e-6) for name in one
    )


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_initial_and_final_weights_equal_those_of_torch(name):
    outcome = run_simulated(horizontal(name))
    model, losses = train_with_torch(horizontal(name))
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-5
    )
    assert equal(outcome.weights, model.state_dict())
    again = run_simulated(horizontal(name, given=True), weights=outcome.weights)
    further, losses = train_with_torch(horizontal(name), weights=outcome.weights)
    assert [step["loss"] for step in fields_of(again, "step")] == pytest.approx(
        losses, abs=1e-5
    )
    assert equal(again.weights, further.state_dict())


def test_a_restarted_device_receives_initial_weights_again():
    calm = run_simulated(
        horizontal("edgepipe", given=True),
        weights=dict(run_simulated(horizontal("edgepipe")).weights),
    )
    kill = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 3},
        "for": "100ms",
    }
    hurt = run_simulated(
        horizontal("edgepipe", given=True, faults=[kill]),
        weights=dict(run_simulated(horizontal("edgepipe")).weights),
    )
    assert hurt.status == "finished"
    assert len(fields_of(hurt, "step")) == len(fields_of(calm, "step")) == 12
    first = [
        min(each.time for each in outcome.events if each.event == "step")
        for outcome in (calm, hurt)
    ]
    assert first[0] == first[1]


def test_a_device_that_is_off_at_the_end_contributes_initial_weights():
    written = horizontal("edgepipe", faults=[{"kill": "worker1", "at": "50ms"}])
    outcome, (problem, _) = run_simulated(written), problem_of(written)
    first = problem.model.build(0, len(problem.model.units), problem.seed).state_dict()
    # Without it only the output layer learns, of whose ten neurons the second of three devices has the middle third.
    same = (outcome.weights["2.0.weight"] == first["2.0.weight"]).all(dim=1)
    assert same.nonzero().flatten().tolist() == [3, 4, 5]
