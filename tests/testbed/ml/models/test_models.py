"""Models: analytic costs against torch's counters, seeded weights, and stages against the whole network."""

import math
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.models.catalog import describe
from testbed.ml.models.chain import Model, backward_of, chain
from testbed.ml.models.layers import (
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
)

DEPTHWISE = (Conv2d(6, groups=6, padding=1, bias=False), ReLU(), Conv2d(6, 1))
DOWNSAMPLING = (Conv2d(8, stride=2, padding=1), ReLU())
SHORTCUT = (Conv2d(8, 1, stride=2),)
RESIDUAL = chain(
    "residual",
    (3, 9, 9),
    4,
    [
        ("stem", [Conv2d(6, 5, stride=2, padding=1), BatchNorm2d(), ReLU(6.0)]),
        ("same", [Residual(DEPTHWISE)]),
        ("wider", [Residual(DOWNSAMPLING, SHORTCUT), Dropout(0.0)]),
        ("head", [MaxPool2d(), Flatten(), Linear(5, bias=False), ReLU()]),
        ("output", [Linear(4)]),
    ],
)
MODELS = [
    create("mlp", {}, (1, 28, 28), 10),
    create("mlp", {"hidden": []}, (1, 8, 8), 3),
    create("cnn", {}, (1, 8, 8), 10),
    create("cnn", {"channels": [2, 3, 4], "hidden": [5]}, (1, 28, 28), 47),
    create("cnn", {}, (3, 32, 32), 10),
    create("vgg5", {}, (3, 32, 32), 10),
    create("vgg5", {"batch_norm": False}, (1, 28, 28), 10),
    create("mobilenetv2", {"width": 0.35, "dropout": 0}, (1, 8, 8), 10),
    create("resnet18", {"batch_norm": False}, (1, 8, 8), 10),
    RESIDUAL,
]
every_model = pytest.mark.parametrize(
    "model", MODELS, ids=lambda model: f"{model.name}-{model.input}"
)


def draw_batch(model: Model, samples: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(samples, *model.input, generator=generator)


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@every_model
def test_shapes_and_parameters_match_built_modules(model: Model) -> None:
    values = draw_batch(model)
    built = model.build(0, len(model.units), seed=1)
    for unit, module in zip(model.units, built, strict=True):
        values = module(values)
        assert values.shape[1:] == unit.output
        assert unit.output_bytes == values[0].numel() * 4
        assert unit.parameters == count_parameters(module)
    assert model.parameters == count_parameters(built)


def has_grouped_convolution(module: nn.Module) -> bool:
    submodules = module.modules()
    convolutions = [module for module in submodules if isinstance(module, nn.Conv2d)]
    return any(convolution.groups > 1 for convolution in convolutions)


@every_model
def test_flops_equal_counts_of_torch(model: Model) -> None:
    samples = 2
    values = draw_batch(model, samples)
    built = model.build(0, len(model.units), seed=1)
    for unit, module in zip(model.units, built, strict=True):
        values = values.detach().requires_grad_()
        with FlopCounterMode(display=False) as forward:
            output = module(values)
        assert forward.get_total_flops() == samples * unit.forward_flops
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        # torch counts the backward of a depthwise convolution as if it had one group.
        if not has_grouped_convolution(module):
            per_sample = backward_of(unit.cost, 1).of().flops
            assert backward.get_total_flops() == samples * per_sample
        values = output


@every_model
def test_activation_bytes_count_outputs_of_all_layers(model: Model) -> None:
    output_bytes: list[int] = []

    def record_output(module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        # A plain Sequential has the output of its last layer; a Residual adds one of its own.
        if isinstance(module, nn.Sequential) and not hasattr(module, "block"):
            return
        output_bytes.append(output[0].numel() * 4)

    values = draw_batch(model)
    built = model.build(0, len(model.units), seed=1)
    for unit, module in zip(model.units, built, strict=True):
        output_bytes.clear()
        for submodule in module.modules():
            submodule.register_forward_hook(record_output)
        values = module(values)
        assert unit.activation_bytes == sum(output_bytes)


@every_model
def test_stages_have_outputs_and_gradients_of_whole_model(model: Model) -> None:
    last = len(model.units)
    network = model.build(0, last, seed=3)
    inputs = draw_batch(model)
    labels = torch.arange(3) % model.classes
    expected = network(inputs)
    nn.functional.cross_entropy(expected, labels).backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    for split in range(1, last):
        front = model.build(0, split, seed=3)
        back = model.build(split, last, seed=3)
        names = front.state_dict().keys() | back.state_dict().keys()
        assert names == network.state_dict().keys()
        sent = front(inputs)
        # As on two devices, the second stage has a copy without autograd history.
        received = sent.detach().requires_grad_()
        output = back(received)
        assert torch.equal(output, expected)
        nn.functional.cross_entropy(output, labels).backward()
        sent.backward(received.grad)
        for name, parameter in [*front.named_parameters(), *back.named_parameters()]:
            assert torch.equal(parameter.grad, gradients[name]), name


def test_weights_depend_on_seed_and_unit_only() -> None:
    model = create("cnn", {}, (1, 8, 8), 10)
    state = model.build(0, 6, seed=7).state_dict()
    assert list(state)[:2] == ["0.0.weight", "0.0.bias"]
    # The state of torch's global generator must not matter.
    torch.manual_seed(99)
    stage = model.build(2, 5, seed=7).state_dict()
    assert {name.split(".")[0] for name in stage} == {"2", "3", "4"}
    other_seed = model.build(2, 5, seed=8).state_dict()
    for name, tensor in stage.items():
        assert torch.equal(state[name], tensor)
        # Biases are zero for every seed.
        if name.endswith("weight"):
            assert not torch.equal(other_seed[name], tensor)


def test_building_keeps_state_of_global_generator() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    for model in MODELS:
        model.build(0, len(model.units), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_concurrent_builds_have_equal_weights() -> None:
    model = create("cnn", {}, (1, 8, 8), 10)
    expected = model.build(0, 6, seed=1).state_dict()
    states: list[dict[str, torch.Tensor]] = []

    def build() -> None:
        states.append(model.build(0, 6, seed=1).state_dict())

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(states) == 8
    for state in states:
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name


def test_initial_weights_have_variance_of_one_over_inputs() -> None:
    model = create("mlp", {"hidden": [400]}, (1, 10, 10), 10)
    linear = model.build(0, 1, seed=0)[0][1]
    # 10x10 pixels are 100 inputs: the outputs have the variance of the inputs.
    expected = math.sqrt(1 / 100)
    assert float(linear.weight.detach().std()) == pytest.approx(expected, rel=0.02)
    assert not linear.bias.detach().any()


def test_empty_range_of_units_builds_empty_module() -> None:
    model = create("mlp", {}, (1, 8, 8), 10)
    assert len(model.build(2, 2, seed=0)) == 0


def test_range_beyond_last_unit_is_rejected() -> None:
    model = create("mlp", {}, (1, 8, 8), 10)
    with pytest.raises(ValueError, match="units 0 to 5, not 3 to 6"):
        model.build(3, 6, seed=0)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("resnet", (1, 8, 8), "unknown model 'resnet': did you mean 'resnet18'"),
        (
            "cnn",
            (1, 3, 3),
            "cannot take inputs of 1x3x3: MaxPool2d of kernel 2 does not fit into 1 pixels",
        ),
        ("cnn", (64,), r"needs \(channels, height, width\), not \(64,\)"),
    ],
    ids=["unknown-name", "image-too-small", "not-an-image"],
)
def test_impossible_model_is_rejected_with_reason(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        create(name, {}, shape, 10)


def test_layers_reject_unsuitable_inputs() -> None:
    with pytest.raises(ValueError, match="put a Flatten before it"):
        Linear(3).output((1, 2, 2))
    with pytest.raises(ValueError, match="cannot have 2 groups"):
        Conv2d(4, groups=2).output((3, 8, 8))
    with pytest.raises(ValueError, match="give it a shortcut that fits"):
        Residual((Conv2d(4, padding=1),)).output((3, 8, 8))
    with pytest.raises(ValueError, match="not with one value for each of 10 classes"):
        chain("odd", (4,), 10, [("only", [Linear(3)])])
    with pytest.raises(ValueError, match="takes"):
        Model("broken", (5,), 10, create("mlp", {}, (1, 8, 8), 10).units)


def test_description_holds_sizes_and_costs_of_units() -> None:
    description = describe(create("cnn", {}, (1, 8, 8), 10))
    units = description["units"]
    assert description["parameters"] == sum(unit["parameters"] for unit in units)
    # The output layer has 84 inputs, 10 outputs and 10 biases.
    assert units[5] == {
        "index": 5,
        "name": "output",
        "output": [10],
        "reads": [4],
        "parameters": 850,
        "weights": 840,
        "forward_flops": 1680.0,
        "multiplications": 840,
        "output_bytes": 40,
        "cut_bytes": 40,
        "activation_bytes": 40,
    }
