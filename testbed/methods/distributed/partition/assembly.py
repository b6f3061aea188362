"""From schemes and shares to a plan: who computes which channels of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from testbed.methods.distributed.partition.distributed_plan import DistributedPlan, LayerPlan, Tiling
from testbed.methods.distributed.partition.ranges import Range
from testbed.methods.distributed.partition.scheme_choice import Schemes
from testbed.methods.distributed.partition.shares import divide
from testbed.models.graph import Graph
from testbed.partition.cuts import Costs, best


def shared(
    name: str,
    graph: Graph,
    devices: Sequence[str],
    source: int,
    shares: Sequence[Fraction],
    schemes: Schemes,
    tiling: Tiling | None = None,
) -> DistributedPlan:
    """Return the plan in which each device has its share of every layer that is split."""
    layers: list[LayerPlan] = []
    for index, (layer, scheme) in enumerate(zip(graph.layers, schemes, strict=True)):
        if scheme in ("lop", "fuse1"):
            layers.append(LayerPlan(scheme=scheme, outputs=divide(layer.output_channels, shares)))
        elif scheme in ("lip", "fuse2"):
            layers.append(LayerPlan(scheme=scheme, inputs=_inputs(graph, index, shares)))
        else:
            layers.append(LayerPlan(scheme=scheme, owner=source if scheme == "whole" else None))
    return DistributedPlan(
        scheme=name,
        devices=tuple(devices),
        source=source,
        layers=tuple(layers),
        tiling=tiling,
        shares=tuple(map(float, shares)),
    )


def _inputs(graph: Graph, index: int, shares: Sequence[Fraction]) -> tuple[Range, ...]:
    """Divide a layer's input as the layer before it divides its output, if nothing comes in between."""
    layer = graph.layers[index]
    if not graph.follows(index) or not graph.layers[index - 1].splits:
        return divide(layer.input_channels, shares)
    channels = graph.layers[index - 1].output_channels
    # More than one where a fully connected layer takes a feature map, of which each device has whole channels.
    factor = layer.input_channels // channels
    return tuple(Range(first * factor, last * factor) for first, last in divide(channels, shares))


def alone(name: str, graph: Graph, devices: Sequence[str], source: int) -> DistributedPlan:
    """Return the plan in which the source computes everything: equation (6)."""
    return _owned(name, devices, source, [source] * len(graph.layers))


def in_a_row(
    name: str, graph: Graph, devices: Sequence[str], source: int, capacities: Sequence[float]
) -> DistributedPlan:
    """Return sequential layer mapping, DL: layers in a row over the devices, the source first.

    The cuts are those for which the weights on the fullest device are the least, in relation to its capacity.
    """
    order = [source, *(index for index in range(len(devices)) if index != source)][: len(graph.layers)]
    costs = Costs(
        lambda stage, first, last: sum(layer.weights for layer in graph.layers[first:last]) / capacities[order[stage]],
        lambda _stage, _cut: 0.0,
    )
    _, cuts = best(len(graph.layers), len(order), costs, max)
    owners = [owner for owner, (first, last) in zip(order, pairwise(cuts), strict=True) for _ in range(first, last)]
    return _owned(name, devices, source, owners)


def _owned(name: str, devices: Sequence[str], source: int, owners: Sequence[int]) -> DistributedPlan:
    layers = tuple(LayerPlan(scheme="whole", owner=owner) for owner in owners)
    return DistributedPlan(scheme=name, devices=tuple(devices), source=source, layers=layers)
