"""Some units of a model of which only time and traffic are of interest: shapes instead of numbers.

Tensors are torch's meta tensors, which have a shape and a type and nothing else. Making them by formula takes some
microseconds; running the modules on the meta device takes longer than computing (ResNet18, a mini-batch of 10: half a
second), for torch works out every shape in Python.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from functools import lru_cache

from testbed.ml.layers.shard import Adjust, Rows, Shard, State
from testbed.ml.layers.versions import Versions
from testbed.ml.lazy import torch
from testbed.ml.method import Problem
from testbed.ml.models.chain import Model, Tied
from testbed.ml.models.shapes import Shape
from testbed.ml.training.optimizers import is_weight
from testbed.ml.training.recipe import Recipe


def shard(problem: Problem, first: int, last: int, device: str) -> Shard | ShapeShard:
    """Return units ``first`` up to but without ``last`` on a device, with numbers or without as the workload says."""
    if problem.workload.numerics == "none":
        return ShapeShard(problem.model, first, last, problem.training)
    precision = problem.device(device).precision
    return Shard(problem.model, first, last, problem.seed, problem.training, precision)


@lru_cache(maxsize=1024)
def _described(model: Model, unit: int, fixed: bool) -> dict[str, tuple[Shape, torch.dtype, bool]]:
    """Return shape and type of every tensor of a unit, and whether it is trained; ``fixed``: of frozen ones as well."""
    from testbed.ml.models.modules import frozen_names

    module = model.build(unit, unit + 1, 0)
    frozen = frozen_names(module)
    trained = {name for name, _ in module.named_parameters()} - frozen
    found = ((name, tensor) for name, tensor in module.state_dict().items() if fixed or name not in frozen)
    return {name: (tuple(tensor.shape), tensor.dtype, name in trained) for name, tensor in found}


class ShapeShard:
    """What `Shard` does without computing: outputs have a shape, no values; versions have numbers, no weights.

    A loss is no number (nan).
    """

    def __init__(self, model: Model, first: int, last: int, training: Recipe) -> None:
        self.first = first
        self.last = last
        crossing = [shape for _, shape in model.crossing(last)]
        self._output: Shape = crossing[0] if len(crossing) == 1 else (sum(math.prod(shape) for shape in crossing),)
        self._model = model
        self._training = training
        self._updated = False
        self.versions = Versions(torch.nn.Module())
        self._kept: dict[Hashable, tuple[int, ...]] = {}

    def forward(
        self, key: Hashable, inputs: torch.Tensor, version: int | None = None, rows: Rows | None = None
    ) -> torch.Tensor:
        """Return outputs of the shape that `Shard.forward` gives."""
        self._kept[key] = tuple(inputs.shape)
        return self.infer(inputs)

    forward_lightly = forward

    def forward_loss(
        self,
        key: Hashable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        whole: float,
        version: int | None = None,
        rows: Rows | None = None,
    ) -> float:
        """Return no number, whatever the shapes of inputs and labels."""
        self._kept[key] = tuple(inputs.shape)
        return math.nan

    def backward(self, key: Hashable, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return a gradient of the inputs' shape, None at the model's begin."""
        shape = self._kept.pop(key)
        return torch.empty(shape, device="meta") if self.first > 0 else None

    def adjust(self, change: Adjust) -> None:
        """Do nothing: there are no gradients."""

    def norms(self, without: Collection[str] = ()) -> torch.Tensor:
        """Return norms of the shape that `Shard.norms` gives."""
        described = [self._described(unit) for unit in range(self.first, self.last)]
        trained = {name for unit in described for name, (_, _, is_trained) in unit.items() if is_trained}
        for tied in self._model.tied:
            trained.difference_update([name for name in tied.names if name in trained][1:])
        return torch.zeros(len(trained.difference(without)))

    def _described(self, unit: int) -> dict[str, tuple[Shape, torch.dtype, bool]]:
        return _described(self._model, unit, self._training.frozen_travels)

    def gradient(self, tied: Tied) -> torch.Tensor:
        """Return a gradient of the shape that `Shard.gradient` gives."""
        shape, dtype, _ = self._described(tied.units[0])[tied.names[0]]
        return torch.empty(shape, dtype=dtype, device="meta")

    def put_gradient(self, tied: Tied, gradient: torch.Tensor) -> None:
        """Do nothing: timing-only runs have no gradients of any shape."""

    def update(self, step: int, norms: torch.Tensor | None = None) -> None:
        """Take note that there is an optimizer's state from now on; ``norms`` are of any shape."""
        self._updated = True

    def advance(self, key: Hashable, version: int, oldest_needed: int, aggregate: int = 0) -> None:
        """Count a version more, and free those before ``oldest_needed``."""
        self._updated = True
        self.versions.begin_next(min(oldest_needed, self.versions.newest) if aggregate > 1 else oldest_needed)
        self.versions.forget(oldest_needed)

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs of the shape that `Shard.infer` gives."""
        return torch.empty((len(inputs), *self._output), device="meta")

    def state(self) -> dict[str, torch.Tensor]:
        """Return tensors of the names, shapes and types that `Shard.state` gives."""
        found: dict[str, torch.Tensor] = {}
        running: dict[str, torch.Tensor] = {}
        for unit in range(self.first, self.last):
            for name, (shape, dtype, trained) in self._described(unit).items():
                found[name] = torch.empty(shape, dtype=dtype, device="meta")
                kept = self._training.kept(shape) if trained and self._updated else {}
                for kind, (size, type_) in kept.items():
                    running[kind + name] = torch.empty(size, dtype=type_, device="meta")
        return found | running

    def load(self, state: State) -> None:
        """Forget what was under way; the optimizer has a state if it is there."""
        self._kept.clear()
        self._updated = not all(map(is_weight, state))
