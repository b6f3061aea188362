"""Layers as frozen descriptions: shapes, parameters and FLOPs by formula, torch modules only when asked for.

FLOPs are those of convolutions and matrix products, a multiply and an add being two, biases left out: the convention
of torch's FLOP counter and of the papers. Activations, pooling and normalisation are charged nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from testbed.models.shapes import Shape

if TYPE_CHECKING:
    import torch
    from torch import nn


class Layer(Protocol):
    """A plain, frozen description of one layer."""

    def output(self, shape: Shape) -> Shape:
        """Shape after the layer; raises ValueError when the input does not fit."""

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""

    def weights(self, shape: Shape) -> int:
        """Elements of weight matrices and kernels: the parameters without biases and what normalisation learns."""

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


def sequence(layers: Sequence[Layer], shape: Shape, generator: torch.Generator) -> nn.Sequential:
    """Build layers one after the other, their weights drawn in that order."""
    from torch import nn

    entering = shapes(layers, shape)[:-1]
    return nn.Sequential(*(layer.build(size, generator) for layer, size in zip(layers, entering, strict=True)))


def _image(shape: Shape, layer: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"{layer} needs (channels, height, width), not {shape}")
    return shape


def _window(size: int, kernel: int, stride: int, padding: int, layer: str) -> int:
    """Positions of a window along one axis."""
    positions = (size + 2 * padding - kernel) // stride + 1
    if size + 2 * padding < kernel or positions < 1:
        raise ValueError(f"{layer} of kernel {kernel} does not fit into {size} pixels with padding {padding}")
    return positions


def bound(fan_in: int) -> float:
    """Return how far from zero first weights may be: LeCun's uniform initialisation.

    Torch's own default shrinks the signal by 2.4 with every layer, and a chain then needs epochs to begin to learn;
    He's wider one made some seeds of the small networks unstable at a learning rate of 0.05 with momentum 0.9.
    """
    return math.sqrt(3 / fan_in)


def _draw(module: nn.Module, fan_in: int, generator: torch.Generator) -> nn.Module:
    """Make a module of the meta device real: weights within `bound`, biases zero.

    On the meta device torch draws nothing, so its global generator is left alone. The module's own ``to_empty`` would
    import sympy on the way: a second and 48 MB on every device.
    """
    import torch

    limit = bound(fan_in)
    for name, parameter in list(module.named_parameters()):
        values = torch.zeros(parameter.shape)
        if name != "bias":
            values.uniform_(-limit, limit, generator=generator)
        setattr(module, name, torch.nn.Parameter(values))
    return module


@dataclass(frozen=True)
class Plain:
    """Base of layers without weights and without counted FLOPs that keep the shape."""

    def output(self, shape: Shape) -> Shape:
        """Shape after the layer."""
        return shape

    def parameters(self, shape: Shape) -> int:
        """Number of trained values."""
        return 0

    def weights(self, shape: Shape) -> int:
        """Elements of weight matrices and kernels."""
        return 0

    def flops(self, shape: Shape) -> float:
        """Forward FLOPs for one sample."""
        return 0.0

    def activations(self, shape: Shape) -> int:
        """Values of all outputs made within the layer for one sample."""
        return math.prod(self.output(shape))


@dataclass(frozen=True)
class ReLU(Plain):
    """max(0, x); with ``ceiling`` 6 the ReLU6 of MobileNet."""

    ceiling: float | None = None

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.ReLU() if self.ceiling is None else nn.Hardtanh(0.0, self.ceiling)


@dataclass(frozen=True)
class LeakyReLU(Plain):
    """x where it is positive, ``slope`` x elsewhere."""

    slope: float = 0.1

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.LeakyReLU(self.slope)


@dataclass(frozen=True)
class Reorganise(Plain):
    """Darknet's reorganisation layer: fewer pixels, more channels, in its own order of the values."""

    stride: int = 2

    def output(self, shape: Shape) -> Shape:
        """(channels stride^2, height / stride, width / stride)."""
        channels, height, width = _image(shape, "Reorganise")
        if channels % self.stride**2 or height % self.stride or width % self.stride:
            raise ValueError(
                f"Reorganise by {self.stride} needs channels that {self.stride**2} divides and pixels that "
                f"{self.stride} divides, not {shape}"
            )
        return (channels * self.stride**2, height // self.stride, width // self.stride)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from testbed.models.modules import DarknetReorganise

        return DarknetReorganise(self.stride)


@dataclass(frozen=True)
class Dropout(Plain):
    """Zeroes values at random in training.

    Draws from torch's global generator: what trains seeds that for each unit and batch (`testbed.methods.parts.shard`),
    so that the masks depend neither on where the model is cut nor on what else runs.
    """

    probability: float = 0.5

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.Dropout(self.probability)


@dataclass(frozen=True)
class Flatten(Plain):
    """(channels, height, width) to (features,)."""

    def output(self, shape: Shape) -> Shape:
        """One axis with all values."""
        return (math.prod(shape),)

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.Flatten()


@dataclass(frozen=True)
class _Pool(Plain):
    kernel: int = 2
    stride: int | None = None
    """None is the kernel's size."""
    padding: int = 0

    def output(self, shape: Shape) -> Shape:
        """Same channels, fewer pixels."""
        channels, *pixels = _image(shape, type(self).__name__)
        step = self.stride or self.kernel
        height, width = (_window(size, self.kernel, step, self.padding, type(self).__name__) for size in pixels)
        return (channels, height, width)


@dataclass(frozen=True)
class MaxPool2d(_Pool):
    """The largest value of each window."""

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.MaxPool2d(self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class AveragePool2d(_Pool):
    """The mean of each window."""

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.AvgPool2d(self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class GlobalAveragePool2d(Plain):
    """The mean of each channel: (channels, height, width) to (channels,)."""

    def output(self, shape: Shape) -> Shape:
        """One value for each channel."""
        return _image(shape, "GlobalAveragePool2d")[:1]

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from testbed.models.modules import ChannelMean

        return ChannelMean()


@dataclass(frozen=True)
class BatchNorm2d(Plain):
    """Normalisation by the statistics of the (micro-)batch in training, by running ones in evaluation.

    Micro-batches are normalised each by itself, so a split batch does not give the gradients of the whole one. The
    running statistics are the unit's state, with its weights: they travel and are replicated with them. They have no
    versions, since training never reads them; each forward adds to them, in the order of the batches.
    """

    def output(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return _image(shape, "BatchNorm2d")

    def parameters(self, shape: Shape) -> int:
        """Scale and shift of each channel; the running statistics are not trained."""
        return 2 * shape[0]

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        return nn.BatchNorm2d(shape[0])


@dataclass(frozen=True)
class Conv2d(Plain):
    """Square convolution; ``groups`` equal to the channels that enter is a depthwise one."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 0
    groups: int = 1
    bias: bool = True

    def output(self, shape: Shape) -> Shape:
        """(channels, height, width)."""
        entering, *pixels = _image(shape, "Conv2d")
        if entering % self.groups or self.channels % self.groups:
            raise ValueError(f"Conv2d from {entering} to {self.channels} channels cannot have {self.groups} groups")
        height, width = (_window(size, self.kernel, self.stride, self.padding, "Conv2d") for size in pixels)
        return (self.channels, height, width)

    def _fan_in(self, shape: Shape) -> int:
        return shape[0] // self.groups * self.kernel**2

    def parameters(self, shape: Shape) -> int:
        """Kernels and biases."""
        return self.weights(shape) + self.channels * self.bias

    def weights(self, shape: Shape) -> int:
        """Elements of the kernels."""
        return self.channels * self._fan_in(shape)

    def flops(self, shape: Shape) -> float:
        """2 x fan-in for each value that leaves."""
        return 2.0 * self._fan_in(shape) * math.prod(self.output(shape))

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        size = (shape[0], self.channels, self.kernel, self.stride, self.padding)
        module = nn.Conv2d(*size, groups=self.groups, bias=self.bias, device="meta")
        return _draw(module, self._fan_in(shape), generator)


@dataclass(frozen=True)
class Linear(Plain):
    """Fully connected."""

    features: int
    bias: bool = True

    def output(self, shape: Shape) -> Shape:
        """(features,)."""
        if len(shape) != 1:
            raise ValueError(f"Linear needs (features,), not {shape}: put a Flatten before it")
        return (self.features,)

    def parameters(self, shape: Shape) -> int:
        """Weights and biases."""
        return self.weights(shape) + self.features * self.bias

    def weights(self, shape: Shape) -> int:
        """Elements of the matrix."""
        return self.features * shape[0]

    def flops(self, shape: Shape) -> float:
        """2 x inputs x outputs."""
        return 2.0 * shape[0] * self.features

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module."""
        from torch import nn

        module = nn.Linear(shape[0], self.features, bias=self.bias, device="meta")
        return _draw(module, shape[0], generator)


@dataclass(frozen=True)
class Residual:
    """A block whose output is added to its input, brought to the same shape by ``shortcut`` where that differs."""

    block: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    def output(self, shape: Shape) -> Shape:
        """Shape of the sum."""
        ends = {shapes(self.block, shape)[-1], shapes(self.shortcut, shape)[-1]}
        if len(ends) != 1:
            raise ValueError(f"Residual adds {' and '.join(map(str, sorted(ends)))}: give it a shortcut that fits")
        return ends.pop()

    def _all(self, shape: Shape) -> list[tuple[Layer, Shape]]:
        """Every layer within, with the shape that enters it."""
        return [
            pair for path in (self.block, self.shortcut) for pair in zip(path, shapes(path, shape)[:-1], strict=True)
        ]

    def parameters(self, shape: Shape) -> int:
        """Trained values of block and shortcut."""
        return sum(layer.parameters(entering) for layer, entering in self._all(shape))

    def weights(self, shape: Shape) -> int:
        """Elements of the kernels of block and shortcut."""
        return sum(layer.weights(entering) for layer, entering in self._all(shape))

    def flops(self, shape: Shape) -> float:
        """FLOPs of block and shortcut."""
        return sum(layer.flops(entering) for layer, entering in self._all(shape))

    def activations(self, shape: Shape) -> int:
        """Outputs within block and shortcut, and the sum."""
        return sum(layer.activations(entering) for layer, entering in self._all(shape)) + math.prod(self.output(shape))

    def build(self, shape: Shape, generator: torch.Generator) -> nn.Module:
        """Make the torch module, with children ``block`` and ``shortcut``."""
        from testbed.models.modules import Sum

        self.output(shape)
        block, shortcut = (sequence(path, shape, generator) for path in (self.block, self.shortcut))
        return Sum(OrderedDict(block=block, shortcut=shortcut))
