"""Plans of each scheme, with shares proportional to speed and bounded by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Self

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.models.graph import Graph
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.ml.partition.cuts import Costs, best_cuts
from testbed_stahl.dataflow import Dataflow, make_dataflow
from testbed_stahl.demands import count_divisible_weights, memory_needs
from testbed_stahl.options import PlanSettings, SchemeName
from testbed_stahl.plan import (
    DistributedPlan,
    LayerPlan,
    Range,
    Tiling,
    divide,
    proportional_shares,
    scaled,
)
from testbed_stahl.schemes import (
    Schemes,
    WorkerTotals,
    fused_schemes,
    least_communication,
    uniform_schemes,
)
from testbed_stahl.tiles import (
    best_tiling,
    check_tileable,
    feature_dominated_layers,
    make_tiling,
)


def divided_plan(
    name: str,
    graph: Graph,
    devices: Sequence[str],
    source: int,
    shares: Sequence[Fraction],
    schemes: Schemes,
    tiling: Tiling | None = None,
) -> DistributedPlan:
    """Return the plan in which each device has a share of every divided layer."""
    layers: list[LayerPlan] = []
    pairs = zip(graph.layers, schemes, strict=True)
    for index, (layer, scheme) in enumerate(pairs):
        if scheme in ("lop", "fuse1"):
            outputs = divide(layer.output_channels, shares)
            layers.append(LayerPlan(scheme=scheme, outputs=outputs))
        elif scheme in ("lip", "fuse2"):
            inputs = _split_input(graph, index, shares)
            layers.append(LayerPlan(scheme=scheme, inputs=inputs))
        else:
            owner = source if scheme == "whole" else None
            layers.append(LayerPlan(scheme=scheme, owner=owner))
    return DistributedPlan(
        scheme=name,
        devices=tuple(devices),
        source=source,
        layers=tuple(layers),
        tiling=tiling,
        shares=tuple(map(float, shares)),
    )


def _split_input(
    graph: Graph, index: int, shares: Sequence[Fraction]
) -> tuple[Range, ...]:
    """Return each device's input channels of a layer, where possible the channels computed by the device itself."""
    layer = graph.layers[index]
    if not graph.follows(index):
        return divide(layer.input_channels, shares)
    previous = graph.layers[index - 1]
    if not previous.splits:
        return divide(layer.input_channels, shares)
    # Rounded like the outputs of the previous layer, so that a fused pair needs no exchange in between (Section 4.2).
    channels = previous.output_channels
    # A fully connected layer has an input channel for each pixel of a feature map; a device has whole maps.
    factor = layer.input_channels // channels
    parts = divide(channels, shares)
    return tuple(scaled(part, factor) for part in parts)


def single_plan(
    name: str, graph: Graph, devices: Sequence[str], source: int
) -> DistributedPlan:
    """Build the plan in which the source computes everything: equation (6).

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> [layer.owner for layer in single_plan("single", graph, ["a", "b"], source=1).layers]
    [1, 1, 1, 1]
    """
    owners = [source] * len(graph.layers)
    return _owned_layers(name, devices, source, owners)


def sequential_plan(
    name: str,
    graph: Graph,
    devices: Sequence[str],
    source: int,
    capacities: Sequence[float],
) -> DistributedPlan:
    """Build a plan of sequential layer mapping (DL): contiguous layers over the devices, the source first.

    The cuts minimize the largest ratio of weights to ``capacities``, the memory of each device.

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> plan = sequential_plan("sequential", graph, ["a", "b"], 0, [1.0, 1.0])
    >>> [layer.owner for layer in plan.layers]
    [0, 0, 1, 1]
    """
    others = [index for index in range(len(devices)) if index != source]
    # Each device has at least one layer, so not more devices than layers take part.
    order = [source, *others][: len(graph.layers)]

    def fill_ratio(stage: int, first: int, last: int) -> float:
        weights = sum(layer.weights for layer in graph.layers[first:last])
        return weights / capacities[order[stage]]

    # Only memory decides: the paper uses this mapping to reduce F (Section 3.3), so a cut costs nothing.
    costs = Costs(fill_ratio, lambda _stage, _cut: 0.0)
    _, cuts = best_cuts(len(graph.layers), len(order), costs, max)
    owners: list[int] = []
    for owner, (first, last) in zip(order, pairwise(cuts), strict=True):
        owners += [owner] * (last - first)
    return _owned_layers(name, devices, source, owners)


def _owned_layers(
    name: str, devices: Sequence[str], source: int, owners: Sequence[int]
) -> DistributedPlan:
    layers = tuple(LayerPlan(scheme="whole", owner=owner) for owner in owners)
    return DistributedPlan(
        scheme=name, devices=tuple(devices), source=source, layers=layers
    )


MOST_TILES = 144
"""Maximum number of tiles in a finer grid, which is tried if a coarser grid does not fit into memory."""
_STEPS = 1000
"""Shares bounded by memory are rounded down to thousandths of their value."""


@dataclass(frozen=True)
class Candidate:
    """A plan with the memory demand of each device, which may exceed the memory of some devices."""

    flow: Dataflow
    needs: tuple[float, ...]
    """Required bytes of each device, in the order of the plan."""

    @classmethod
    def of(cls, flow: Dataflow) -> Self:
        """Compute the memory demand of a plan."""
        return cls(flow, memory_needs(flow))

    def excess(self, devices: Sequence[DeviceSpec]) -> dict[int, float]:
        """Return the missing bytes by device."""
        missing = {}
        pairs = zip(self.needs, devices, strict=True)
        for index, (need, device) in enumerate(pairs):
            if need > device.memory:
                missing[index] = need - device.memory
        return missing

    def fullest(self, devices: Sequence[DeviceSpec]) -> int:
        """Return the device with the highest ratio of demand to memory."""

        def fill_ratio(index: int) -> float:
            return self.needs[index] / devices[index].memory

        return max(range(len(devices)), key=fill_ratio)

    def shortfall(self, devices: Sequence[DeviceSpec]) -> float:
        """Return the bytes missing on the fullest device; 0 if every device fits."""
        excess = self.excess(devices)
        return excess.get(self.fullest(devices), 0.0)


def best_candidate(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> Candidate:
    """Return a plan that fits; if none does, the plan with the smallest shortfall of memory.

    Raises `InputError` for options that no plan can satisfy.
    """
    names = [device.name for device in devices]
    scheme = settings.options.scheme
    if scheme == "single":
        plan = single_plan(scheme, graph, names, settings.source)
        return Candidate.of(make_dataflow(graph, plan, settings))
    if scheme == "sequential":
        capacities = [device.memory for device in devices]
        plan = sequential_plan(scheme, graph, names, settings.source, capacities)
        return Candidate.of(make_dataflow(graph, plan, settings))
    tiled = settings.options.tiled_layers
    if tiled is None:
        tiled = feature_dominated_layers(graph)
    check_tileable(graph, tiled)
    candidates: list[Candidate] = []
    for tiling in _candidate_tilings(graph, devices, settings, tiled):
        bounded = _bound_by_memory(graph, devices, settings, tiled, tiling)
        if not bounded.excess(devices):
            return bounded
        candidates.append(bounded)
    return min(candidates, key=lambda option: option.shortfall(devices))


def _bound_by_memory(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    tiled: int,
    tiling: Tiling | None,
) -> Candidate:
    """Shrink the shares of devices without enough memory while other devices can take over."""
    names = [device.name for device in devices]
    caps: dict[int, Fraction] = {}
    while True:
        shares = _divide_shares(devices, settings, caps)
        schemes = _candidate_schemes(graph, shares, tiled, settings)
        plan = divided_plan(
            settings.options.scheme,
            graph,
            names,
            settings.source,
            shares,
            schemes,
            tiling,
        )
        bounded = Candidate.of(make_dataflow(graph, plan, settings))
        excess = bounded.excess(devices)
        if not excess:
            return bounded
        # A device that exceeds its memory without any share cannot be relieved.
        if any(shares[index] == 0 for index in excess):
            return bounded
        for index, missing in excess.items():
            divisible = BYTES_PER_VALUE * count_divisible_weights(bounded.flow, index)
            remaining = max(0.0, 1 - missing / divisible) if divisible else 0.0
            # Thousandths keep shares ratios of small numbers, which `paper_communication` recovers from floats.
            rounded = Fraction(int(remaining * _STEPS), _STEPS)
            caps[index] = shares[index] * rounded
        # No device is left that could take over a share.
        if len(caps) == len(devices):
            return bounded


def _divide_shares(
    devices: Sequence[DeviceSpec], settings: PlanSettings, caps: Mapping[int, Fraction]
) -> tuple[Fraction, ...]:
    """Divide the remaining share among the devices without a memory bound, in proportion to their speed."""
    unbounded = []
    for index in range(len(devices)):
        if index not in caps:
            unbounded.append(index)
    speeds = _speeds([devices[index] for index in unbounded], settings)
    remaining = 1 - sum(caps.values())
    shares = dict(caps)
    by_speed = proportional_shares(speeds)
    for index, share in zip(unbounded, by_speed, strict=True):
        shares[index] = remaining * share
    return tuple(shares[index] for index in range(len(devices)))


def _speeds(devices: Sequence[DeviceSpec], settings: PlanSettings) -> list[float]:
    """Return the speeds by which work is divided, all equal with the option ``shares: equal``."""
    if settings.options.shares == "speed":
        return [device.speed for device in devices]
    return [1.0] * len(devices)


def _candidate_schemes(
    graph: Graph, shares: Sequence[Fraction], tiled: int, settings: PlanSettings
) -> Schemes:
    options = settings.options
    if options.scheme == "lop" or options.scheme == "lip":
        return uniform_schemes(graph, options.scheme, tiled)
    if options.scheme == "fuse" and options.fused_pairs is not None:
        return fused_schemes(graph, options.fused_pairs, tiled)
    # The paper's FUSE has pairs and LOP (Table 2); its integer program may choose LIP as well (equation 11).
    return least_communication(
        graph,
        WorkerTotals.of(shares, settings.source),
        options.communication_formula,
        tiled,
        lip=options.scheme == "optimal",
    )


def _candidate_tilings(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings, tiled: int
) -> Iterator[Tiling | None]:
    """Yield the requested grid, or the fastest grid followed by finer ones, whose tiles need less memory."""
    if not tiled:
        yield None
        return
    speeds = _speeds(devices, settings)
    layers = graph.layers[:tiled]
    reuse = settings.options.tile_overlap == "reuse"
    if settings.options.tile_grid is not None:
        rows, columns = settings.options.tile_grid
        yield make_tiling(layers, rows, columns, speeds, settings.source, reuse)
        return
    best = best_tiling(layers, speeds, settings.source, reuse)
    yield best
    # A device computes one tile at a time, so smaller tiles need less memory, for more redundant halos.
    _, height, width = layers[-1].output
    for factor in (2, 3, 4):
        rows = min(factor * best.rows, height)
        columns = min(factor * best.columns, width)
        if rows * columns <= MOST_TILES:
            yield make_tiling(layers, rows, columns, speeds, settings.source, reuse)


_PROBES: tuple[int, ...] = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Numbers of devices tried in the search for a sufficient number; growing steps, since each makes a plan."""


def fitting_plan(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> DistributedPlan:
    """Return the plan of a scheme; raises `InputError` if none fits, with the number of devices required."""
    best = best_candidate(graph, devices, settings)
    if not best.excess(devices):
        return best.flow.plan
    fullest = best.fullest(devices)
    available = formats.size(devices[fullest].memory)
    raise InputError(
        f"{devices[fullest].name} has {available} of memory, but its part of {graph.name} by "
        f"{settings.options.scheme} needs {formats.size(best.needs[fullest])}: {_what_fits(graph, devices, settings)}",
        ("devices", devices[fullest].name, "memory"),
    )


def _what_fits(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> str:
    """Describe the smallest sufficient number of devices, for another scheme if this one never fits."""
    chosen = settings.options.scheme
    schemes: list[SchemeName] = []
    if chosen != "single":
        schemes.append(chosen)
    if chosen in ("single", "sequential"):
        schemes.append("optimal")
    for scheme in schemes:
        count = enough_devices(graph, devices, settings.with_options(scheme=scheme))
        if count:
            advice = f"{count} devices would do"
            if scheme != chosen:
                advice += f" by the scheme {scheme}"
            if count > len(devices):
                advice += f", the added ones like {devices[-1].name}"
            return advice
    return (
        "no number of such devices would do, since activations and other demands that do not shrink with the share of "
        f"a device exceed the memory of one: give {devices[settings.source].name} and the others more memory, or use "
        "a smaller input, batch_size or in_flight"
    )


def enough_devices(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> int:
    """Return the number of devices required by a scheme, or 0 if no number in `_PROBES` suffices.

    Further devices are copies of the last one.
    """
    others = [*devices]
    source = others.pop(settings.source)
    ordered = [source, *others]
    source_first = replace(settings, source=0)

    def fits(count: int) -> bool:
        added = [ordered[-1]] * (count - len(ordered))
        tried = [*ordered[:count], *added]
        available = sum(device.memory for device in tried)
        # Quick to refuse: the weights alone do not fit.
        if BYTES_PER_VALUE * graph.weights > available:
            return False
        return not best_candidate(graph, tried, source_first).excess(tried)

    # Shares shrink with the number of devices, and the sums to be merged grow, so the numbers that suffice are
    # successive: the least one lies between the first probe that suffices and the probe before.
    insufficient = 0
    for probe in _PROBES:
        if fits(probe):
            for count in range(insufficient + 1, probe):
                if fits(count):
                    return count
            return probe
        insufficient = probe
    return 0
