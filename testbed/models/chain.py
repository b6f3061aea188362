"""A neural network as a chain of units: the grain at which models are cut.

Shapes, parameters and FLOPs are formulas over plain descriptions of layers, so planning never imports torch; only
``build`` does. All figures are per sample and float32 unless they say otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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

    def build(self, shape: Shape) -> nn.Module:
        """Make the torch module; its initial weights come from torch's global generator."""


@dataclass(frozen=True)
class Unit:
    """An indivisible run of layers with the shape that enters it."""

    name: str
    layers: tuple[Layer, ...]
    input: Shape

    def _shapes(self) -> list[Shape]:
        shapes = [self.input]
        for layer in self.layers:
            shapes.append(layer.output(shapes[-1]))
        return shapes

    @property
    def output(self) -> Shape:
        """Shape that leaves the unit."""
        return self._shapes()[-1]

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(layer.parameters(shape) for layer, shape in zip(self.layers, self._shapes(), strict=False))

    @property
    def forward_flops(self) -> float:
        """FLOPs of forward for one sample."""
        return sum(layer.flops(shape) for layer, shape in zip(self.layers, self._shapes(), strict=False))

    @property
    def backward_flops(self) -> float:
        """FLOPs of backward for one sample."""
        return BACKWARD_OVER_FORWARD * self.forward_flops

    @property
    def input_bytes(self) -> int:
        """Bytes of one sample entering the unit."""
        return BYTES_PER_VALUE * math.prod(self.input)

    @property
    def output_bytes(self) -> int:
        """Bytes of one sample leaving the unit."""
        return BYTES_PER_VALUE * math.prod(self.output)

    @property
    def activation_bytes(self) -> int:
        """Bytes of every layer's output for one sample: what backward needs kept."""
        return BYTES_PER_VALUE * sum(math.prod(shape) for shape in self._shapes()[1:])


@dataclass(frozen=True)
class Model:
    """A whole network: classification over the last unit's outputs."""

    name: str
    input: Shape
    classes: int
    units: tuple[Unit, ...]

    def build(self, first: int, last: int, seed: int) -> nn.Module:
        """Make units ``first`` up to but without ``last`` as one ``nn.Sequential`` of one ``nn.Sequential`` each.

        Child i of the result is unit ``first + i`` and is named by the unit's index in the whole model, so that
        state dictionaries of shards of one model can be merged. Each unit's weights depend on ``seed`` and its
        index only: shards of one seed equal the same units of the whole model. Leaves the global generator alone.
        """
        raise NotImplementedError
