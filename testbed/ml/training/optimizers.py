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

        >>> weight = torch.tensor([1.0])
        >>> Sgd(OptimizerPart(learning_rate=0.5)).step({"w": weight}, {"w": torch.tensor([1.0])})
        >>> weight
        tensor([0.5000])
        """
        rate = settings.get("lr", self._rate)
        share = settings.get("momentum", self._momentum)
        # The order of operations is that of ``torch.optim.SGD``, for equal bits.
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameter = parameters[name]
                if self._decay:
                    gradient = gradient.add(parameter, alpha=self._decay)
                if share:
                    gradient = self._add_momentum(name, gradient, share)
                parameter.add_(gradient, alpha=-rate)

    def _add_momentum(
        self,
        name: str,
        gradient: torch.Tensor,
        share: float,
    ) -> torch.Tensor:
        """Return the running sum of a parameter's gradients, including this one."""
        running = self.momentum.get(name)
        if running is None:
            running = gradient.clone()
        else:
            running.mul_(share).add_(gradient)
        self.momentum[name] = running
        return running

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the momentum."""
        state = {}
        for name, running in self.momentum.items():
            state[MOMENTUM + name] = running.clone()
        return state

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore momentum; missing momentum starts from zero."""
        self.momentum = {}
        for name, tensor in state.items():
            if name.startswith(MOMENTUM):
                self.momentum[name.removeprefix(MOMENTUM)] = tensor.clone()


class TorchOptimizer:
    """A torch optimizer for parameters of any version of the weights."""

    def __init__(
        self, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._make = make
        # torch's classes refuse an empty list of parameters.
        self._optimizer = make([torch.nn.Parameter(torch.zeros(1, 1))])
        self._state: dict[str, dict[str, Any]] = {}
        """State by kind, for each parameter by name: torch keys it by object, which differs in each version."""

    def step(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        gradients: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any] = {},
    ) -> None:
        """Take one step along the gradients; a parameter without a gradient is unchanged."""
        (group,) = self._optimizer.param_groups
        group["params"] = [parameters[name] for name in gradients]
        group |= settings
        known: dict[torch.Tensor, Any] = {}
        for name in gradients:
            parameter = parameters[name]
            if name not in self._state:
                # Some optimizers of older torch have a state when they are made, others from their first step.
                self._state[name] = self._make([parameter]).state[parameter]
            known[parameter] = self._state[name]
        # torch expects an empty state for an unknown parameter.
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
                # 64 bits mark a number for `load`: torch's own counters are tensors of float32.
                if isinstance(value, float):
                    value = torch.tensor(value, dtype=torch.float64)
                elif isinstance(value, int):
                    value = torch.tensor(value, dtype=torch.int64)
                if isinstance(value, torch.Tensor):
                    tensors[f"{kind}:{name}"] = value.detach().clone()
        return tensors

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `state`."""
        self._state = {}
        numbers = (torch.int64, torch.float64)
        for key, tensor in state.items():
            if is_weight(key) or key.startswith(AVERAGE):
                continue
            kind, name = key.split(":", 1)
            # A number, as `state` marks it.
            is_number = tensor.ndim == 0 and tensor.dtype in numbers
            value = tensor.item() if is_number else tensor.clone()
            self._state.setdefault(name, {})[kind] = value


Optimizer = Sgd | TorchOptimizer


class Measured(NamedTuple):
    """Measured state and operations of an optimizer per weight."""

    kept: Kept
    values: float
    """Number of state values for each value of the weight."""
    flops: float
    """FLOPs of a step for each value of the weight: 2 for each operation whose result is as large as the weight."""


def measure_optimizer(optimizer: TorchOptimizer, shape: tuple[int, ...]) -> Measured:
    """Measure two steps of a new optimizer on a weight of a shape."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        count = 0

        def __torch_dispatch__(
            self,
            function: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.numel() == weight.numel():
                self.count += 1
            return made

    weight = torch.nn.Parameter(torch.zeros(shape))
    gradient = torch.ones(shape)
    # The first step also makes the state: the second is that of all later ones.
    optimizer.step({"0": weight}, {"0": gradient})
    with Counting() as counting:  # type: ignore[no-untyped-call]
        optimizer.step({"0": weight}, {"0": gradient})
    kept = {}
    values = 0
    for name, tensor in optimizer.state().items():
        kind, _, _ = name.partition(":")
        kept[f"{kind}:"] = (tuple(tensor.shape), tensor.dtype)
        values += tensor.numel()
    # Rounded, since counters are a value for the whole weight.
    per_value = round(values / weight.numel(), 2)
    return Measured(kept, per_value, flops=2.0 * counting.count)
