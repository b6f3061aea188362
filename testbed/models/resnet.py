"""ResNet18 for small images, as in PipeLearn's Table II: a stem, eight residual blocks, a classifier.

Each of the ten is a unit, so no cut falls between a block and its shortcut. Table II gives the stem as a 7x7
convolution to 64 channels and a max pooling, without strides. As in the original (He et al., arXiv:1512.03385) both
have stride 2, which makes 8x8 pixels of 32x32: what leaves the stem for 10,000 samples is then 1.3 Gbit. At 16x16
pixels it would be 5.2 Gbit, and the 10 Mbit/s of 4G could not carry that in the 203.6 s of the paper's Table IV.
"""

from __future__ import annotations

from pydantic import Field

from testbed.models.chain import Model, chain
from testbed.models.layers import BatchNorm2d, Conv2d, GlobalAveragePool2d, Layer, Linear, MaxPool2d, ReLU, Residual
from testbed.models.options import ModelOptions
from testbed.models.shapes import Shape

GROUPS = ((64, 1), (128, 2), (256, 2), (512, 2))
"""(channels, stride of the first block), two blocks each."""


class Resnet18Options(ModelOptions):
    """Options of ResNet18."""

    batch_norm: bool = Field(True, description="normalise after each convolution, as the paper does")


def resnet18(options: Resnet18Options, shape: Shape, classes: int) -> Model:
    """Make ResNet18; 11.2 million parameters for 10 classes and 3 channels."""
    stem = [*_convolution(64, 7, 2, options.batch_norm), ReLU(), MaxPool2d(3, 2, 1)]
    units: list[tuple[str, list[Layer]]] = [("stem", stem)]
    entering = 64
    for group, (channels, stride) in enumerate(GROUPS, 1):
        for block in (1, 2):
            step = stride if block == 1 else 1
            units.append((f"block{group}-{block}", _block(entering, channels, step, options.batch_norm)))
            entering = channels
    units[-1][1].append(GlobalAveragePool2d())
    units.append(("output", [Linear(classes)]))
    return chain("resnet18", shape, classes, units)


def _convolution(channels: int, kernel: int, stride: int, batch_norm: bool) -> list[Layer]:
    # A bias before the normalisation would be subtracted by it at once.
    norm: list[Layer] = [BatchNorm2d()] if batch_norm else []
    return [Conv2d(channels, kernel, stride, kernel // 2, bias=not batch_norm), *norm]


def _block(entering: int, leaving: int, stride: int, batch_norm: bool) -> list[Layer]:
    """Two convolutions and their input, by a 1x1 convolution where the shape changes."""
    path = [*_convolution(leaving, 3, stride, batch_norm), ReLU(), *_convolution(leaving, 3, 1, batch_norm)]
    same = stride == 1 and entering == leaving
    return [Residual(tuple(path), () if same else tuple(_convolution(leaving, 1, stride, batch_norm))), ReLU()]
