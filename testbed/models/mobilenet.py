"""MobileNetV2 (Sandler et al., arXiv:1801.04381, Table 2) as a chain: a stem, 17 inverted residuals, a head.

Every inverted residual is a unit, so no cut falls between a block and its shortcut. Images of fewer than 64 pixels,
such as the 28 of MNIST and the 32 of CIFAR-10, meet the small stem: the strides of the first convolution and of the
second group are 1, so that 4x4 pixels reach the head and not one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.models.chain import Model, chain
from testbed.models.layers import BatchNorm2d, Conv2d, Dropout, GlobalAveragePool2d, Layer, Linear, ReLU, Residual
from testbed.models.options import ModelOptions
from testbed.models.shapes import Shape

GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""(expansion, channels, blocks, stride of the first block): the paper's t, c, n and s."""
SMALL = 64


class MobileNetV2Options(ModelOptions):
    """Options of MobileNetV2."""

    width: float = Field(1.0, ge=0.1, le=4.0, description="multiplier of the channels")
    dropout: float = Field(0.2, ge=0.0, lt=1.0, description="before the classifier, in training")
    stem: Literal["small", "imagenet"] | None = Field(
        None, description="small: strides of 1 at the beginning; default: small below 64 pixels"
    )


def mobilenetv2(options: MobileNetV2Options, shape: Shape, classes: int) -> Model:
    """Make MobileNetV2; 2.2 million parameters at width 1 for 10 classes."""
    if len(shape) != 3:
        raise ValueError(f"MobileNetV2 needs (channels, height, width), not {shape}")
    small = options.stem == "small" if options.stem else min(shape[1:]) < SMALL
    entering = _scaled(32, options.width)
    units: list[tuple[str, list[Layer]]] = [("stem", _convolution(entering, 3, 1 if small else 2))]
    for group, (expansion, channels, blocks, stride) in enumerate(GROUPS, 1):
        leaving = _scaled(channels, options.width)
        first = 1 if small and group == 2 else stride
        for block in range(blocks):
            bottleneck = _bottleneck(entering, leaving, first if block == 0 else 1, expansion)
            units.append((f"block{group}-{block + 1}", bottleneck))
            entering = leaving
    units.append(("head", [*_convolution(_scaled(1280, max(1.0, options.width)), 1, 1), GlobalAveragePool2d()]))
    dropped: list[Layer] = [Dropout(options.dropout)] if options.dropout else []
    units.append(("output", [*dropped, Linear(classes)]))
    return chain("mobilenetv2", shape, classes, units)


def _scaled(channels: int, width: float) -> int:
    """Return the multiple of 8 nearest to the product, at least 8 and never less than nine tenths of it."""
    exact = channels * width
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _convolution(channels: int, kernel: int, stride: int, groups: int = 1) -> list[Layer]:
    return [Conv2d(channels, kernel, stride, kernel // 2, groups, bias=False), BatchNorm2d(), ReLU(6.0)]


def _bottleneck(entering: int, leaving: int, stride: int, expansion: int) -> list[Layer]:
    """Expand, filter each channel, project without an activation; with a shortcut where the shape stays."""
    hidden = entering * expansion
    layers = _convolution(hidden, 1, 1) if expansion > 1 else []
    layers += [*_convolution(hidden, 3, stride, groups=hidden), Conv2d(leaving, 1, bias=False), BatchNorm2d()]
    return [Residual(tuple(layers))] if stride == 1 and entering == leaving else layers
