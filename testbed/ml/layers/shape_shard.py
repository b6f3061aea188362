"""Units of a model in timing-only runs: tensors have shapes, and no values.

A timing-only run (``numerics: none``) computes neither outputs nor gradients. A `ShapeShard` takes the place of a
`Shard` and returns meta tensors of torch, which have a shape and a type only. Creating one from a known shape takes
microseconds. Running the modules on the meta device instead takes longer than computing with numbers (ResNet18, a
mini-batch of 10: half a second), because torch derives every shape in Python.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from functools import lru_cache

from testbed.ml.layers.shard import Adjust, Rows, Shard, State
from testbed.ml.layers.versions import Versions
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.models.chain import Model, TiedWeight
from testbed.ml.models.shapes import Shape
from testbed.ml.training.config import TrainingConfig
from testbed.ml.training.optimizers import is_weight

LARGE_UNIT = 10_000_000
"""Number of parameters above which a unit is built on the meta device, without memory for its weights (here 40 MB)."""

Description = tuple[Shape, "torch.dtype", bool]
"""Shape and type of a tensor, and whether it is a trained parameter."""


def make_shard(
    problem: PlanningProblem, start: int, stop: int, device: str
) -> Shard | ShapeShard:
    """Create units ``start`` to ``stop`` (exclusive) for a device: a `ShapeShard` in timing-only runs, else a `Shard`.

    ``device`` is the name of the device, whose precision the `Shard` computes with.
    """
    if problem.workload.numerics == "none":
        return ShapeShard(problem.model, start, stop, problem.training)
    return Shard(
        problem.model,
        start,
        stop,
        problem.seed,
        problem.training,
        problem.device(device).precision,
    )


# Devices of one process have the same units, and building one takes milliseconds.
@lru_cache(maxsize=1024)
def _describe_tensors(
    model: Model,
    unit: int,
    with_frozen: bool,
) -> dict[str, Description]:
    """Return the description of every tensor of a unit by name; ``with_frozen`` includes frozen parameters."""
    from testbed.ml.models.modules import frozen_names

    module = _build_unit(model, unit)
    frozen = frozen_names(module)
    trained = dict(module.named_parameters()).keys() - frozen
    described = {}
    for name, tensor in module.state_dict().items():
        if with_frozen or name not in frozen:
            shape = tuple(tensor.shape)
            is_trained = name in trained
            described[name] = (shape, tensor.dtype, is_trained)
    return described


def _build_unit(model: Model, unit: int) -> torch.nn.Module:
    # Only shapes are read from the unit, so its random weights do not matter.
    seed = 0
    is_large = model.units[unit].parameters > LARGE_UNIT
    # A large unit may take gigabytes, and seconds for the random numbers. The meta device takes some tenths of a second
    # at its first use, so a small unit is faster with numbers. A model with a builder calls the constructor of a user's
    # network, which may read values and therefore fail on the meta device.
    if is_large and model.builder is None:
        with torch.device("meta"):
            return model.build(unit, unit + 1, seed)
    return model.build(unit, unit + 1, seed)


class ShapeShard:
    """A counterpart of `Shard` without computation: outputs have a shape and no values.

    Every loss is NaN. Messages, whose sizes follow from shapes, take the same time as in a run with numbers.
    """

    def __init__(
        self, model: Model, start: int, stop: int, training: TrainingConfig
    ) -> None:
        self.start = start
        self.stop = stop
        self._output_shape = _sample_shape(model, stop)
        self._model = model
        self._training = training
        self._has_optimizer_state = False
        # Versions of an empty module have numbers, and no weights.
        self.versions = Versions(torch.nn.Module())
        self._input_shapes: dict[Hashable, tuple[int, ...]] = {}
        """Shapes of the inputs of forwards that wait for their backward, by key."""

    def forward(
        self,
        key: Hashable,
        inputs: torch.Tensor,
        version: int | None = None,
        rows: Rows | None = None,
    ) -> torch.Tensor:
        """Return outputs with the shape of `Shard.forward`."""
        self._input_shapes[key] = tuple(inputs.shape)
        return self.infer(inputs)

    forward_lightly = forward

    def forward_loss(
        self,
        key: Hashable,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        total_weight: float,
        version: int | None = None,
        rows: Rows | None = None,
    ) -> float:
        """Return NaN for inputs and labels of any shape."""
        self._input_shapes[key] = tuple(inputs.shape)
        return math.nan

    def backward(
        self, key: Hashable, gradient: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return a gradient with the shape of the inputs, None at the beginning of the model."""
        shape = self._input_shapes.pop(key)
        if self.start == 0:
            return None
        return torch.empty(shape, device="meta")

    def adjust(self, change: Adjust) -> None:
        """Do nothing, since timing-only runs have no gradients."""

    def norms(self, excluded: Collection[str] = ()) -> torch.Tensor:
        """Return zeros with the shape of `Shard.norms`."""
        trained = set()
        for unit in range(self.start, self.stop):
            for name, (_, _, is_trained) in self._describe_tensors(unit).items():
                if is_trained:
                    trained.add(name)
        for tied in self._model.tied_weights:
            # A weight that several of these units share has one gradient, which counts by the first name.
            own_names = [name for name in tied.names if name in trained]
            trained.difference_update(own_names[1:])
        counted = trained.difference(excluded)
        return torch.zeros(len(counted))

    def _describe_tensors(self, unit: int) -> dict[str, Description]:
        return _describe_tensors(self._model, unit, self._training.frozen_travels)

    def gradient(self, tied: TiedWeight) -> torch.Tensor:
        """Return a gradient with the shape of `Shard.gradient`."""
        # The weight has one shape in all units that share it, so a unit of another stage describes it as well.
        described = self._describe_tensors(tied.units[0])
        shape, dtype, _ = described[tied.names[0]]
        return torch.empty(shape, dtype=dtype, device="meta")

    def put_gradient(self, tied: TiedWeight, gradient: torch.Tensor) -> None:
        """Do nothing, since timing-only runs have no gradients."""

    def update(self, step: int, norms: torch.Tensor | None = None) -> None:
        """Include an optimizer state in `state` from now on; arguments are ignored."""
        self._has_optimizer_state = True

    def advance(
        self,
        key: Hashable,
        version: int,
        oldest_needed: int,
        aggregate: int = 0,
    ) -> None:
        """Increment the version, and free versions before ``oldest_needed``."""
        self._has_optimizer_state = True
        needed = oldest_needed
        if aggregate > 1:
            # `Shard.advance` keeps the newest version for the mean.
            needed = min(oldest_needed, self.versions.newest)
        self.versions.begin_next(needed)
        self.versions.forget(oldest_needed)

    def infer(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs with the shape of `Shard.infer`."""
        return torch.empty((len(inputs), *self._output_shape), device="meta")

    def state(self) -> dict[str, torch.Tensor]:
        """Return tensors with the names, shapes and types of `Shard.state`."""
        tensors: dict[str, torch.Tensor] = {}
        optimizer_state: dict[str, torch.Tensor] = {}
        for unit in range(self.start, self.stop):
            for name, description in self._describe_tensors(unit).items():
                shape, dtype, is_trained = description
                tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
                # An optimizer has no state before its first step, and none of frozen tensors.
                if is_trained and self._has_optimizer_state:
                    optimizer_state |= self._parameter_state(name, shape)
        return tensors | optimizer_state

    def _parameter_state(self, name: str, shape: Shape) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors for one parameter, such as its momentum."""
        state = {}
        described = self._training.state_shapes(shape)
        for prefix, (state_shape, dtype) in described.items():
            state[prefix + name] = torch.empty(state_shape, dtype=dtype, device="meta")
        return state

    def load(self, state: State) -> None:
        """Drop forwards waiting for their backward; note whether ``state`` has tensors of an optimizer."""
        self._input_shapes.clear()
        self._has_optimizer_state = not all(is_weight(name) for name in state)


def _sample_shape(model: Model, cut: int) -> Shape:
    """Return the shape of one sample's outputs at a cut."""
    crossing = [shape for _, shape in model.crossing_tensors(cut)]
    if len(crossing) == 1:
        return crossing[0]
    # Several tensors cross a cut flattened and joined.
    values = sum(math.prod(shape) for shape in crossing)
    return (values,)
