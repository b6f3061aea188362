"""The catalogue of models: those of the testbed with their options, and the names of those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.common import plugins, usercode
from testbed.common.errors import InputError, Key, nearest
from testbed.common.part import ConfigModel
from testbed.common.usercode import Code
from testbed.ml.models import classifiers, yolov2
from testbed.ml.models.chain import Model
from testbed.ml.models.shapes import Shape


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue."""

    name: str
    summary: str
    """One line for `testbed show models`."""
    Options: type[ConfigModel]
    """Class of the options in a scenario."""
    make: Callable[[Any, Shape, int], Model]
    """(options, shape of an image, classes) -> model; raises ValueError for an unsuitable shape."""
    classes: int = 0
    """Number of classes for data without labels; 0 for a model that needs data with labels."""


_ENTRIES = (
    Entry(
        "mlp",
        "multilayer perceptron; 784-128-128-128-128-10 on MNIST, as in EdgePipe",
        classifiers.MlpOptions,
        classifiers.mlp,
    ),
    Entry(
        "cnn",
        "three convolutions and three fully connected layers, about the size of LeNet",
        classifiers.CnnOptions,
        classifiers.cnn,
    ),
    Entry(
        "vgg5",
        "three convolutions and two fully connected layers, as in PipeLearn's Table II",
        classifiers.BatchNormOptions,
        classifiers.vgg5,
    ),
    Entry(
        "alexnet",
        "AlexNet for one processor, 61 million parameters at 224x224",
        classifiers.ImagenetOptions,
        classifiers.alexnet,
        classifiers.IMAGENET_CLASSES,
    ),
    Entry(
        "vgg16",
        "VGG-16, 138 million parameters at 224x224",
        classifiers.ImagenetOptions,
        classifiers.vgg16,
        classifiers.IMAGENET_CLASSES,
    ),
    Entry(
        "yolov2",
        "YOLOv2, detection, 51 million parameters; units are numbered as Darknet's layers",
        yolov2.Yolov2Options,
        yolov2.yolov2,
        yolov2.CLASSES,
    ),
    Entry(
        "mobilenetv2",
        "MobileNetV2, 2.2 million parameters for 10 classes; a unit for each block, a stem for small images",
        classifiers.MobileNetV2Options,
        classifiers.mobilenetv2,
    ),
    Entry(
        "resnet18",
        "ResNet18 for small images, 11 million parameters, as in PipeLearn's Table II; a unit for each block",
        classifiers.BatchNormOptions,
        classifiers.resnet18,
    ),
)
CATALOG = {entry.name: entry for entry in _ENTRIES}
GROUP = "testbed.models"
"""Group of entry points by which an installed package registers models: ``name = "module:function"``.

The function is one as in a Python file that a scenario names (`testbed.ml.models.own`)."""
_NAME_KEY: Key = ("model", "name")
"""Key in a scenario's workload to which errors about a name refer."""


def code_of(name: str) -> Code | None:
    """Return the source text of a package's model; None for a model of the catalogue or an unknown name.

    Raises `InputError` for a broken package.
    """
    # A package cannot replace a model of the catalogue.
    if name in CATALOG:
        return None
    function = plugins.find(GROUP, name, _NAME_KEY)
    if function is None:
        return None
    if not callable(function):
        raise InputError(
            f"the package's model '{name}' must be a function that returns a torch.nn.Module",
            _NAME_KEY,
        )
    point = plugins.installed(GROUP)[name]
    return usercode.code_of_package(point.attr, point.module, _NAME_KEY)


def list_names() -> list[str]:
    """Return the names of all models, with models of installed packages last.

    >>> "mlp" in list_names()
    True
    """
    return list({**CATALOG, **plugins.installed(GROUP)})


def summary_of(name: str) -> str:
    """Return one line about a model, or the error of a broken package.

    >>> summary_of("vgg5")
    "three convolutions and two fully connected layers, as in PipeLearn's Table II"
    """
    if name in CATALOG:
        return CATALOG[name].summary
    try:
        return plugins.summarize(plugins.find(GROUP, name, _NAME_KEY))
    except InputError as error:
        return error.text


def find(name: str) -> Entry:
    """Return a model of the catalogue; raises `InputError` for an unknown name."""
    if name not in CATALOG:
        raise InputError(
            f"unknown model '{name}': {nearest(name, list_names())}", _NAME_KEY
        )
    return CATALOG[name]


def create(
    name: str,
    options: Mapping[str, Any],
    input_shape: Shape,
    classes: int,
) -> Model:
    """Create a catalogue model for images of ``input_shape``.

    ``classes`` is the number of labels, 0 for data without labels. Raises `InputError` for an unknown name and for
    unsuitable data, and pydantic's error for unknown options; the options of a scenario have been checked before.

    >>> model = create("mlp", {"hidden": [32, 32]}, (1, 8, 8), 10)
    >>> [unit.name for unit in model.units]
    ['hidden1', 'hidden2', 'output']
    """
    entry = find(name)
    checked_options = entry.Options.model_validate(dict(options))
    if not classes and not entry.classes:
        without_labels = [each.name for each in CATALOG.values() if each.classes]
        raise InputError(
            f"{name} needs data with labels: use labelled data, or {', '.join(without_labels)}",
            ("model",),
        )
    class_count = classes or entry.classes
    try:
        return entry.make(checked_options, tuple(input_shape), class_count)
    except ValueError as error:
        size = "x".join(map(str, input_shape))
        raise InputError(
            f"{name} cannot take inputs of {size}: {error}", ("model",)
        ) from error


def describe(model: Model) -> dict[str, Any]:
    """Return a model's size and cost for one sample as plain values: totals, and a dictionary for each unit.

    ``parameters`` are all trained values, ``weights`` those without biases and normalisation. ``undivided`` are the
    reasons why units of a user's network cannot be divided further. ``reads`` are the indices of the units whose
    outputs a unit reads, with -1 for the model's input. ``output_bytes`` is the size of the unit's output,
    ``cut_bytes`` the size of all tensors that cross the cut after the unit, and ``activation_bytes`` the size of the
    values kept for the backward pass.

    >>> description = describe(create("mlp", {"hidden": [32]}, (1, 8, 8), 10))
    >>> description["parameters"], [unit["name"] for unit in description["units"]]
    (2410, ['hidden1', 'output'])
    """
    return {
        "name": model.name,
        "input": list(model.input),
        "classes": model.classes,
        "parameters": model.parameters,
        "weights": model.weights,
        "forward_flops": model.forward_flops,
        "undivided": list(model.undivided_reasons),
        "units": [_describe_unit(model, index) for index in range(len(model.units))],
    }


def _describe_unit(model: Model, index: int) -> dict[str, Any]:
    unit = model.units[index]
    return {
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
