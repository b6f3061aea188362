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
    shapes,
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
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def _describe_dropout(
    p: float = 0.5, training: object = True, inplace: bool = False
) -> nn.Module:
    """Return the dropout layer of a module, or None if inactive; raises TypeError for one active in evaluation too."""
    if training is False:
        return nn.Identity()
    if not isinstance(training, fx.Node):  # by which the network is told the mode
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


def described(
    root: nn.Module,
    nodes: Sequence[fx.Node],
    read: Sequence[fx.Node],
    shape: Callable[[fx.Node], Shape],
    weights: int,
) -> Described:
    """Return the layers of a unit; empty if the unit is more than a sequence of layers.

    Args:
        root: the network.
        nodes: nodes of the unit in order; the last one makes its output.
        read: nodes of other units read by this unit.
        shape: output shape of a node for a sample, without the axis of the samples.
        weights: trained values of the unit, which the layers must have as well.
    """
    tensors, before, row = {*read, *nodes}, read[0], list(nodes)
    entering = shape(before)
    if len(read) > 1:
        if not _joins_channels(row[0]):
            return ()
        before = row.pop(0)
        entering = shape(before)
    named: list[tuple[str, Layer]] = []
    for node in row:
        layers = _describe_node(root, node, shape(node))
        if layers is None or [
            each for each in node.all_input_nodes if each in tensors
        ] != [before]:
            return ()
        named += [
            (str(node.target) if node.op == "call_module" else "", each)
            for each in layers
        ]
        before = node
    try:
        passing = shapes([layer for _, layer in named], entering)
    except ValueError:
        return ()
    counted = sum(
        layer.parameters(size) for (_, layer), size in zip(named, passing, strict=False)
    )
    return (
        tuple(named)
        if counted == weights and math.prod(passing[-1]) == math.prod(shape(before))
        else ()
    )


def _joins_channels(node: fx.Node) -> bool:
    """Return whether a node concatenates a unit's inputs along the channels."""
    along = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return node.target in (torch.cat, torch.concat) and along in (1,)


def _describe_node(
    root: nn.Module, node: fx.Node, made: Shape
) -> tuple[Layer, ...] | None:
    """Return the layers of a node, empty for an identity; None for an unknown operation. ``made`` is its output."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return (
            None
            if any(getattr(module, hooks) for hooks in _HOOKS)
            else _of_module(module)
        )
    name = (
        node.target
        if node.op == "call_method"
        else getattr(node.target, "__name__", "")
    )
    name = str(name).lstrip("_")
    if name in ("flatten", "view", "reshape"):
        return (Flatten(),) if len(made) == 1 else None
    if name == "mean":
        along = (*node.args[1:], *node.kwargs.values())
        return (
            (GlobalAveragePool2d(),)
            if along in (((2, 3),), ([2, 3],), ([-2, -1],), ((-2, -1),))
            else None
        )
    if name not in _FUNCTIONS:
        return None
    try:
        return _of_module(_FUNCTIONS[name](*node.args[1:], **node.kwargs))
    except TypeError:  # it has options that the module lacks
        return None


def _of_module(module: Any) -> tuple[Layer, ...] | None:
    kind = type(module)
    if kind.__name__ in _ACTIVATIONS and repr(module) == repr(
        getattr(nn, kind.__name__)()
    ):
        return (Activation(kind.__name__),)
    return _KINDS[kind](module) if kind in _KINDS else None


def _describe_convolution(module: nn.Conv2d) -> tuple[Layer, ...] | None:
    of = (module.kernel_size, module.stride, module.padding, module.dilation)
    kernel, stride, padding, dilation = map(_square_size, of)
    if (
        kernel is None
        or stride is None
        or padding is None
        or dilation != 1
        or module.padding_mode != "zeros"
    ):
        return None
    return (
        Conv2d(
            module.out_channels,
            kernel,
            stride,
            padding,
            module.groups,
            module.bias is not None,
        ),
    )


def _describe_normalisation(module: nn.BatchNorm2d) -> tuple[Layer, ...] | None:
    usual = (
        (module.eps, module.momentum) == (1e-5, 0.1)
        and module.affine
        and module.track_running_stats
    )
    return (BatchNorm2d(),) if usual else None


def _describe_pool(module: nn.MaxPool2d) -> tuple[Layer, ...] | None:
    kernel, stride, padding = map(
        _square_size, (module.kernel_size, module.stride, module.padding)
    )
    if kernel is None or stride is None or padding is None or module.dilation != 1:
        return None
    return (
        None
        if module.ceil_mode or module.return_indices
        else (MaxPool2d(kernel, stride, padding),)
    )


def _describe_clamp(module: nn.Hardtanh) -> tuple[Layer, ...] | None:
    return (ReLU(float(module.max_val)),) if module.min_val == 0 else None


_KINDS: dict[type[nn.Module], Callable[[Any], tuple[Layer, ...] | None]] = {
    nn.Identity: lambda module: (),
    nn.Conv2d: _describe_convolution,
    nn.Linear: lambda module: (Linear(module.out_features, module.bias is not None),),
    nn.BatchNorm2d: _describe_normalisation,
    nn.ReLU: lambda module: (ReLU(),),
    nn.ReLU6: _describe_clamp,
    nn.Hardtanh: _describe_clamp,
    nn.LeakyReLU: lambda module: (LeakyReLU(module.negative_slope),),
    nn.Dropout: lambda module: (Dropout(module.p),),
    nn.Flatten: lambda module: (
        (Flatten(),) if (module.start_dim, module.end_dim) == (1, -1) else None
    ),
    nn.MaxPool2d: _describe_pool,
    nn.AdaptiveAvgPool2d: lambda module: (
        (GlobalAveragePool2d(),) if module.output_size in (1, (1, 1), [1, 1]) else None
    ),
}


def _square_size(size: Any) -> int | None:
    """Return the size common to both axes; None if they differ."""
    sizes = {*size} if isinstance(size, tuple | list) else {size}
    return (
        sizes.pop()
        if len(sizes) == 1 and all(isinstance(each, int) for each in sizes)
        else None
    )
