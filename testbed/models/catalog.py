"""The models a scenario can name, and their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from testbed.common.errors import InputError
from testbed.models import imagenet, mobilenet, resnet
from testbed.models import yolov2 as yolo
from testbed.models.chain import Model, chain
from testbed.models.layers import BatchNorm2d, Conv2d, Flatten, Layer, Linear, MaxPool2d, ReLU
from testbed.models.options import MOST_LAYERS, ModelOptions, Width
from testbed.models.shapes import Shape


class MlpOptions(ModelOptions):
    """Options of the multilayer perceptron."""

    hidden: tuple[Width, ...] = Field(
        (128, 128, 128, 128), max_length=MOST_LAYERS, description="sizes of the hidden layers"
    )


class CnnOptions(ModelOptions):
    """Options of the small convolutional network."""

    channels: tuple[Width, Width, Width] = Field((16, 32, 64), description="of the three convolutions")
    hidden: tuple[Width, ...] = Field(
        (120, 84), max_length=MOST_LAYERS, description="sizes of the fully connected layers before the last"
    )


class Vgg5Options(ModelOptions):
    """Options of VGG5."""

    batch_norm: bool = Field(True, description="normalise after each convolution, as the paper does")


def _mlp(options: MlpOptions, shape: Shape, classes: int) -> Model:
    units: list[tuple[str, list[Layer]]] = [
        (f"hidden{index}", [Linear(size), ReLU()]) for index, size in enumerate(options.hidden, 1)
    ]
    units.append(("output", [Linear(classes)]))
    units[0][1].insert(0, Flatten())
    return chain("mlp", shape, classes, units)


def _cnn(options: CnnOptions, shape: Shape, classes: int) -> Model:
    first, second, third = options.channels
    units: list[tuple[str, list[Layer]]] = [
        ("conv1", [Conv2d(first, padding=1), ReLU()]),
        ("conv2", [Conv2d(second, padding=1), ReLU(), MaxPool2d()]),
        ("conv3", [Conv2d(third, padding=1), ReLU(), MaxPool2d(), Flatten()]),
    ]
    units += [(f"hidden{index}", [Linear(size), ReLU()]) for index, size in enumerate(options.hidden, 1)]
    units.append(("output", [Linear(classes)]))
    return chain("cnn", shape, classes, units)


def _vgg5(options: Vgg5Options, shape: Shape, classes: int) -> Model:
    def convolution(channels: int, *rest: Layer) -> list[Layer]:
        # A bias before the normalisation would be subtracted by it at once.
        norm: list[Layer] = [BatchNorm2d()] if options.batch_norm else []
        return [Conv2d(channels, padding=1, bias=not options.batch_norm), *norm, ReLU(), *rest]

    return chain(
        "vgg5",
        shape,
        classes,
        [
            ("conv1", convolution(32, MaxPool2d())),
            ("conv2", convolution(64, MaxPool2d())),
            ("conv3", convolution(64, Flatten())),
            ("fc1", [Linear(128), ReLU()]),
            ("fc2", [Linear(classes)]),
        ],
    )


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue."""

    name: str
    summary: str
    Options: type[ModelOptions]
    make: Callable[[Any, Shape, int], Model]
    """(options, shape of an image, classes) -> model; raises ValueError where the shape does not fit."""
    classes: int = 0
    """For data without labels; 0: the model needs labelled data."""


CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("mlp", "multilayer perceptron; 784-128-128-128-128-10 on MNIST, as in EdgePipe", MlpOptions, _mlp),
        Entry("cnn", "three convolutions and three fully connected layers, about the size of LeNet", CnnOptions, _cnn),
        Entry(
            "vgg5", "three convolutions and two fully connected layers, as in PipeLearn's Table II", Vgg5Options, _vgg5
        ),
        Entry(
            "alexnet",
            "AlexNet for one processor, 61 million weights at 224x224",
            imagenet.ImagenetOptions,
            imagenet.alexnet,
            imagenet.CLASSES,
        ),
        Entry(
            "vgg16",
            "VGG-16, 138 million weights at 224x224",
            imagenet.ImagenetOptions,
            imagenet.vgg16,
            imagenet.CLASSES,
        ),
        Entry(
            "yolov2",
            "YOLOv2, detection, 51 million weights; a unit for each of Darknet's layers, with their numbers",
            yolo.Yolov2Options,
            yolo.yolov2,
            yolo.CLASSES,
        ),
        Entry(
            "mobilenetv2",
            "MobileNetV2, 2.2 million parameters for 10 classes; a unit for each block, a stem for small images",
            mobilenet.MobileNetV2Options,
            mobilenet.mobilenetv2,
        ),
        Entry(
            "resnet18",
            "ResNet18 for small images, 11 million parameters, as in PipeLearn's Table II; a unit for each block",
            resnet.Resnet18Options,
            resnet.resnet18,
        ),
    )
}


def create(name: str, options: Mapping[str, Any], input_shape: Shape, classes: int) -> Model:
    """Make a model of the catalogue for images of ``input_shape``; 0 ``classes`` are data without labels.

    Raises `InputError` for an unknown name and for data that do not fit, pydantic's error for options that it lacks:
    those of a scenario have been checked.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise InputError(f"there is no model '{name}'; choose one of {', '.join(CATALOG)}", ("model", "name"))
    chosen = entry.Options.model_validate(dict(options))
    if not classes and not entry.classes:
        can = ", ".join(each.name for each in CATALOG.values() if each.classes)
        raise InputError(
            f"{name} needs data with labels, whose classes it tells apart: use such data, or {can}", ("model",)
        )
    try:
        return entry.make(chosen, tuple(input_shape), classes or entry.classes)
    except ValueError as error:
        size = "x".join(map(str, input_shape))
        raise InputError(f"{name} cannot take inputs of {size}: {error}", ("model",)) from error


def describe(model: Model) -> dict[str, Any]:
    """Return a model's figures as plain values: totals, and one row for each unit; figures per sample.

    ``reads`` are the units whose outputs a unit reads, -1 the model's input; ``cut_bytes`` cross the cut behind it.
    """
    return {
        "name": model.name,
        "input": list(model.input),
        "classes": model.classes,
        "parameters": model.parameters,
        "weights": model.weights,
        "forward_flops": model.forward_flops,
        "units": [
            {
                "index": index,
                "name": unit.name,
                "output": list(unit.output),
                "reads": list(model.reads(index)),
                "parameters": unit.parameters,
                "weights": unit.weights,
                "forward_flops": unit.forward_flops,
                "multiplications": unit.multiplications,
                "output_bytes": unit.output_bytes,
                "cut_bytes": model.cut_bytes(index + 1),
                "activation_bytes": unit.activation_bytes,
            }
            for index, unit in enumerate(model.units)
        ],
    }
