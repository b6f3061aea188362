"""Tests of initial and final weights of methods in timeslots."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.runs import (
    fields_of,
    make_scenario,
    problem_of,
    run_simulated,
    train_with_torch,
)
from tests.testbed.ml.outcomes import field_values, times_of

MODEL = {"name": "mlp", "hidden": [16, 16]}
TRAINING = {"optimizer": {"learning_rate": 0.1}}


def horizontal_scenario(name, *, initial_weights=False, **keys):
    """Return a scenario without losses, in which a batch begins after the previous one is complete."""
    model = dict(MODEL)
    if initial_weights:
        # Simulations get the tensors directly; the name only says that there are some.
        model["weights"] = "given.safetensors"
    workload = {"model": model, "training": TRAINING, "steps": 12}
    method = {"name": name, "allocation": "horizontal", "final_weights": True}
    return make_scenario(2, workload=workload, method=method, **keys)


def assert_close(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, atol=1e-6)


def losses_of(outcome):
    return field_values(outcome, "step", "loss")


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
def test_initial_and_final_weights_equal_those_of_torch(name):
    drawn = horizontal_scenario(name)
    outcome = run_simulated(drawn)
    model, losses = train_with_torch(drawn)
    assert losses_of(outcome) == pytest.approx(losses, abs=1e-5)
    assert_close(outcome.weights, model.state_dict())
    # A second run begins with the weights of the first.
    continued = run_simulated(
        horizontal_scenario(name, initial_weights=True), weights=outcome.weights
    )
    model, losses = train_with_torch(drawn, weights=outcome.weights)
    assert losses_of(continued) == pytest.approx(losses, abs=1e-5)
    assert_close(continued.weights, model.state_dict())


def test_restarted_device_receives_initial_weights_again():
    trained = run_simulated(horizontal_scenario("edgepipe")).weights
    kill = {
        "kill": "worker1",
        "when": {"device": "worker1", "begins": "backward", "batch": 3},
        "for": "100ms",
    }
    first_steps = []
    for faults in ([], [kill]):
        outcome = run_simulated(
            horizontal_scenario("edgepipe", initial_weights=True, faults=faults),
            weights=dict(trained),
        )
        assert outcome.status == "finished"
        assert len(fields_of(outcome, "step")) == 12
        first_steps.append(min(times_of(outcome, "step")))
    without_fault, with_fault = first_steps
    assert without_fault == with_fault


def test_device_off_at_end_contributes_initial_weights():
    faults = [{"kill": "worker1", "at": "50ms"}]
    with_fault = horizontal_scenario("edgepipe", faults=faults)
    outcome = run_simulated(with_fault)
    problem, _ = problem_of(with_fault)
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    initial = model.state_dict()["2.0.weight"]
    # Without worker1 only the output layer learns. The second of three devices has the middle third of its ten neurons.
    unchanged = (outcome.weights["2.0.weight"] == initial).all(dim=1)
    assert unchanged.nonzero().flatten().tolist() == [3, 4, 5]
