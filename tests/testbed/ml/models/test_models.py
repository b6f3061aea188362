"""Models: formulas against torch, seeded building, and stages that compose to the whole."""

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

RESIDUAL = chain(
    "residual",
    (3, 9, 9),
    4,
    [
        ("stem", [Conv2d(6, 5, stride=2, padding=1), BatchNorm2d(), ReLU(6.0)]),
        (
            "same",
            [
                Residual(
                    (Conv2d(6, groups=6, padding=1, bias=False), ReLU(), Conv2d(6, 1))
                )
            ],
        ),
        (
            "wider",
            [
                Residual(
                    (Conv2d(8, stride=2, padding=1), ReLU()), (Conv2d(8, 1, stride=2),)
                ),
                Dropout(0.0),
            ],
        ),
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


def batch(model: Model, samples: int = 3) -> torch.Tensor:
    return torch.rand(
        samples,
        *model.input,
        generator=torch.Generator().manual_seed(5),
        dtype=torch.float32,
    )


@every_model
def test_shapes_and_parameters_are_those_of_the_built_modules(model: Model) -> None:
    values = batch(model)
    built = model.build(0, len(model.units), seed=1)
    for unit, module in zip(model.units, built, strict=True):
        values = module(values)
        assert values.shape[1:] == unit.output
        assert unit.output_bytes == values[0].numel() * 4
        assert unit.parameters == sum(
            parameter.numel() for parameter in module.parameters()
        )
    assert model.parameters == sum(
        parameter.numel() for parameter in built.parameters()
    )


@every_model
def test_flops_are_those_torch_counts(model: Model) -> None:
    values = batch(model, samples=2)
    for unit, module in zip(
        model.units, model.build(0, len(model.units), seed=1), strict=True
    ):
        values = values.detach().requires_grad_()
        with FlopCounterMode(display=False) as forward:
            output = module(values)
        assert forward.get_total_flops() == 2 * unit.forward_flops
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        grouped = any(
            isinstance(inner, nn.Conv2d) and inner.groups > 1
            for inner in module.modules()
        )
        if not grouped:  # torch counts the backward of a depthwise convolution as if it had one group
            assert (
                backward.get_total_flops() == 2 * backward_of(unit.cost, 1).of().flops
            )
        values = output


@every_model
def test_activations_are_the_outputs_of_all_layers(model: Model) -> None:
    made = 0

    def count(module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal made
        leaf = not isinstance(module, nn.Sequential) or hasattr(module, "block")
        made += output[0].numel() * 4 if leaf else 0

    values = batch(model)
    for unit, module in zip(
        model.units, model.build(0, len(model.units), seed=1), strict=True
    ):
        made = 0
        for inner in module.modules():
            inner.register_forward_hook(count)
        values = module(values)
        assert unit.activation_bytes == made


@every_model
def test_stages_compose_to_the_whole_at_every_split_point(model: Model) -> None:
    last = len(model.units)
    whole = model.build(0, last, seed=3)
    inputs, labels = batch(model), torch.arange(3) % model.classes
    expected = whole(inputs)
    nn.functional.cross_entropy(expected, labels).backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for split in range(1, last):
        front, back = model.build(0, split, seed=3), model.build(split, last, seed=3)
        assert {
            **front.state_dict(),
            **back.state_dict(),
        }.keys() == whole.state_dict().keys()
        sent = front(inputs)
        received = sent.detach().requires_grad_()
        output = back(received)
        assert torch.equal(output, expected)
        nn.functional.cross_entropy(output, labels).backward()
        sent.backward(received.grad)
        for name, parameter in [*front.named_parameters(), *back.named_parameters()]:
            assert torch.equal(parameter.grad, gradients[name]), name


def test_weights_depend_on_the_seed_and_the_unit_alone() -> None:
    model = create("cnn", {}, (1, 8, 8), 10)
    whole = model.build(0, 6, seed=7).state_dict()
    assert list(whole)[:2] == ["0.0.weight", "0.0.bias"]
    torch.manual_seed(99)
    part = model.build(2, 5, seed=7).state_dict()
    assert {key.split(".")[0] for key in part} == {"2", "3", "4"}
    assert all(torch.equal(whole[key], value) for key, value in part.items())
    other = model.build(2, 5, seed=8).state_dict()
    assert not any(
        torch.equal(part[key], other[key]) for key in part if key.endswith("weight")
    )


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    for model in MODELS:
        model.build(0, len(model.units), seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_may_build_at_the_same_time() -> None:
    model = create("cnn", {}, (1, 8, 8), 10)
    expected = model.build(0, 6, seed=1).state_dict()
    built: list[dict[str, torch.Tensor]] = []
    threads = [
        threading.Thread(
            target=lambda: built.append(model.build(0, 6, seed=1).state_dict())
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8
    assert all(
        torch.equal(state[key], expected[key]) for state in built for key in expected
    )


def test_initial_weights_keep_the_variance() -> None:
    linear = create("mlp", {"hidden": [400]}, (1, 10, 10), 10).build(0, 1, seed=0)[0][1]
    assert float(linear.weight.detach().std()) == pytest.approx(
        math.sqrt(1 / 100), rel=0.02
    )
    assert not linear.bias.detach().any()


def test_an_empty_or_impossible_range_of_units() -> None:
    model = create("mlp", {}, (1, 8, 8), 10)
    assert len(model.build(2, 2, seed=0)) == 0
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
)
def test_impossible_models_are_rejected_with_the_reason(
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


def test_a_model_as_plain_values() -> None:
    figures = describe(create("cnn", {}, (1, 8, 8), 10))
    assert figures["parameters"] == sum(unit["parameters"] for unit in figures["units"])
    assert figures["units"][5] == {
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
