"""Recognition of the layers of `testbed.ml.models.layers` in the units of a user's network.

Methods that divide layers among devices can divide a unit that is a plain sequence of such layers. Any other unit, such
as a residual block or an attention, is one layer computed as a whole. This module imports torch at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from testbed.ml.models.layers import (
    Activation,
    BatchNorm2d,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAveragePool2d,
    Layer,
    LeakyReLU,
    Linear,
    MaxPool2d,
    ReLU,
    shapes_through,
)
from testbed.ml.models.shapes import Shape

KnownLayers = tuple[tuple[str, Layer], ...]
"""Layers in order, each with the path of its module in the network; "" for a function."""
_ACTIVATIONS = (
    "Sigmoid",
    "Tanh",
    "GELU",
    "SiLU",
    "ELU",
    "Hardswish",
    "Hardsigmoid",
    "Softplus",
    "Mish",
)
"""Modules of torch.nn that `Activation` can describe, if they have default arguments."""
_HOOK_ATTRIBUTES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Private attributes of a module: torch has no public way to ask for hooks."""


def _make_dropout(
    p: float = 0.5,
    training: object = True,
    inplace: bool = False,
) -> nn.Module:
    """Return the module equivalent to a call of `functional.dropout` with these arguments.

    Raises TypeError if the call is active in evaluation as well, since `nn.Dropout` is not.
    """
    if training is False:
        return nn.Identity()
    # A flag that depends on the mode of the unit is a node; any other value is the same in both modes.
    if not isinstance(training, fx.Node):
        raise TypeError
    return nn.Dropout(p, inplace)


_FUNCTIONS: dict[str, Callable[..., nn.Module]] = {
    **{name.lower(): getattr(nn, name) for name in _ACTIVATIONS},
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "max_pool2d": nn.MaxPool2d,
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
    "dropout": _make_dropout,
}
"""Name of a torch function -> equivalent module, created with the arguments of the call after the tensor."""


def describe_layers(
    root: nn.Module,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    shape: Callable[[fx.Node], Shape],
    trained_values: int,
) -> KnownLayers:
    """Return the layers of a unit; empty if the unit is not a sequence of known layers.

    Args:
        root: the network.
        nodes: operations of the unit in order; the last one has the unit's output.
        inputs: operations of other units whose tensors this unit reads, or the samples.
        shape: returns the output shape of a node for one sample.
        trained_values: number of trained values of the unit, which the layers must have as well.
    """
    tensors = {*inputs, *nodes}
    remaining_nodes = list(nodes)
    source = inputs[0]
    if len(inputs) > 1:
        # A sequence of layers has one input, so the first operation must join all inputs, as a route.
        if not _joins_channels(remaining_nodes[0]):
            return ()
        source = remaining_nodes.pop(0)
    input_shape = shape(source)
    layers: list[Layer] = []
    paths: list[str] = []
    for node in remaining_nodes:
        node_layers = _describe_node(root, node, shape(node))
        node_inputs = [each for each in node.all_input_nodes if each in tensors]
        # In a sequence, each layer reads the layer before and nothing else.
        if node_layers is None or node_inputs != [source]:
            return ()
        path = str(node.target) if node.op == "call_module" else ""
        for layer in node_layers:
            layers.append(layer)
            paths.append(path)
        source = node
    if not _agree_with_torch(layers, input_shape, shape(source), trained_values):
        return ()
    return tuple(zip(paths, layers, strict=True))


def _agree_with_torch(
    layers: Sequence[Layer],
    input_shape: Shape,
    output_shape: Shape,
    trained_values: int,
) -> bool:
    """Return whether layers have the output size and the number of trained values measured by torch.

    A safeguard: wrongly recognised layers are not used.
    """
    try:
        shapes = shapes_through(layers, input_shape)
    except ValueError:
        return False
    parameters = 0
    # Not strict: there is one shape more than there are layers, the output of the last layer.
    for layer, shape in zip(layers, shapes, strict=False):
        parameters += layer.parameters(shape)
    # By the number of values: a flattened map and the map are the same output.
    has_same_size = math.prod(shapes[-1]) == math.prod(output_shape)
    return has_same_size and parameters == trained_values


def _joins_channels(node: fx.Node) -> bool:
    """Return whether a node concatenates a unit's inputs along the channels."""
    if node.target not in (torch.cat, torch.concat):
        return False
    # torch.cat(tensors, dim=0)
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return isinstance(axis, int) and axis == 1


def _describe_node(
    root: nn.Module, node: fx.Node, output_shape: Shape
) -> tuple[Layer, ...] | None:
    """Return the layers of a node, empty for an identity; None for an unknown operation.

    ``output_shape`` is that of the node for one sample.
    """
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        # Hooks may change the module's values.
        if any(getattr(module, attribute) for attribute in _HOOK_ATTRIBUTES):
            return None
        return _describe_module(module)
    name = _operation_name(node)
    if name in ("flatten", "view", "reshape"):
        return (Flatten(),) if len(output_shape) == 1 else None
    if name == "mean":
        return (GlobalAveragePool2d(),) if _is_over_pixels(node) else None
    if name not in _FUNCTIONS:
        return None
    try:
        module = _FUNCTIONS[name](*node.args[1:], **node.kwargs)
    except TypeError:
        # The call has an option that the module lacks, or is no dropout of training alone.
        return None
    return _describe_module(module)


def _operation_name(node: fx.Node) -> str:
    """Return the name of a function or method, without the leading underscores of torch's private functions."""
    if node.op == "call_method":
        return str(node.target).lstrip("_")
    name: str = getattr(node.target, "__name__", "")
    return name.lstrip("_")


def _is_over_pixels(node: fx.Node) -> bool:
    """Return whether a mean is over height and width, and keeps neither as an axis."""
    arguments = [*node.args[1:], *node.kwargs.values()]
    if len(arguments) != 1 or not isinstance(arguments[0], tuple | list):
        # A mean over one axis, or one that keeps the axes.
        return False
    return list(arguments[0]) in ([2, 3], [-2, -1])


def _describe_module(module: Any) -> tuple[Layer, ...] | None:
    """Return the layers of a module, empty for an identity; None for an unknown module."""
    kind = type(module)
    name = kind.__name__
    # By their texts, which contain the arguments: modules have no equality.
    if name in _ACTIVATIONS and repr(module) == repr(getattr(nn, name)()):
        return (Activation(name),)
    # By the exact type: a subclass may compute something else.
    describe = _DESCRIBE_BY_TYPE.get(kind)
    return None if describe is None else describe(module)


def _describe_convolution(module: nn.Conv2d) -> tuple[Layer, ...] | None:
    kernel = _square_size(module.kernel_size)
    stride = _square_size(module.stride)
    padding = _square_size(module.padding)
    if kernel is None or stride is None or padding is None:
        return None
    if _square_size(module.dilation) != 1 or module.padding_mode != "zeros":
        return None
    has_bias = module.bias is not None
    return (
        Conv2d(module.out_channels, kernel, stride, padding, module.groups, has_bias),
    )


def _describe_linear(module: nn.Linear) -> tuple[Layer, ...]:
    return (Linear(module.out_features, module.bias is not None),)


def _describe_normalisation(module: nn.BatchNorm2d) -> tuple[Layer, ...] | None:
    # The layer `BatchNorm2d` has no options: these are torch's defaults.
    has_defaults = (module.eps, module.momentum) == (1e-5, 0.1)
    has_all_tensors = module.affine and module.track_running_stats
    return (BatchNorm2d(),) if has_defaults and has_all_tensors else None


def _describe_pool(module: nn.MaxPool2d) -> tuple[Layer, ...] | None:
    kernel = _square_size(module.kernel_size)
    stride = _square_size(module.stride)
    padding = _square_size(module.padding)
    if kernel is None or stride is None or padding is None:
        return None
    if module.dilation != 1 or module.ceil_mode or module.return_indices:
        return None
    return (MaxPool2d(kernel, stride, padding),)


def _describe_mean(module: nn.AdaptiveAvgPool2d) -> tuple[Layer, ...] | None:
    is_one_pixel = module.output_size in (1, (1, 1), [1, 1])
    return (GlobalAveragePool2d(),) if is_one_pixel else None


def _describe_flatten(module: nn.Flatten) -> tuple[Layer, ...] | None:
    keeps_samples_only = (module.start_dim, module.end_dim) == (1, -1)
    return (Flatten(),) if keeps_samples_only else None


def _describe_clamp(module: nn.Hardtanh) -> tuple[Layer, ...] | None:
    return (ReLU(float(module.max_val)),) if module.min_val == 0 else None


_DESCRIBE_BY_TYPE: dict[type[nn.Module], Callable[[Any], tuple[Layer, ...] | None]] = {
    nn.Identity: lambda module: (),
    nn.Conv2d: _describe_convolution,
    nn.Linear: _describe_linear,
    nn.BatchNorm2d: _describe_normalisation,
    nn.ReLU: lambda module: (ReLU(),),
    nn.ReLU6: _describe_clamp,
    nn.Hardtanh: _describe_clamp,
    nn.LeakyReLU: lambda module: (LeakyReLU(module.negative_slope),),
    nn.Dropout: lambda module: (Dropout(module.p),),
    nn.Flatten: _describe_flatten,
    nn.MaxPool2d: _describe_pool,
    nn.AdaptiveAvgPool2d: _describe_mean,
}


def _square_size(size: Any) -> int | None:
    """Return the size common to both axes; None if they differ, or for a word such as "same"."""
    sizes = set(size) if isinstance(size, tuple | list) else {size}
    common = sizes.pop()
    return common if not sizes and isinstance(common, int) else None
