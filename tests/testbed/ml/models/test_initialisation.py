"""Initialisation of layers, against torch's functions."""

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
from tests.helpers.runs import fields_of, make_scenario, run_simulated

LINEAR = (40, 60)
CONVOLUTION = (32, 16, 3, 3)
shapes = pytest.mark.parametrize(
    "shape", [LINEAR, CONVOLUTION], ids=["linear", "convolution"]
)


def assert_just_below(largest: torch.Tensor, bound: float) -> None:
    # Of at least 2400 uniform draws the largest is within 2 % of the bound.
    assert 0.98 * bound < largest <= bound


@shapes
def test_he_bound_is_that_of_torch(shape: tuple[int, ...]) -> None:
    weights = torch.nn.init.kaiming_uniform_(torch.empty(shape), nonlinearity="relu")
    assert_just_below(weights.abs().max(), initial_bound("he", shape))


@shapes
def test_glorot_bound_is_that_of_torch(shape: tuple[int, ...]) -> None:
    weights = torch.nn.init.xavier_uniform_(torch.empty(shape))
    assert_just_below(weights.abs().max(), initial_bound("glorot", shape))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(torch.nn.Linear(60, 40), LINEAR), (torch.nn.Conv2d(16, 32, 3), CONVOLUTION)],
    ids=["linear", "convolution"],
)
def test_torch_bound_is_that_of_new_layer(
    layer: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    assert_just_below(layer.weight.abs().max(), initial_bound("torch", shape))


@shapes
def test_lecun_bound_gives_variance_of_one_over_inputs(shape: tuple[int, ...]) -> None:
    bound = initial_bound("lecun", shape)
    inputs = math.prod(shape[1:])
    variance = torch.empty(shape).uniform_(-bound, bound).var().item()
    assert variance * inputs == pytest.approx(1, 0.1)


def test_initialisation_applies_to_all_layers() -> None:
    original = create("resnet18", {}, (3, 32, 32), 10)
    model = original.with_initialisation("torch")
    state = model.build(0, len(model.units), seed=1).state_dict()
    for tensor in state.values():
        # Biases and normalisations have one dimension.
        if tensor.dim() > 1:
            bound = initial_bound("torch", tuple(tensor.shape))
            assert 0.9 * bound < tensor.abs().max() <= bound
    last = len(model.units) - 1
    # Other initialisations have biases of zero.
    assert state[f"{last}.0.bias"].abs().max() > 0
    # Models compare by structure, whatever their initial weights.
    assert model == original


def test_initial_weights_of_stage_equal_those_of_whole_model() -> None:
    model = create("resnet18", {}, (3, 32, 32), 10).with_initialisation("torch")
    count = len(model.units)
    expected = model.build(0, count, seed=1).state_dict()
    stage = model.build(count - 1, count, seed=1).state_dict()
    for name, tensor in stage.items():
        assert torch.equal(expected[name], tensor), name


def test_methods_share_initialisation_of_scenario() -> None:
    def first_loss(method: str, initialisation: str | None) -> float:
        workload: dict[str, object] = {"steps": 2}
        if initialisation:
            workload["initialisation"] = initialisation
        run = run_simulated(
            make_scenario(1, workload=workload, method={"name": method})
        )
        return fields_of(run, "step")[0]["loss"]

    assert first_loss("single", "he") != first_loss("single", None)
    # LeCun's is the default.
    assert first_loss("single", "lecun") == first_loss("single", None)
    single = first_loss("single", "torch")
    assert first_loss("pipeline", "torch") == pytest.approx(single, abs=1e-6)


def test_initialisation_of_user_network_is_rejected() -> None:
    network = "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    code = Code(name="net", module="net", sources={"net": network})
    model = {"name": "net", "file": "net.py"}
    workload = make_scenario(
        1, workload={"initialisation": "he", "model": model}
    ).workload
    with pytest.raises(InputError, match="initialises its own weights"):
        model_of(workload, code, 10, InputSpec((1, 8, 8)))


def test_initialisation_with_weights_from_file_is_rejected() -> None:
    model = {"name": "mlp", "weights": "w.safetensors"}
    with pytest.raises(ValueError, match="exclude 'initialisation'"):
        make_scenario(1, workload={"initialisation": "he", "model": model})
