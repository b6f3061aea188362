"""Image classifiers as chains of units; a block with a shortcut is one unit, so cuts never fall within a block."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.common.part import ConfigModel
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.layers import (
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    Layer,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
)
from testbed.ml.models.shapes import Shape

MOST_LAYERS = 1000
"""Maximum layers of one list: planning more would take too long."""
Width = Annotated[int, Field(ge=1, le=100_000)]
Units = list[tuple[str, list[Layer]]]


def _conv_layers(
    channels: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    batch_norm: bool = True,
) -> list[Layer]:
    # A bias before the normalisation would be subtracted by it at once.
    convolution = Conv2d(
        channels, kernel, stride, kernel // 2, groups, bias=not batch_norm
    )
    return [convolution, BatchNorm2d()] if batch_norm else [convolution]


class MlpOptions(ConfigModel):
    """Options of the multilayer perceptron."""

    hidden: tuple[Width, ...] = Field(
        (128, 128, 128, 128),
        max_length=MOST_LAYERS,
        description="sizes of the hidden layers",
    )


def mlp(options: MlpOptions, shape: Shape, classes: int) -> Model:
    """Create a multilayer perceptron of fully connected layers with ReLU."""
    units: Units = [
        (f"hidden{index}", [Linear(size), ReLU()])
        for index, size in enumerate(options.hidden, 1)
    ]
    units.append(("output", [Linear(classes)]))
    units[0][1].insert(0, Flatten())
    return chain("mlp", shape, classes, units)


class CnnOptions(ConfigModel):
    """Options of the small convolutional network."""

    channels: tuple[Width, ...] = Field(
        (16, 32, 64),
        min_length=1,
        max_length=3,
        description="of the convolutions, one to three, the last two pooled",
    )
    hidden: tuple[Width, ...] = Field(
        (120, 84),
        max_length=MOST_LAYERS,
        description="sizes of the fully connected layers before the last",
    )


def cnn(options: CnnOptions, shape: Shape, classes: int) -> Model:
    """Create convolutions, the last two with pooling, and fully connected layers."""
    units: Units = [
        (f"conv{index}", [Conv2d(channels, padding=1), ReLU()])
        for index, channels in enumerate(options.channels, 1)
    ]
    for _, layers in units[-2:]:
        layers.append(MaxPool2d())
    units[-1][1].append(Flatten())
    units += [
        (f"hidden{index}", [Linear(size), ReLU()])
        for index, size in enumerate(options.hidden, 1)
    ]
    units.append(("output", [Linear(classes)]))
    return chain("cnn", shape, classes, units)


class BatchNormOptions(ConfigModel):
    """Options of VGG5 and ResNet18."""

    batch_norm: bool = Field(
        True, description="normalise after each convolution, as the paper does"
    )


def vgg5(options: BatchNormOptions, shape: Shape, classes: int) -> Model:
    """Create VGG5 as in PipeLearn's Table II."""
    units: Units = [
        (
            f"conv{index}",
            [*_conv_layers(channels, batch_norm=options.batch_norm), ReLU(), last],
        )
        for index, (channels, last) in enumerate(
            ((32, MaxPool2d()), (64, MaxPool2d()), (64, Flatten())), 1
        )
    ]
    units += [("fc1", [Linear(128), ReLU()]), ("fc2", [Linear(classes)])]
    return chain("vgg5", shape, classes, units)


RESNET_GROUPS = ((64, 1), (128, 2), (256, 2), (512, 2))
"""(channels, stride of the first block), two blocks each."""


def resnet18(options: BatchNormOptions, shape: Shape, classes: int) -> Model:
    """Create ResNet18 for small images, as in PipeLearn's Table II: 11.2 million parameters for 10 classes, 3 channels.

    Table II gives the stem as a 7x7 convolution to 64 channels and a max pooling, without strides. As in the original
    (He et al., arXiv:1512.03385) both have stride 2, which reduces 32x32 pixels to 8x8: the stem's output for 10,000
    samples is then 1.3 Gbit. At 16x16 pixels it would be 5.2 Gbit, which the 10 Mbit/s of 4G could not transmit in the
    203.6 s of the paper's Table IV.
    """
    norm = options.batch_norm
    units: Units = [
        ("stem", [*_conv_layers(64, 7, 2, batch_norm=norm), ReLU(), MaxPool2d(3, 2, 1)])
    ]
    entering = 64
    for group, (channels, first) in enumerate(RESNET_GROUPS, 1):
        for block, stride in ((1, first), (2, 1)):
            path = [*_conv_layers(channels, 3, stride, batch_norm=norm), ReLU()]
            path += _conv_layers(channels, batch_norm=norm)
            same = stride == 1 and entering == channels
            shortcut = (
                [] if same else _conv_layers(channels, 1, stride, batch_norm=norm)
            )
            units.append(
                (
                    f"block{group}-{block}",
                    [Residual(tuple(path), tuple(shortcut)), ReLU()],
                )
            )
            entering = channels
    units[-1][1].append(GlobalAveragePool2d())
    units.append(("output", [Linear(classes)]))
    return chain("resnet18", shape, classes, units)


IMAGENET_CLASSES = 1000
"""Number of classes for data without labels."""


class ImagenetOptions(ConfigModel):
    """Options of AlexNet and VGG-16."""

    hidden: tuple[Width, Width] = Field(
        (4096, 4096), description="sizes of the fully connected layers before the last"
    )


def alexnet(options: ImagenetOptions, shape: Shape, classes: int) -> Model:
    """Create AlexNet for one processor (Krizhevsky, arXiv:1404.5997), without groups; images of 224x224.

    Every convolution with its ReLU is a unit, as are every pooling and every fully connected layer. Dropout is omitted,
    because it acts in training only.
    """
    units: Units = [
        ("conv1", [Conv2d(64, 11, stride=4, padding=2), ReLU()]),
        ("pool1", [MaxPool2d(3, 2)]),
        ("conv2", [Conv2d(192, 5, padding=2), ReLU()]),
        ("pool2", [MaxPool2d(3, 2)]),
        ("conv3", [Conv2d(384, padding=1), ReLU()]),
        ("conv4", [Conv2d(256, padding=1), ReLU()]),
        ("conv5", [Conv2d(256, padding=1), ReLU()]),
        ("pool5", [MaxPool2d(3, 2)]),
        *_classifier_layers(options, classes, 6),
    ]
    return chain("alexnet", shape, classes, units)


def vgg16(options: ImagenetOptions, shape: Shape, classes: int) -> Model:
    """Create VGG-16 (Simonyan and Zisserman, configuration D), with units as in `alexnet`; images of 224x224."""
    units: Units = []
    for block, (channels, count) in enumerate(
        ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1
    ):
        units += [
            (f"conv{block}-{index}", [Conv2d(channels, padding=1), ReLU()])
            for index in range(1, count + 1)
        ]
        units.append((f"pool{block}", [MaxPool2d()]))
    return chain(
        "vgg16", shape, classes, units + _classifier_layers(options, classes, 14)
    )


def _classifier_layers(options: ImagenetOptions, classes: int, number: int) -> Units:
    first, second = options.hidden
    return [
        (f"fc{number}", [Flatten(), Linear(first), ReLU()]),
        (f"fc{number + 1}", [Linear(second), ReLU()]),
        (f"fc{number + 2}", [Linear(classes)]),
    ]


MOBILENET_GROUPS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""(expansion, channels, blocks, stride of the first block): the paper's t, c, n and s."""
SMALL = 64
"""Pixels along an axis; images of fewer meet the small stem."""


class MobileNetV2Options(ConfigModel):
    """Options of MobileNetV2."""

    width: float = Field(1.0, ge=0.1, le=4.0, description="multiplier of the channels")
    dropout: float = Field(
        0.2, ge=0.0, lt=1.0, description="before the classifier, in training"
    )
    stem: Literal["small", "imagenet"] | None = Field(
        None,
        description="small: strides of 1 at the beginning; default: small below 64 pixels",
    )


def mobilenetv2(options: MobileNetV2Options, shape: Shape, classes: int) -> Model:
    """Create MobileNetV2 (Sandler et al., arXiv:1801.04381, Table 2): a stem, 17 inverted residuals, a head.

    The model has 2.2 million parameters at width 1 for 10 classes. In the small stem, for images such as the 28 pixels
    of MNIST and the 32 of CIFAR-10, the strides of the first convolution and of the second group are 1, so the head
    receives 4x4 pixels instead of one. Raises ValueError for inputs other than images.
    """
    if len(shape) != 3:
        raise ValueError(f"MobileNetV2 needs (channels, height, width), not {shape}")
    small = options.stem == "small" if options.stem else min(shape[1:]) < SMALL
    entering = _scale_channels(32, options.width)
    units: Units = [
        ("stem", [*_conv_layers(entering, 3, 1 if small else 2), ReLU(6.0)])
    ]
    for group, (expansion, channels, blocks, stride) in enumerate(MOBILENET_GROUPS, 1):
        leaving = _scale_channels(channels, options.width)
        first = 1 if small and group == 2 else stride
        for block in range(blocks):
            bottleneck = _bottleneck_block(
                entering, leaving, first if block == 0 else 1, expansion
            )
            units.append((f"block{group}-{block + 1}", bottleneck))
            entering = leaving
    head = _conv_layers(_scale_channels(1280, max(1.0, options.width)), 1)
    units.append(("head", [*head, ReLU(6.0), GlobalAveragePool2d()]))
    dropped: list[Layer] = [Dropout(options.dropout)] if options.dropout else []
    units.append(("output", [*dropped, Linear(classes)]))
    return chain("mobilenetv2", shape, classes, units)


def _scale_channels(channels: int, width: float) -> int:
    """Return the product rounded to a multiple of 8, at least 8 and at least nine tenths of the product."""
    exact = channels * width
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _bottleneck_block(
    entering: int, leaving: int, stride: int, expansion: int
) -> list[Layer]:
    """Expand, filter each channel, project without activation; with a shortcut if the shape is unchanged."""
    hidden = entering * expansion
    layers: list[Layer] = [*_conv_layers(hidden, 1), ReLU(6.0)] if expansion > 1 else []
    layers += [
        *_conv_layers(hidden, 3, stride, groups=hidden),
        ReLU(6.0),
        *_conv_layers(leaving, 1),
    ]
    return [Residual(tuple(layers))] if stride == 1 and entering == leaving else layers
