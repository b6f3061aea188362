"""Optimizers: bitwise equality with torch, state that moves between devices, and cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.training.optimizers import Sgd, TorchOptimizer
from testbed.ml.training.schema import OptimizerPart
from tests.helpers.training import training_config


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 4e-5])
def test_sgd_is_bitwise_equal_to_torch(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(3)
    initial = torch.randn(17, 5, generator=generator)
    part = OptimizerPart(
        learning_rate=0.07, momentum=momentum, weight_decay=weight_decay
    )
    optimizer = Sgd(part)
    weight = torch.nn.Parameter(initial.clone())
    torch_weight = torch.nn.Parameter(initial.clone())
    # Without foreach, whose order of operations rounds differently.
    torch_optimizer = torch.optim.SGD(
        [torch_weight],
        lr=0.07,
        momentum=momentum,
        weight_decay=weight_decay,
        foreach=False,
    )
    for _ in range(20):
        gradient = torch.randn(17, 5, generator=generator)
        torch_weight.grad = gradient.clone()
        torch_optimizer.step()
        optimizer.step({"w": weight}, {"w": gradient})
        assert torch.equal(weight, torch_weight)


def apply_gradients(
    optimizer: TorchOptimizer,
    weight: torch.nn.Parameter,
    gradients: Sequence[torch.Tensor],
) -> None:
    for gradient in gradients:
        optimizer.step({"0.w": weight}, {"0.w": gradient.clone()})


OPTIMIZERS: list[dict[str, object]] = [
    {"name": "adam"},
    {"name": "adamw"},
    {"name": "RMSprop"},
    {"name": "adagrad"},
    {"name": "nadam"},
    {"name": "radam"},
    {"name": "adamax"},
    {"name": "adadelta"},
    {"name": "asgd"},
    {"name": "rprop"},
    {"name": "adafactor"},
    {"name": "adam", "learning_rate": 0.01, "betas": [0.8, 0.99], "amsgrad": True},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
]
every_optimizer = pytest.mark.parametrize(
    "keys", OPTIMIZERS, ids=lambda keys: "-".join([keys["name"], *list(keys)[1:]])
)


@every_optimizer
def test_optimizer_with_loaded_state_is_bitwise_equal_to_torch(
    keys: dict[str, object],
) -> None:
    config = training_config(optimizer=keys)
    torch.manual_seed(5)
    initial = torch.randn(6, 4)
    gradients = [torch.randn(6, 4) for _ in range(5)]
    expected = torch.nn.Parameter(initial.clone())
    reference = config._make_optimizer([expected])
    for gradient in gradients:
        expected.grad = gradient.clone()
        reference.step()
    first = config.optimizer()
    weight = torch.nn.Parameter(initial.clone())
    apply_gradients(first, weight, gradients[:3])
    # Another device receives weight and state, and has a parameter object of its own.
    second = config.optimizer()
    received = torch.nn.Parameter(weight.detach().clone())
    second.load({"0.w": received.detach(), **first.state()})
    apply_gradients(second, received, gradients[3:])
    assert torch.equal(received, expected)


@every_optimizer
def test_predicted_state_shapes_equal_actual_state(keys: dict[str, object]) -> None:
    config = training_config(optimizer=keys)
    optimizer = config.optimizer()
    weight = torch.nn.Parameter(torch.randn(6, 4))
    apply_gradients(optimizer, weight, [torch.randn(6, 4)])
    actual = {}
    for key, tensor in optimizer.state().items():
        actual[key] = (tuple(tensor.shape), tensor.dtype)
    predicted = {}
    for kind, shape_and_type in config.state_shapes((6, 4)).items():
        predicted[f"{kind}0.w"] = shape_and_type
    assert actual == predicted


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"name": "adamw"}, 2),
        # The maximum of the second moments is a third value.
        ({"name": "adam", "amsgrad": True}, 3),
        ({"name": "rmsprop", "momentum": 0.9}, 2),
    ],
    ids=["adamw", "amsgrad", "rmsprop"],
)
def test_state_values_per_weight_are_counted(
    keys: dict[str, object], values: int
) -> None:
    config = training_config(optimizer=keys)
    # Counters of steps are negligible.
    assert config.state_values == pytest.approx(values, abs=0.01)
    # At least five operations on each value, of two FLOPs each.
    assert config.update_flops >= 10
    with_average = training_config(optimizer=keys, ema=0.9)
    assert with_average.state_values == pytest.approx(values + 1, abs=0.01)


def test_numbers_in_optimizer_state_stay_numbers() -> None:
    def make_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    optimizer = TorchOptimizer(make_sgd)
    optimizer._states = {"0.w": {"step": 3, "scale": 0.5, "buffer": torch.ones(2)}}
    restored = TorchOptimizer(make_sgd)
    restored.load(optimizer.state())
    state = restored._states["0.w"]
    assert state["step"] == 3
    assert state["scale"] == 0.5
    assert torch.equal(state["buffer"], torch.ones(2))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optimizer": {"name": "adamm"}}, "available: ASGD, Adadelta"),
        ({"optimizer": {"name": "lbfgs"}}, "has no 'lbfgs' supported here"),
        (
            {"optimizer": {"name": "adam", "beta": 1}},
            "unexpected keyword argument 'beta'",
        ),
        ({"optimizer": {"name": "adam", "betas": [2, 3]}}, "Invalid beta"),
        (
            {"loss": {"name": "mse", "colour": 1}},
            "unexpected keyword argument 'colour'",
        ),
        ({"schedule": {"name": "cosine-annealing"}}, "set 'T_max'"),
        (
            {"schedule": [{"name": "linear"}, {"name": "exponential", "gamma": 0.9}]},
            "set 'steps'",
        ),
    ],
    ids=[
        "unknown-optimizer",
        "unsupported-optimizer",
        "unknown-optimizer-option",
        "impossible-option",
        "unknown-loss-option",
        "missing-schedule-length",
        "missing-length-of-first-schedule",
    ],
)
def test_impossible_training_keys_are_rejected(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        training_config(**keys).check()
