"""AlexNet and VGG-16: convolutions, then three large fully connected layers that hold most of the weights.

Every convolution with its ReLU is a unit, and so is every pooling and every fully connected layer. Dropout, which acts
in training alone, is left out.
"""

from __future__ import annotations

from pydantic import Field

from testbed.models.chain import Model, chain
from testbed.models.layers import Conv2d, Flatten, Layer, Linear, MaxPool2d, ReLU
from testbed.models.options import ModelOptions, Width
from testbed.models.shapes import Shape

CLASSES = 1000
"""Of ImageNet: for data without labels."""

Units = list[tuple[str, list[Layer]]]


class ImagenetOptions(ModelOptions):
    """Options of AlexNet and VGG-16."""

    hidden: tuple[Width, Width] = Field((4096, 4096), description="sizes of the fully connected layers before the last")


def alexnet(options: ImagenetOptions, shape: Shape, classes: int) -> Model:
    """Make AlexNet in the form for one processor (Krizhevsky, arXiv:1404.5997), without groups; images of 224x224."""
    units: Units = [
        ("conv1", [Conv2d(64, 11, stride=4, padding=2), ReLU()]),
        ("pool1", [MaxPool2d(3, 2)]),
        ("conv2", [Conv2d(192, 5, padding=2), ReLU()]),
        ("pool2", [MaxPool2d(3, 2)]),
        ("conv3", [Conv2d(384, padding=1), ReLU()]),
        ("conv4", [Conv2d(256, padding=1), ReLU()]),
        ("conv5", [Conv2d(256, padding=1), ReLU()]),
        ("pool5", [MaxPool2d(3, 2)]),
        *_classifier(options, classes, 6),
    ]
    return chain("alexnet", shape, classes, units)


def vgg16(options: ImagenetOptions, shape: Shape, classes: int) -> Model:
    """Make VGG-16 (Simonyan and Zisserman, configuration D); images of 224x224."""
    units: Units = []
    for block, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        units += [(f"conv{block}-{index}", [Conv2d(channels, padding=1), ReLU()]) for index in range(1, count + 1)]
        units.append((f"pool{block}", [MaxPool2d()]))
    return chain("vgg16", shape, classes, units + _classifier(options, classes, 14))


def _classifier(options: ImagenetOptions, classes: int, number: int) -> Units:
    first, second = options.hidden
    return [
        (f"fc{number}", [Flatten(), Linear(first), ReLU()]),
        (f"fc{number + 1}", [Linear(second), ReLU()]),
        (f"fc{number + 2}", [Linear(classes)]),
    ]
