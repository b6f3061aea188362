"""Optimizers: plain stochastic gradient descent, and every other optimizer by torch.

Torch's own optimizers import its compiler when the first of them is made. Every device would pay for the import at each
start: 2 s of processor time and 800 modules for three lines of arithmetic. Plain descent is therefore implemented here,
bitwise equal to ``torch.optim.SGD``.

The state of an optimizer is tensors by ``kind:parameter``, such as ``momentum:0.weight`` or ``exp_avg:0.weight``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from testbed.ml.lazy import torch
from testbed.ml.training.schema import OptimizerPart

MOMENTUM = "momentum:"
AVERAGE = "average:"
"""Prefix of a weight's moving average."""


def is_weight(name: str) -> bool:
    """Return whether a tensor of a state is a model weight instead of optimizer state.

    >>> is_weight("0.weight"), is_weight("momentum:0.weight")
    (True, False)
    """
    return ":" not in name.partition(".")[0]


Kept = Mapping[str, tuple[tuple[int, ...], "torch.dtype"]]
"""Additional values of a weight: shape and type, by kind with its colon."""


class Sgd:
    """Stochastic gradient descent with momentum and weight decay: updates named parameters in place."""

    def __init__(self, part: OptimizerPart) -> None:
        self._rate = part.rate
        self._momentum = part.momentum or 0.0
        self._decay = part.weight_decay or 0.0
        self.momentum: dict[str, torch.Tensor] = {}
        """The running sum of gradients, by parameter; empty before the first step."""

    def step(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any] = {},
    ) -> None:
        """Take one step along the gradients; a parameter without a gradient is unchanged.

        ``settings`` are those of this step, such as ``lr``, if a schedule changes them. With gradient g, decay d,
        momentum m and learning rate r: g += d w; b = m b + g (b = g at first); w -= r b. The decay uses the updated
        parameters, regardless of the version the gradients were computed with.
        """
        rate, share = (
            settings.get("lr", self._rate),
            settings.get("momentum", self._momentum),
        )
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameter = parameters[name]
                if self._decay:
                    gradient = gradient.add(parameter, alpha=self._decay)
                if share:
                    running = self.momentum.get(name)
                    running = (
                        gradient.clone()
                        if running is None
                        else running.mul_(share).add_(gradient)
                    )
                    self.momentum[name] = gradient = running
                parameter.add_(gradient, alpha=-rate)

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the momentum."""
        return {
            MOMENTUM + name: running.clone() for name, running in self.momentum.items()
        }

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore momentum; missing momentum starts from zero."""
        momentum = {
            name: tensor for name, tensor in state.items() if name.startswith(MOMENTUM)
        }
        self.momentum = {
            name.removeprefix(MOMENTUM): tensor.clone()
            for name, tensor in momentum.items()
        }


class TorchOptimizer:
    """A torch optimizer for parameters that differ in each version of the weights."""

    def __init__(
        self, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._make = make
        self._optimizer = make([torch.nn.Parameter(torch.zeros(1, 1))])
        self._state: dict[str, dict[str, Any]] = {}
        """By parameter."""

    def step(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        gradients: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any] = {},
    ) -> None:
        """Take one step along the gradients; a parameter without a gradient is unchanged."""
        (group,) = self._optimizer.param_groups
        group |= {"params": [parameters[name] for name in gradients], **settings}
        for name in gradients:
            if name not in self._state:
                # Some of older torch are made with a state, which others make in their first step.
                self._state[name] = self._make([parameters[name]]).state[
                    parameters[name]
                ]
        known: dict[torch.Tensor, Any] = {
            parameters[name]: self._state[name] for name in gradients
        }
        self._optimizer.state = defaultdict(dict, known)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        self._optimizer.step()
        for name in gradients:
            parameters[name].grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state of each parameter; numbers become tensors without axes."""
        tensors: dict[str, torch.Tensor] = {}
        for name, kept in self._state.items():
            for kind, value in kept.items():
                if isinstance(value, int | float):
                    value = torch.tensor(
                        value,
                        dtype=torch.float64
                        if isinstance(value, float)
                        else torch.int64,
                    )
                if isinstance(value, torch.Tensor):
                    tensors[f"{kind}:{name}"] = value.detach().clone()
        return tensors

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `state`."""
        self._state = {}
        for key, tensor in state.items():
            if not is_weight(key) and not key.startswith(AVERAGE):
                kind, name = key.split(":", 1)
                number = not tensor.ndim and tensor.dtype in (
                    torch.int64,
                    torch.float64,
                )
                self._state.setdefault(name, {})[kind] = (
                    tensor.item() if number else tensor.clone()
                )


Optimizer = Sgd | TorchOptimizer


class Measured(NamedTuple):
    """Measured state and operations of an optimizer per weight."""

    kept: Kept
    values: float
    """Kept for each value of the weight."""
    flops: float
    """For each value of the weight in a step: 2 for each operation whose result is as large as the weight."""


def measure(optimizer: TorchOptimizer, shape: tuple[int, ...]) -> Measured:
    """Measure two steps of a new optimizer on a weight of a shape."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = function(*args, **(kwargs or {}))
            self.count += (
                isinstance(made, torch.Tensor) and made.numel() == weight.numel()
            )
            return made

    weight, gradient = torch.nn.Parameter(torch.zeros(shape)), torch.ones(shape)
    optimizer.step({"0": weight}, {"0": gradient})
    with Counting() as counting:  # type: ignore[no-untyped-call]
        optimizer.step({"0": weight}, {"0": gradient})
    state = optimizer.state()
    values = sum(tensor.numel() for tensor in state.values()) / weight.numel()
    kept = {
        f"{name.partition(':')[0]}:": (tuple(tensor.shape), tensor.dtype)
        for name, tensor in state.items()
    }
    return Measured(kept, round(values, 2), 2.0 * counting.count)
