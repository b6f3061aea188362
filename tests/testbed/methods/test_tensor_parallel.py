"""The example of a tensor-parallel perceptron answers as the undivided model, with the weights that it is given."""

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


def answers(devices=3, hidden=(9, 7), weights=None):
    """Run the example in a smaller size; return its outputs, and those of the undivided model."""
    model = f"workload.model={{name: mlp, hidden: {list(hidden)}{', weights: some' if weights else ''}}}"
    changes = [model, f"devices.source.count={devices}", "workload.requests=2"]
    (trial,) = trials(load(EXAMPLE, changes))
    with patch(
        "testbed.ml.preparation._pretraining", return_value=None
    ):  # the weights lie in no file
        prepared = prepare(trial)
    data, network, found = (
        load_data(trial.scenario.workload.data),
        prepared.problem.model,
        {},
    )

    def add(self, index, outputs):
        found[index] = outputs

    with patch.object(Answers, "add", add):
        outcome = simulate(prepared, data, weights=weights)
    assert outcome.status == "finished", outcome.error
    whole = network.build(0, len(network.units), prepared.problem.seed).eval()
    if weights is not None:
        whole.load_state_dict(weights)
    with torch.no_grad():
        wanted = whole(torch.from_numpy(data.test_images[:16]))
    return torch.cat([found[0], found[1]]), wanted


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("hidden", [(9,), (9, 7), (13, 5, 6)])
def test_divided_outputs_equal_the_undivided_model(devices, hidden):
    found, wanted = answers(devices, hidden)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_given_weights_are_used():
    (trial,) = trials(load(EXAMPLE, ["workload.model={name: mlp, hidden: [9, 7]}"]))
    network = prepare(trial).problem.model
    given = network.build(0, len(network.units), 12345).state_dict()
    found, wanted = answers(3, (9, 7), given)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    seeded, _ = answers(3, (9, 7))
    assert not torch.allclose(found, seeded, rtol=1e-2)


def test_a_convolution_is_refused():
    (trial,) = trials(load(EXAMPLE, ["workload.model={name: cnn}"]))
    with pytest.raises(InputError, match="divides fully connected layers"):
        prepare(trial)


def test_the_plan_holds_each_weight_once():
    (trial,) = trials(load(EXAMPLE))
    prepared = prepare(trial)
    biases_of_all = 3 * sum(
        unit.output[0] for unit in prepared.problem.model.units[::2]
    )
    parameters = sum(assignment.parameters for assignment in prepared.plan.assignments)
    assert parameters == prepared.problem.model.parameters + biases_of_all
