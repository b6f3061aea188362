"""Image classifiers of the catalogue, as chains of units.

Each network is a function of its options, of the shape of an image, (channels, height, width), and of the number of
classes. A block with a shortcut is one unit, so cuts never fall within a block.
"""

from __future__ import annotations

from collections.abc import Sequence
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

MAX_HIDDEN_LAYERS = 1000
"""Bound on the option ``hidden``: planning for more layers would take too long."""
Width = Annotated[int, Field(ge=1, le=100_000)]
"""Number of channels or features of one layer."""
Units = list[tuple[str, list[Layer]]]
"""Name and layers of each unit."""


def _conv_layers(
    channels: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    *,
    batch_norm: bool = True,
) -> list[Layer]:
    """Return a convolution with so much padding that only the stride changes the size of the image.

    With ``batch_norm`` a normalisation follows.
    """
    convolution = Conv2d(
        channels,
        kernel,
        stride,
        padding=kernel // 2,
        groups=groups,
        # The normalisation has a bias itself, and subtracts the mean, any bias included.
        bias=not batch_norm,
    )
    return [convolution, BatchNorm2d()] if batch_norm else [convolution]


def _hidden_units(sizes: Sequence[int]) -> Units:
    """Return fully connected layers with ReLU, a unit each."""
    units: Units = []
    for index, size in enumerate(sizes, 1):
        units.append((f"hidden{index}", [Linear(size), ReLU()]))
    return units


class MlpOptions(ConfigModel):
    """Options of the multilayer perceptron."""

    hidden: tuple[Width, ...] = Field(
        (128, 128, 128, 128),
        max_length=MAX_HIDDEN_LAYERS,
        description="sizes of the hidden layers",
    )


def mlp(options: MlpOptions, shape: Shape, classes: int) -> Model:
    """Create a multilayer perceptron of fully connected layers with ReLU.

    >>> mlp(MlpOptions(hidden=(128, 64)), (1, 28, 28), 10).parameters
    109386
    """
    units = _hidden_units(options.hidden)
    units.append(("output", [Linear(classes)]))
    # Without hidden layers, the first unit is the output.
    _, first_layers = units[0]
    first_layers.insert(0, Flatten())
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
        max_length=MAX_HIDDEN_LAYERS,
        description="sizes of the fully connected layers before the last",
    )


def cnn(options: CnnOptions, shape: Shape, classes: int) -> Model:
    """Create convolutions, the last two with pooling, and fully connected layers.

    >>> [unit.name for unit in cnn(CnnOptions(), (1, 28, 28), 10).units]
    ['conv1', 'conv2', 'conv3', 'hidden1', 'hidden2', 'output']
    """
    units: Units = []
    for index, channels in enumerate(options.channels, 1):
        layers: list[Layer] = [Conv2d(channels, padding=1), ReLU()]
        units.append((f"conv{index}", layers))
    for _, layers in units[-2:]:
        layers.append(MaxPool2d())
    _, last_layers = units[-1]
    # In the unit of the last convolution, so that all later units take features.
    last_layers.append(Flatten())
    units += _hidden_units(options.hidden)
    units.append(("output", [Linear(classes)]))
    return chain("cnn", shape, classes, units)


class BatchNormOptions(ConfigModel):
    """Options of VGG5 and ResNet18."""

    batch_norm: bool = Field(
        True, description="normalise after each convolution, as the paper does"
    )


def vgg5(options: BatchNormOptions, shape: Shape, classes: int) -> Model:
    """Create VGG5 as in PipeLearn's Table II.

    >>> [unit.name for unit in vgg5(BatchNormOptions(), (3, 32, 32), 10).units]
    ['conv1', 'conv2', 'conv3', 'fc1', 'fc2']
    """
    # Output channels of each convolution, and the last layer of its unit.
    convolutions: list[tuple[int, Layer]] = [
        (32, MaxPool2d()),
        (64, MaxPool2d()),
        (64, Flatten()),
    ]
    units: Units = []
    for index, (channels, last_layer) in enumerate(convolutions, 1):
        layers = _conv_layers(channels, batch_norm=options.batch_norm)
        units.append((f"conv{index}", [*layers, ReLU(), last_layer]))
    units.append(("fc1", [Linear(128), ReLU()]))
    units.append(("fc2", [Linear(classes)]))
    return chain("vgg5", shape, classes, units)


RESNET_GROUPS = ((64, 1), (128, 2), (256, 2), (512, 2))
"""(channels, stride of the first block) of each group of two blocks; the second block has stride 1."""


def resnet18(options: BatchNormOptions, shape: Shape, classes: int) -> Model:
    """Create ResNet18 for small images, as in PipeLearn's Table II: 11.2 million parameters for 10 classes, 3 channels.

    The layers before the first block are the stem. Table II gives the stem as a 7x7 convolution to 64 channels and a
    max pooling, without strides. Both have stride 2, as in the original network for images of 224x224 pixels (He et
    al., arXiv:1512.03385). Images of 32x32 pixels leave the stem with 8x8 pixels, and the last blocks with one.

    >>> resnet18(BatchNormOptions(), (3, 32, 32), 10).parameters
    11181642
    """
    batch_norm = options.batch_norm
    stem_channels = 64
    stem = _conv_layers(stem_channels, kernel=7, stride=2, batch_norm=batch_norm)
    stem += [ReLU(), MaxPool2d(kernel=3, stride=2, padding=1)]
    units: Units = [("stem", stem)]
    input_channels = stem_channels
    for group, (channels, first_stride) in enumerate(RESNET_GROUPS, 1):
        for block, stride in ((1, first_stride), (2, 1)):
            residual = _basic_block(
                input_channels, channels, stride, batch_norm=batch_norm
            )
            units.append((f"block{group}-{block}", [residual, ReLU()]))
            input_channels = channels
    _, last_layers = units[-1]
    last_layers.append(GlobalAveragePool2d())
    units.append(("output", [Linear(classes)]))
    return chain("resnet18", shape, classes, units)


def _basic_block(
    input_channels: int, channels: int, stride: int, *, batch_norm: bool
) -> Residual:
    """Return two convolutions with a shortcut."""
    block = _conv_layers(channels, stride=stride, batch_norm=batch_norm)
    block.append(ReLU())
    block += _conv_layers(channels, batch_norm=batch_norm)
    shortcut: list[Layer] = []
    if stride > 1 or input_channels != channels:
        # The block changes the shape, so its input cannot be added as it is.
        shortcut = _conv_layers(
            channels, kernel=1, stride=stride, batch_norm=batch_norm
        )
    return Residual(tuple(block), tuple(shortcut))


IMAGENET_CLASSES = 1000
"""Number of classes of AlexNet and VGG-16 for data without labels."""


class ImagenetOptions(ConfigModel):
    """Options of AlexNet and VGG-16."""

    hidden: tuple[Width, Width] = Field(
        (4096, 4096), description="sizes of the fully connected layers before the last"
    )


VGG16_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""(channels, convolutions) of each block, which ends with a pooling."""


def alexnet(options: ImagenetOptions, shape: Shape, classes: int) -> Model:
    """Create AlexNet for one processor (Krizhevsky, arXiv:1404.5997), without groups; images of 224x224.

    Every convolution with its ReLU is a unit, as are every pooling and every fully connected layer. Dropout is omitted,
    because it acts in training only.

    >>> alexnet(ImagenetOptions(), (3, 224, 224), 1000).parameters
    61100840
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
        *_classifier_units(options, classes, first_number=6),
    ]
    return chain("alexnet", shape, classes, units)


def vgg16(options: ImagenetOptions, shape: Shape, classes: int) -> Model:
    """Create VGG-16 (Simonyan and Zisserman, configuration D), with units as in `alexnet`; images of 224x224.

    >>> vgg16(ImagenetOptions(), (3, 224, 224), 1000).parameters
    138357544
    """
    units: Units = []
    for block, (channels, count) in enumerate(VGG16_BLOCKS, 1):
        for index in range(1, count + 1):
            layers: list[Layer] = [Conv2d(channels, padding=1), ReLU()]
            units.append((f"conv{block}-{index}", layers))
        units.append((f"pool{block}", [MaxPool2d()]))
    units += _classifier_units(options, classes, first_number=14)
    return chain("vgg16", shape, classes, units)


def _classifier_units(
    options: ImagenetOptions, classes: int, first_number: int
) -> Units:
    """Return the three fully connected layers at the end, named by their numbers among the layers with weights."""
    first_features, second_features = options.hidden
    return [
        (f"fc{first_number}", [Flatten(), Linear(first_features), ReLU()]),
        (f"fc{first_number + 1}", [Linear(second_features), ReLU()]),
        (f"fc{first_number + 2}", [Linear(classes)]),
    ]


MOBILENET_GROUPS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""(expansion, output channels, blocks, stride of the first block) of each group: the paper's t, c, n and s."""
MIN_IMAGENET_SIDE = 64
"""Height and width in pixels below which MobileNetV2 has the small stem by default."""


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

    >>> mobilenetv2(MobileNetV2Options(), (3, 224, 224), 1000).parameters
    3504872
    """
    if len(shape) != 3:
        raise ValueError(f"MobileNetV2 needs (channels, height, width), not {shape}")
    has_small_stem = min(shape[1:]) < MIN_IMAGENET_SIDE
    if options.stem is not None:
        has_small_stem = options.stem == "small"
    input_channels = _scale_channels(32, options.width)
    stem = _conv_layers(input_channels, stride=1 if has_small_stem else 2)
    units: Units = [("stem", [*stem, ReLU(6.0)])]
    for group, (expansion, channels, blocks, first_stride) in enumerate(
        MOBILENET_GROUPS, 1
    ):
        output_channels = _scale_channels(channels, options.width)
        for block in range(1, blocks + 1):
            stride = first_stride if block == 1 else 1
            if has_small_stem and group == 2:
                stride = 1
            layers = _bottleneck_block(
                input_channels, output_channels, stride, expansion
            )
            units.append((f"block{group}-{block}", layers))
            input_channels = output_channels
    # Narrow models keep the width of the head, as in the paper.
    head_channels = _scale_channels(1280, max(1.0, options.width))
    head = _conv_layers(head_channels, kernel=1)
    units.append(("head", [*head, ReLU(6.0), GlobalAveragePool2d()]))
    output: list[Layer] = [Linear(classes)]
    if options.dropout:
        output.insert(0, Dropout(options.dropout))
    units.append(("output", output))
    return chain("mobilenetv2", shape, classes, units)


def _scale_channels(channels: int, width: float) -> int:
    """Return ``channels`` times ``width``, rounded to a multiple of 8, as in the authors' own code.

    The result is at least 8, and at least nine tenths of the product.
    """
    product = channels * width
    # Half of 8 is added, so that the integer division rounds to the nearest multiple.
    rounded = max(8, int(product + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * product else rounded


def _bottleneck_block(
    input_channels: int,
    output_channels: int,
    stride: int,
    expansion: int,
) -> list[Layer]:
    """Return an inverted residual: expand the channels, filter each, and project without an activation.

    There is a shortcut if input and output have one shape.
    """
    hidden_channels = input_channels * expansion
    layers: list[Layer] = []
    if expansion > 1:
        layers += _conv_layers(hidden_channels, kernel=1)
        layers.append(ReLU(6.0))
    layers += _conv_layers(hidden_channels, stride=stride, groups=hidden_channels)
    layers.append(ReLU(6.0))
    layers += _conv_layers(output_channels, kernel=1)
    has_shortcut = stride == 1 and input_channels == output_channels
    return [Residual(tuple(layers))] if has_shortcut else layers
