"""Our descent against torch's own, to the bit."""

from __future__ import annotations

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.training.optimizers import Sgd, TorchOptimizer
from testbed.ml.training.schema import OptimizerPart
from tests.helpers.training import training_config


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 4e-5])
def test_equals_torch_to_the_bit(momentum: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(3)
    settings = OptimizerPart(
        learning_rate=0.07, momentum=momentum, weight_decay=weight_decay
    )
    start = torch.randn(17, 5, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Sgd(settings)
    reference = torch.optim.SGD(
        [theirs], lr=0.07, momentum=momentum, weight_decay=weight_decay, foreach=False
    )
    for _ in range(20):
        gradient = torch.randn(17, 5, generator=generator)
        theirs.grad = gradient.clone()
        mine.step({"w": ours}, {"w": gradient})
        reference.step()
        assert torch.equal(ours, theirs)


def steps(
    optimizer: TorchOptimizer,
    weights: torch.nn.Parameter,
    gradients: list[torch.Tensor],
) -> None:
    for gradient in gradients:
        optimizer.step({"0.w": weights}, {"0.w": gradient.clone()})


@pytest.mark.parametrize(
    "keys",
    [
        *(
            {"name": name}
            for name in (
                "adam",
                "adamw",
                "RMSprop",
                "adagrad",
                "nadam",
                "radam",
                "adamax",
                "adadelta",
            )
        ),
        *({"name": name} for name in ("asgd", "rprop", "adafactor")),
        {"name": "adam", "learning_rate": 0.01, "betas": [0.8, 0.99], "amsgrad": True},
        {"name": "sgd", "momentum": 0.9, "nesterov": True},
    ],
    ids=lambda keys: keys["name"],
)
def test_every_optimizer_of_torch_goes_on_from_its_state_to_the_bit(keys):
    made = training_config(optimizer=keys)
    torch.manual_seed(5)
    start, gradients = torch.randn(6, 4), [torch.randn(6, 4) for _ in range(5)]
    theirs, moved = (torch.nn.Parameter(start.clone()) for _ in range(2))
    reference = made._make_optimizer([theirs])
    for gradient in gradients:
        theirs.grad = gradient.clone()
        reference.step()
    first, second = made.optimizer(), made.optimizer()
    steps(first, moved, gradients[:3])
    moved = torch.nn.Parameter(
        moved.detach().clone()
    )  # another version, on another device
    second.load({"0.w": moved.detach(), **first.state()})
    steps(second, moved, gradients[3:])
    assert torch.equal(moved, theirs)
    kept = {
        name: (tuple(tensor.shape), tensor.dtype)
        for name, tensor in second.state().items()
    }
    assert kept == {
        f"{kind}0.w": described for kind, described in made.kept_shapes((6, 4)).items()
    }


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"name": "adamw"}, 2),
        ({"name": "adam", "amsgrad": True}, 3),
        ({"name": "rmsprop", "momentum": 0.9}, 2),
    ],
)
def test_what_an_optimizer_keeps_is_counted(keys, values):
    assert training_config(optimizer=keys).state_values == pytest.approx(
        values, abs=0.01
    )
    assert training_config(optimizer=keys, ema=0.9).state_values == pytest.approx(
        values + 1, abs=0.01
    )
    assert training_config(optimizer=keys).update_flops >= 10


def test_a_number_in_the_state_of_an_optimizer_stays_a_number():
    optimizer = TorchOptimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer._state = {"0.w": {"step": 3, "scale": 0.5, "buffer": torch.ones(2)}}
    again = TorchOptimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    again.load(optimizer.state())
    assert (again._state["0.w"]["step"], again._state["0.w"]["scale"]) == (3, 0.5)
    assert torch.equal(again._state["0.w"]["buffer"], torch.ones(2))


@pytest.mark.parametrize(
    ("keys", "words"),
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
        ({"schedule": {"name": "cosine-annealing"}}, "write 'T_max'"),
        (
            {"schedule": [{"name": "linear"}, {"name": "exponential", "gamma": 0.9}]},
            "set 'steps'",
        ),
    ],
)
def test_what_is_wrong_is_said(keys, words):
    with pytest.raises(InputError, match=words):
        training_config(**keys).check()
