"""A neural network as a chain of units: the grain at which models are cut.

Shapes, parameters and FLOPs are formulas over plain descriptions of layers, so planning never imports torch; only
``build`` does. All figures are per sample and float32 unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

Shape = tuple[int, ...]
"""Without the batch dimension: (channels, height, width) or (features,)."""

BYTES_PER_VALUE = 4
BACKWARD_OVER_FORWARD = 2.0
"""Backward computes the gradient of the input and of the weights: two products for each one of forward."""


class Layer(Protocol):
    """A plain, frozen description of one layer."""

    def output(self, shape: Shape) -> Shape:
        """Shape after the layer; raises ValueError when the input does not fit."""

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""

    def flops(self, shape: Shape) -> float:
        """Forward floating-point operations for one sample, multiply and add counted as two."""

    def activations(self, shape: Shape) -> int:
        """Values of all outputs made within the layer for one sample, its own output among them."""

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module, its initial weights drawn from ``generator`` and nothing else."""


def shapes(layers: Sequence[Layer], shape: Shape) -> list[Shape]:
    """Return the shape that enters the first layer, then the one that leaves each; raises ValueError as they do."""
    found = [shape]
    for layer in layers:
        found.append(layer.output(found[-1]))
    return found


@dataclass(frozen=True)
class Unit:
    """An indivisible run of layers with the shape that enters it."""

    name: str
    layers: tuple[Layer, ...]
    input: Shape

    @cached_property
    def _entering(self) -> list[tuple[Layer, Shape]]:
        """Every layer with the shape that enters it."""
        return list(zip(self.layers, shapes(self.layers, self.input)[:-1], strict=True))

    @cached_property
    def output(self) -> Shape:
        """Shape that leaves the unit."""
        return shapes(self.layers, self.input)[-1]

    @cached_property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(layer.parameters(shape) for layer, shape in self._entering)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        return float(sum(layer.flops(shape) for layer, shape in self._entering))

    @property
    def backward_flops(self) -> float:
        """FLOPs of backward for one sample."""
        return BACKWARD_OVER_FORWARD * self.forward_flops

    @property
    def weight_bytes(self) -> int:
        """Bytes of the trained values."""
        return BYTES_PER_VALUE * self.parameters

    @property
    def input_bytes(self) -> int:
        """Bytes of one sample entering the unit."""
        return BYTES_PER_VALUE * math.prod(self.input)

    @property
    def output_bytes(self) -> int:
        """Bytes of one sample leaving the unit."""
        return BYTES_PER_VALUE * math.prod(self.output)

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of every layer's output for one sample: what backward needs kept."""
        return BYTES_PER_VALUE * sum(layer.activations(shape) for layer, shape in self._entering)


@dataclass(frozen=True)
class Model:
    """A whole network: classification over the last unit's outputs."""

    name: str
    input: Shape
    classes: int
    units: tuple[Unit, ...]

    def __post_init__(self) -> None:
        shape = self.input
        for unit in self.units:
            if unit.input != shape:
                raise ValueError(f"unit '{unit.name}' takes {unit.input}, but {shape} arrives")
            shape = unit.output
        if shape != (self.classes,):
            raise ValueError(f"{self.name} ends with {shape}, not with one value for each of {self.classes} classes")

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(unit.parameters for unit in self.units)

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        return sum(unit.forward_flops for unit in self.units)

    def build(self, first: int, last: int, seed: int) -> nn.Sequential:
        """Make units ``first`` up to but without ``last`` as one ``nn.Sequential`` of one ``nn.Sequential`` each.

        Child i of the result is unit ``first + i`` and is named by the unit's index in the whole model, so that
        state dictionaries of shards of one model can be merged. Each unit's weights depend on ``seed`` and its
        index only: shards of one seed equal the same units of the whole model. No global state is touched, so
        devices that share a process may build at the same time.
        """
        from collections import OrderedDict

        import torch
        from torch import nn

        from testbed.models.modules import sequence
        from testbed.seeds import derive

        if not 0 <= first <= last <= len(self.units):
            raise ValueError(f"{self.name} has units 0 to {len(self.units)}, not {first} to {last}")
        built: OrderedDict[str, nn.Module] = OrderedDict()
        for index in range(first, last):
            generator = torch.Generator().manual_seed(derive(seed, "weights", index))
            unit = self.units[index]
            built[str(index)] = sequence(unit.layers, unit.input, generator)
        return nn.Sequential(built)


def chain(name: str, shape: Shape, classes: int, layers: Sequence[tuple[str, Sequence[Layer]]]) -> Model:
    """Make a model of named runs of layers, the shapes worked out from the one that enters the first."""
    units: list[Unit] = []
    for unit_name, run in layers:
        units.append(Unit(unit_name, tuple(run), shape))
        shape = units[-1].output
    return Model(name, units[0].input, classes, tuple(units))
