"""The example of tensor parallelism: its outputs equal the undivided model's, also with initial weights."""

import json
from unittest.mock import patch

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.ml.layers.feed import Answers
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT

EXAMPLE = ROOT / "scenarios" / "examples" / "tensorparallel.yaml"


def simulate_outputs(devices=3, hidden=(9, 7), weights=None):
    """Run the example with a smaller model; return the outputs and the undivided model's outputs."""
    model = {"name": "mlp", "hidden": list(hidden)}
    if weights is not None:
        model["weights"] = "some"
    changes = [
        f"workload.model={json.dumps(model)}",
        f"devices.source.count={devices}",
        "workload.requests=2",
    ]
    (trial,) = trials(load(EXAMPLE, changes))
    # The file of weights that the scenario names does not exist: the weights are an argument of the simulation.
    with patch("testbed.ml.preparation._pretraining", return_value=None):
        prepared = prepare(trial)
    data = load_data(trial.scenario.workload.data)
    network = prepared.problem.model
    outputs_of_request = {}

    def store_outputs(self, index, outputs):
        outputs_of_request[index] = outputs

    with patch.object(Answers, "add", store_outputs):
        outcome = simulate(prepared, data, weights=weights)
    assert outcome.status == "finished", outcome.error
    undivided = network.build(0, len(network.units), prepared.problem.seed).eval()
    if weights is not None:
        undivided.load_state_dict(weights)
    # Two requests of eight samples.
    with torch.no_grad():
        expected = undivided(torch.from_numpy(data.test_images[:16]))
    return torch.cat([outputs_of_request[0], outputs_of_request[1]]), expected


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("hidden", [(9,), (9, 7), (13, 5, 6)])
def test_outputs_equal_undivided_model(devices, hidden):
    # Odd widths, so that devices have different numbers of neurons.
    outputs, expected = simulate_outputs(devices, hidden)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)


def test_initial_weights_are_used():
    (trial,) = trials(load(EXAMPLE, ["workload.model={name: mlp, hidden: [9, 7]}"]))
    network = prepare(trial).problem.model
    initial = network.build(0, len(network.units), 12345).state_dict()
    outputs, expected = simulate_outputs(3, (9, 7), initial)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    seeded, _ = simulate_outputs(3, (9, 7))
    assert not torch.allclose(outputs, seeded, rtol=1e-2)


def test_convolutional_network_is_rejected():
    (trial,) = trials(load(EXAMPLE, ["workload.model={name: cnn}"]))
    with pytest.raises(InputError, match="divides fully connected layers"):
        prepare(trial)


def test_plan_counts_each_weight_once_and_biases_on_every_device():
    (trial,) = trials(load(EXAMPLE))
    prepared = prepare(trial)
    # Every other layer is divided by inputs, and each of the four devices holds all of its biases: three copies.
    divided_by_inputs = prepared.problem.model.units[::2]
    copies_of_biases = 3 * sum(unit.output[0] for unit in divided_by_inputs)
    parameters = sum(assignment.parameters for assignment in prepared.plan.assignments)
    assert parameters == prepared.problem.model.parameters + copies_of_biases
