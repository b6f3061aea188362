"""Measurement of one node of a traced network: its result, its cost in FLOPs and bytes, and the samples it needs.

The tracers (`testbed.ml.models.fx_tracing` and `testbed.ml.models.export_tracing`) execute each node of a graph of
torch.fx for this purpose. Costs follow the conventions of `testbed.ml.models.layers`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from testbed.device import Cost, Kind
from testbed.ml.models.shapes import BYTES_PER_VALUE

_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
)
"""Operations of torch's library aten that compute matrix products and convolutions."""


@dataclass(frozen=True)
class Measure:
    """Measurements of one node for a batch."""

    value: Any
    """The result: a tensor, a number, or a group of these."""
    cost: Cost = field(default_factory=Cost)
    """Cost for the whole batch."""
    created_values: int = 0
    """Number of values in the float tensors created by the node, intermediate results included."""
    min_samples: int = 1
    """Minimum batch size in training."""

    @property
    def has_flops(self) -> bool:
        """Whether the node contains a matrix product or convolution: torch counts FLOPs of these only."""
        return self.cost.of().flops > 0


def measure_node(
    root: nn.Module,
    node: fx.Node,
    measures: Mapping[str, Measure],
    weights: Collection[int],
    device: str = "cpu",
) -> Measure:
    """Execute one node of a graph and return the measurements.

    Args:
        root: the network, whose modules and attributes the node names.
        node: the node; not a placeholder or output.
        measures: the measurements of all earlier nodes by node name, whose results the node reads.
        weights: the network's `storage_ids`.
        device: "cpu", or "meta" for tensors without values.
    """
    if node.op == "get_attr":
        attribute = operator.attrgetter(str(node.target))(root)
        if isinstance(attribute, torch.Tensor):
            # The user's constructor may have put a plain attribute on another device.
            attribute = attribute.to(device)
        return Measure(attribute)

    def result_of(source: fx.Node) -> Any:
        return measures[source.name].value

    args, kwargs = fx.map_arg((node.args, node.kwargs), result_of)
    counter = _CostCounter(weights)
    with torch.device(device), counter.flop_counter, counter:
        value = _execute_node(root, node, args, kwargs)
    return Measure(value, counter.cost, counter.created_values, counter.min_samples)


def _execute_node(root: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return module(*args, **kwargs)
    if node.op == "call_method":
        owner, *others = args
        method = getattr(owner, str(node.target))
        return method(*others, **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def storage_ids(root: nn.Module) -> frozenset[int]:
    """Return the memory identifiers of a network's weights and buffers.

    A view of a weight, such as its transpose, has the same identifier.
    """
    identifiers = set()
    for tensor in (*root.parameters(), *root.buffers()):
        # The address of torch's storage object. `data_ptr` would be 0 for all tensors without values.
        identifiers.add(tensor.untyped_storage()._cdata)
    return frozenset(identifiers)


class _CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager adding up the cost of all operations executed within.

    An operation costs its FLOPs, and the bytes of the tensors that it reads and creates. Views, such as a transpose,
    cost nothing.
    """

    def __init__(self, weights: Collection[int]) -> None:
        """``weights`` are the `storage_ids` of the network."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.created_values = 0
        self.min_samples = 1
        self.cost = Cost()
        self.flop_counter = FlopCounterMode(display=False)
        """Torch's counter of FLOPs, whose context must be entered before, so that operations called here reach it."""
        self._weights = weights

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        # Overloads of one operation differ behind the point, such as "aten::mm.out".
        if func.name().partition(".")[0] in _PRODUCTS:
            _check_types(args)
        flops_before = self.flop_counter.get_total_flops()
        result = func(*args, **(kwargs or {}))
        flops = self.flop_counter.get_total_flops() - flops_before
        # Of several results the first counts: a normalisation also returns statistics, for its backward.
        is_group = isinstance(result, tuple | list) and bool(result)
        main_result = result[0] if is_group else result
        if _is_float_tensor(main_result) and not func.is_view:
            self._add_cost(func, args, kwargs, main_result, flops)
        return result

    def _add_cost(
        self,
        operation: Any,
        args: Any,
        kwargs: Any,
        result: torch.Tensor,
        flops: float,
    ) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        inputs = [each for each in leaves if _is_float_tensor(each)]
        if "batch_norm" in operation.name() and _needs_two_samples(args, inputs[0]):
            self.min_samples = 2
        accessed_values = result.numel()
        weight_values = 0
        for tensor in inputs:
            if tensor.untyped_storage()._cdata not in self._weights:
                accessed_values += tensor.numel()
            elif tensor.ndim > 1:
                # Biases and normalisations are small; `Cost` counts kernels and matrices alone.
                weight_values += tensor.numel()
        self.created_values += result.numel()
        self.cost += Cost(
            flops=flops,
            accessed=BYTES_PER_VALUE * accessed_values,
            weights=BYTES_PER_VALUE * weight_values,
            kind=_work_kind(operation, args, flops),
        )


def _needs_two_samples(args: Sequence[Any], samples: torch.Tensor) -> bool:
    """Return whether a batch normalisation with the arguments ``args`` fails for a single sample.

    ``samples`` is the normalised tensor, (samples, channels, ...).
    """
    # Of the arguments of a normalisation, only the flag of training can be True.
    is_training = any(each is True for each in args)
    # In training, a channel with one value has no variance.
    return is_training and math.prod(samples.shape[2:]) == 1


def _is_float_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_types(args: Sequence[Any]) -> None:
    """Raise TypeError for a product of different types, such as float32 by float64.

    Torch raises this error too, but not for tensors without values.
    """
    types = set()
    for each in args:
        if _is_float_tensor(each):
            types.add(str(each.dtype).removeprefix("torch."))
    if len(types) > 1:
        factors = " by ".join(sorted(types))
        text = "samples are float32: convert them, or the network by .float()"
        raise TypeError(f"multiplies {factors}; {text}")


def _work_kind(operation: Any, args: Sequence[Any], flops: float) -> Kind:
    """Return the kind of layer of an aten operation; a device may have a speed for each kind."""
    name = operation.name()
    if name == "aten::convolution":
        # convolution(input, weight, ..., groups)
        weight = args[1]
        groups = args[-1]
        if groups > 1:
            return "depthwise"
        kernel_size = math.prod(weight.shape[2:])
        return "pointwise" if kernel_size == 1 else "convolution"
    if flops:
        return "linear"
    if "norm" in name:
        return "normalisation"
    # A mean over pixels is a pooling over the whole map.
    if "pool" in name or "mean" in name:
        return "pooling"
    return "activation"
