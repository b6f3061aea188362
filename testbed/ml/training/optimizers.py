"""Optimizers: an implementation of plain stochastic gradient descent, and a wrapper of torch's other optimizers.

The first optimizer of torch that is created imports torch's compiler. Every device would pay for the import at each
start: 2 s of processor time and 800 modules for three lines of arithmetic. Plain descent is therefore implemented here,
bitwise equal to ``torch.optim.SGD``.

The state of an optimizer is tensors by ``kind:parameter``, such as ``momentum:0.weight`` or ``exp_avg:0.weight``. In
states of a model they appear beside the weights, whose names have no kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from testbed.ml.lazy import torch
from testbed.ml.training.schema import OptimizerPart

MOMENTUM = "momentum:"
"""Prefix of the momentum of a weight."""
AVERAGE = "average:"
"""Prefix of the moving average of a weight."""


def is_weight(name: str) -> bool:
    """Return whether a tensor of a state is a model weight instead of optimizer state.

    >>> is_weight("0.weight"), is_weight("momentum:0.weight")
    (True, False)
    """
    # Only the part before the first dot can have a kind: names of a user's modules may contain colons.
    kind_and_unit, _, _ = name.partition(".")
    return ":" not in kind_and_unit


StateShapes = Mapping[str, tuple[tuple[int, ...], "torch.dtype"]]
"""Shape and type of each tensor of a weight's state, by the prefix of its kind, such as ``momentum:``."""


class Sgd:
    """Stochastic gradient descent with momentum and weight decay: updates named parameters in place."""

    def __init__(self, part: OptimizerPart) -> None:
        self._rate = part.rate
        self._momentum = part.momentum or 0.0
        self._decay = part.weight_decay or 0.0
        self.momentum: dict[str, torch.Tensor] = {}
        """The running sum of gradients, by the name of the parameter; empty before the first step."""

    def step(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any] = {},
    ) -> None:
        """Take one step against the gradients, in place; a parameter without a gradient is unchanged.

        ``settings`` are the values of ``lr`` and ``momentum`` in this step, if a schedule changes them. With weight w,
        gradient g, weight decay d, momentum m, running sum b and learning rate r: g += d w; b = m b + g (b = g at
        first); w -= r b. In asynchronous training w is the updated parameter, whatever version g was computed with.

        >>> weight = torch.tensor([1.0])
        >>> Sgd(OptimizerPart(learning_rate=0.5)).step({"w": weight}, {"w": torch.tensor([1.0])})
        >>> weight
        tensor([0.5000])
        """
        rate = settings.get("lr", self._rate)
        momentum = settings.get("momentum", self._momentum)
        # The order of operations is that of ``torch.optim.SGD``, for equal bits.
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameter = parameters[name]
                if self._decay:
                    gradient = gradient.add(parameter, alpha=self._decay)
                if momentum:
                    gradient = self._add_momentum(name, gradient, momentum)
                parameter.add_(gradient, alpha=-rate)

    def _add_momentum(
        self,
        name: str,
        gradient: torch.Tensor,
        momentum: float,
    ) -> torch.Tensor:
        """Update and return the running sum of a parameter's gradients."""
        running_sum = self.momentum.get(name)
        if running_sum is None:
            running_sum = gradient.clone()
        else:
            running_sum.mul_(momentum).add_(gradient)
        self.momentum[name] = running_sum
        return running_sum

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the momentum."""
        state = {}
        for name, running_sum in self.momentum.items():
            state[MOMENTUM + name] = running_sum.clone()
        return state

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the momentum in a state of a model; missing momentum starts from zero."""
        self.momentum = {}
        for name, tensor in state.items():
            if name.startswith(MOMENTUM):
                self.momentum[name.removeprefix(MOMENTUM)] = tensor.clone()


class TorchOptimizer:
    """A torch optimizer whose steps may update different parameter objects with the same names.

    Asynchronous training has new parameter objects in each version of the weights, while torch keeps the optimizer's
    state by object. Here the state belongs to the name of a parameter.
    """

    def __init__(
        self, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._make = make
        # The parameter has no use: torch's classes require at least one.
        self._optimizer = make([torch.nn.Parameter(torch.zeros(1, 1))])
        self._states: dict[str, dict[str, Any]] = {}
        """The state of each parameter by name, with a value for each kind."""

    def step(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        gradients: Mapping[str, torch.Tensor],
        settings: Mapping[str, Any] = {},
    ) -> None:
        """Take one step against the gradients, in place; a parameter without a gradient is unchanged."""
        (group,) = self._optimizer.param_groups
        group["params"] = [parameters[name] for name in gradients]
        group |= settings
        state_of_parameter: dict[torch.Tensor, Any] = {}
        for name in gradients:
            parameter = parameters[name]
            if name not in self._states:
                # Some optimizers of older torch create the state of a parameter in their constructor, others in the
                # first step.
                self._states[name] = self._make([parameter]).state[parameter]
            state_of_parameter[parameter] = self._states[name]
        # torch expects a mapping that returns an empty state for a new parameter.
        self._optimizer.state = defaultdict(dict, state_of_parameter)
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        self._optimizer.step()
        for name in gradients:
            parameters[name].grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state of each parameter; numbers become tensors without axes."""
        tensors: dict[str, torch.Tensor] = {}
        for name, values in self._states.items():
            for kind, value in values.items():
                # `load` recognises numbers by their 64 bits: torch's own counters are tensors of float32.
                if isinstance(value, float):
                    value = torch.tensor(value, dtype=torch.float64)
                elif isinstance(value, int):
                    value = torch.tensor(value, dtype=torch.int64)
                if isinstance(value, torch.Tensor):
                    tensors[f"{kind}:{name}"] = value.detach().clone()
        return tensors

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `state`."""
        self._states = {}
        number_types = (torch.int64, torch.float64)
        for key, tensor in state.items():
            # Averages belong to the shard that computes them.
            if is_weight(key) or key.startswith(AVERAGE):
                continue
            kind, name = key.split(":", 1)
            is_number = tensor.ndim == 0 and tensor.dtype in number_types
            value = tensor.item() if is_number else tensor.clone()
            self._states.setdefault(name, {})[kind] = value


Optimizer = Sgd | TorchOptimizer


class OptimizerMeasurement(NamedTuple):
    """Measured state and computation of an optimizer for one weight."""

    state_shapes: StateShapes
    values: float
    """Number of state values for each value of the weight."""
    flops: float
    """FLOPs of a step for each value of the weight: 2 for each operation whose result is as large as the weight."""


def measure_optimizer(
    optimizer: TorchOptimizer, shape: tuple[int, ...]
) -> OptimizerMeasurement:
    """Measure state and computation of a new optimizer in two steps on a weight of ``shape``."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Counts operations whose result has as many values as the weight."""

        count = 0

        def __torch_dispatch__(
            self,
            function: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == weight.numel():
                self.count += 1
            return result

    weight = torch.nn.Parameter(torch.zeros(shape))
    gradient = torch.ones(shape)
    # The first step also creates the state; the second step is like all later ones.
    optimizer.step({"0": weight}, {"0": gradient})
    with OperationCounter() as counter:  # type: ignore[no-untyped-call]
        optimizer.step({"0": weight}, {"0": gradient})
    state_shapes = {}
    values = 0
    for name, tensor in optimizer.state().items():
        kind, _, _ = name.partition(":")
        state_shapes[f"{kind}:"] = (tuple(tensor.shape), tensor.dtype)
        values += tensor.numel()
    # Rounding removes counters, which are a single value for the whole weight.
    per_value = round(values / weight.numel(), 2)
    return OptimizerMeasurement(state_shapes, per_value, flops=2.0 * counter.count)
