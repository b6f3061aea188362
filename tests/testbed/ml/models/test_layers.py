"""How first weights are drawn, beside torch's own functions."""

from __future__ import annotations

import math

import pytest
import torch

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.fields import InputSpec
from testbed.ml.learning import model_of
from testbed.ml.models import create
from testbed.ml.models.layers import initial_bound
from tests.helpers.runs import fields_of, run_simulated, scenario

TORCH = {"he": torch.nn.init.kaiming_uniform_, "glorot": torch.nn.init.xavier_uniform_}


@pytest.mark.parametrize("how", ["lecun", "he", "glorot", "torch"])
@pytest.mark.parametrize("shape", [(40, 60), (32, 16, 3, 3)])
def test_weights_reach_as_far_from_zero_as_torch_draws_them(how, shape):
    limit = initial_bound(how, shape)
    match how:
        case "he" | "glorot":
            reached = (
                TORCH[how](
                    torch.empty(shape),
                    **({"nonlinearity": "relu"} if how == "he" else {}),
                )
                .abs()
                .max()
            )
        case "torch":
            made = (
                torch.nn.Linear(60, 40)
                if len(shape) == 2
                else torch.nn.Conv2d(16, 32, 3)
            )
            reached = made.weight.abs().max()
        case _:
            assert torch.empty(shape).uniform_(-limit, limit).var().item() * math.prod(
                shape[1:]
            ) == pytest.approx(1, 0.1)
            return
    assert 0.98 * limit < reached <= limit


def test_initialisation_applies_to_all_layers_and_to_shards():
    plain = create("resnet18", {}, (3, 32, 32), 10)
    model = plain.initialised("torch")
    whole = model.build(0, len(model.units), 1).state_dict()
    for tensor in whole.values():
        if tensor.dim() > 1:
            assert (
                0.9 * initial_bound("torch", tuple(tensor.shape))
                < tensor.abs().max()
                <= initial_bound("torch", tuple(tensor.shape))
            )
    last = len(model.units) - 1
    assert whole[f"{last}.0.bias"].abs().max() > 0
    part = model.build(last, last + 1, 1).state_dict()
    assert all(torch.equal(whole[name], tensor) for name, tensor in part.items())
    assert model == plain  # the same network, whatever it begins with


def test_initialisation_of_a_scenario_is_the_same_for_all_methods():
    def loss(method, how):
        keys = {"initialisation": how} if how else {}
        return fields_of(
            run_simulated(
                scenario(1, workload={"steps": 2, **keys}, method={"name": method})
            ),
            "step",
        )[0]["loss"]

    assert loss("single", "he") != loss("single", None)
    assert loss("single", "lecun") == loss("single", None)
    assert loss("pipeline", "torch") == pytest.approx(loss("single", "torch"), abs=1e-6)


def test_initialisation_is_rejected_for_other_models(tmp_path):
    network = "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    code = Code(name="net", module="net", sources={"net": network})
    workload = scenario(
        1, workload={"initialisation": "he", "model": {"name": "net", "file": "net.py"}}
    ).workload
    with pytest.raises(InputError, match="initialises its own weights"):
        model_of(workload, code, 10, InputSpec((1, 8, 8)))
    with pytest.raises(ValueError, match="exclude 'initialisation'"):
        scenario(
            1,
            workload={
                "initialisation": "he",
                "model": {"name": "mlp", "weights": "w.safetensors"},
            },
        )
