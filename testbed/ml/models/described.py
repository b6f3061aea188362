"""Units of a traced network as layers of `testbed.ml.models.layers`, if they are a plain sequence of such layers.

Methods dividing layers can then divide them. Any other unit, such as a residual block or attention, is one layer
computed as a whole. This module imports torch at once.
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

Described = tuple[tuple[str, Layer], ...]
"""Layers, each with the path of its module in the network; "" for a function."""
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
"""Element-wise functions with their modules' default arguments."""
# torch has no public way to ask a module for its hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _describe_dropout(
    p: float = 0.5,
    training: object = True,
    inplace: bool = False,
) -> nn.Module:
    """Return the module of torch's function; raises TypeError for dropout active in evaluation too."""
    if training is False:
        return nn.Identity()
    # Traced networks get their mode from a node; any other value is a constant.
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
    "dropout": _describe_dropout,
}
"""Modules equivalent to torch functions, created from the functions' arguments."""


def describe_layers(
    root: nn.Module,
    nodes: Sequence[fx.Node],
    read: Sequence[fx.Node],
    shape: Callable[[fx.Node], Shape],
    weights: int,
) -> Described:
    """Return the layers of a unit; empty if the unit is more than a sequence of layers.

    Args:
        root: the network.
        nodes: nodes of the unit in order; the last one makes the unit's output.
        read: nodes of other units read by this unit.
        shape: output shape of a node for a sample, without the axis of the samples.
        weights: trained values of the unit, which the layers must have as well.
    """
    tensors = {*read, *nodes}
    row = list(nodes)
    before = read[0]
    if len(read) > 1:
        # Several inputs make a route, which joins them before the layers.
        if not _joins_channels(row[0]):
            return ()
        before = row.pop(0)
    input_shape = shape(before)
    named: list[tuple[str, Layer]] = []
    for node in row:
        layers = _describe_node(root, node, shape(node))
        inputs = [each for each in node.all_input_nodes if each in tensors]
        # In a sequence, each layer reads the layer before and nothing else.
        if layers is None or inputs != [before]:
            return ()
        path = str(node.target) if node.op == "call_module" else ""
        for layer in layers:
            named.append((path, layer))
        before = node
    layers_alone = [layer for _, layer in named]
    if not _agrees_with_torch(layers_alone, input_shape, shape(before), weights):
        return ()
    return tuple(named)


def _agrees_with_torch(
    layers: Sequence[Layer],
    input_shape: Shape,
    output_shape: Shape,
    weights: int,
) -> bool:
    """Return whether described layers have the output size and the number of trained values measured by torch.

    Otherwise the description is not trusted.
    """
    try:
        shapes = shapes_through(layers, input_shape)
    except ValueError:
        return False
    described_weights = 0
    for layer, shape in zip(layers, shapes, strict=False):
        described_weights += layer.parameters(shape)
    # By the number of values: a flattened map and the map are the same output.
    has_same_size = math.prod(shapes[-1]) == math.prod(output_shape)
    return has_same_size and described_weights == weights


def _joins_channels(node: fx.Node) -> bool:
    """Return whether a node concatenates a unit's inputs along the channels."""
    if node.target not in (torch.cat, torch.concat):
        return False
    # torch.cat(tensors, dim=0)
    along = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return along in (1,)


def _describe_node(
    root: nn.Module, node: fx.Node, made: Shape
) -> tuple[Layer, ...] | None:
    """Return the layers of a node, empty for an identity; None for an unknown operation.

    ``made`` is the shape of the node's output for one sample.
    """
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        # Hooks may change the module's values.
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return None
        return _describe_module(module)
    name = _operation_name(node)
    if name in ("flatten", "view", "reshape"):
        return (Flatten(),) if len(made) == 1 else None
    if name == "mean":
        return (GlobalAveragePool2d(),) if _is_over_pixels(node) else None
    if name not in _FUNCTIONS:
        return None
    try:
        module = _FUNCTIONS[name](*node.args[1:], **node.kwargs)
    except TypeError:
        # The function was called with an option that the module lacks.
        return None
    return _describe_module(module)


def _operation_name(node: fx.Node) -> str:
    """Return the name of a function or method, without the underscores of private functions of torch."""
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
    # By their texts, which hold the arguments: modules have no equality.
    if name in _ACTIVATIONS and repr(module) == repr(getattr(nn, name)()):
        return (Activation(name),)
    # By the exact type: a subclass may compute something else.
    return _KINDS[kind](module) if kind in _KINDS else None


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
    # `BatchNorm2d` of the layers has torch's defaults alone.
    has_defaults = (module.eps, module.momentum) == (1e-5, 0.1)
    has_values = module.affine and module.track_running_stats
    return (BatchNorm2d(),) if has_defaults and has_values else None


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
    is_whole = (module.start_dim, module.end_dim) == (1, -1)
    return (Flatten(),) if is_whole else None


def _describe_clamp(module: nn.Hardtanh) -> tuple[Layer, ...] | None:
    return (ReLU(float(module.max_val)),) if module.min_val == 0 else None


_KINDS: dict[type[nn.Module], Callable[[Any], tuple[Layer, ...] | None]] = {
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
