"""Candidates for the plan of each scheme, with shares proportional to speed and bounded by memory.

`best_candidate` returns the plan of a scheme for some devices, and `fitting_plan` raises an error with advice if the
plan does not fit into their memory.
"""

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
    """Return the plan in which each device has a share of every divided layer; ``name`` is the name of the scheme."""
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
    """Return the input channels of each device in a layer: if possible, the channels made by the device."""
    layer = graph.layers[index]
    if not graph.follows(index):
        return divide(layer.input_channels, shares)
    previous = graph.layers[index - 1]
    if not previous.splits:
        return divide(layer.input_channels, shares)
    # Rounded like the outputs of the previous layer, so that a fused pair needs no exchange in between (Section 4.2).
    channels = previous.output_channels
    # A fully connected layer has an input channel for each pixel of a map, and devices make whole maps.
    factor = layer.input_channels // channels
    parts = divide(channels, shares)
    return tuple(scaled(part, factor) for part in parts)


def single_plan(
    name: str, graph: Graph, devices: Sequence[str], source: int
) -> DistributedPlan:
    """Return the plan in which the source computes all layers: equation (6).

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
    """Return the plan of sequential layer mapping (DL): successive layers on successive devices, the source first.

    The cuts minimize the largest ratio of a device's weights to its memory in ``capacities``.

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> plan = sequential_plan("sequential", graph, ["a", "b"], 0, [1.0, 1.0])
    >>> [layer.owner for layer in plan.layers]
    [0, 0, 1, 1]
    """
    others = [index for index in range(len(devices)) if index != source]
    # Each device has at least one layer, so there are at most as many devices as layers.
    order = [source, *others][: len(graph.layers)]

    def fill_ratio(stage: int, first: int, last: int) -> float:
        weights = sum(layer.weights for layer in graph.layers[first:last])
        return weights / capacities[order[stage]]

    # Transfers at cuts have no cost, since the paper uses this mapping to reduce F, the weights (Section 3.3).
    costs = Costs(fill_ratio, lambda _stage, _cut: 0.0)
    _, cuts = best_cuts(len(graph.layers), len(order), costs, max)
    owners: list[int] = []
    for owner, (first, last) in zip(order, pairwise(cuts), strict=True):
        owners += [owner] * (last - first)
    return _owned_layers(name, devices, source, owners)


def _owned_layers(
    name: str, devices: Sequence[str], source: int, owners: Sequence[int]
) -> DistributedPlan:
    """Return the plan in which device ``owners[i]`` computes layer i."""
    layers = tuple(LayerPlan(scheme="whole", owner=owner) for owner in owners)
    return DistributedPlan(
        scheme=name, devices=tuple(devices), source=source, layers=layers
    )


MAX_TILES = 144
"""Maximum number of tiles in the finer grids that are tried if a coarser grid does not fit into memory.

Each further tile adds a halo and a message, and finer grids hardly need less memory.
"""
_SHARE_STEPS = 1000
"""Shares bounded by memory are rounded down to thousandths of their value.

They are then ratios of small numbers, which `testbed_stahl.planner.paper_communication` recovers from floats.
"""


@dataclass(frozen=True)
class Candidate:
    """A plan with the memory required by each device, which may exceed the memory of the device."""

    flow: Dataflow
    needs: tuple[float, ...]
    """Required bytes of each device, in the order of the plan."""

    @classmethod
    def of(cls, flow: Dataflow) -> Self:
        """Return the candidate for a dataflow, with the computed needs."""
        return cls(flow, memory_needs(flow))

    def excess(self, devices: Sequence[DeviceSpec]) -> dict[int, float]:
        """Return device -> missing bytes, for devices whose memory is too small."""
        missing = {}
        pairs = zip(self.needs, devices, strict=True)
        for index, (need, device) in enumerate(pairs):
            if need > device.memory:
                missing[index] = need - device.memory
        return missing

    def fullest(self, devices: Sequence[DeviceSpec]) -> int:
        """Return the device with the highest ratio of needed memory to memory."""

        def fill_ratio(index: int) -> float:
            return self.needs[index] / devices[index].memory

        return max(range(len(devices)), key=fill_ratio)

    def shortfall(self, devices: Sequence[DeviceSpec]) -> float:
        """Return the missing bytes of the fullest device; 0 if all devices have enough memory."""
        excess = self.excess(devices)
        return excess.get(self.fullest(devices), 0.0)


def best_candidate(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> Candidate:
    """Return the first plan fitting into memory; if none fits, the plan with the smallest shortfall.

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
    tiled_count = settings.options.tiled_layers
    if tiled_count is None:
        tiled_count = feature_dominated_layers(graph)
    check_tileable(graph, tiled_count)
    candidates: list[Candidate] = []
    for tiling in _candidate_tilings(graph, devices, settings, tiled_count):
        candidate = _bound_by_memory(graph, devices, settings, tiled_count, tiling)
        if not candidate.excess(devices):
            return candidate
        candidates.append(candidate)
    return min(candidates, key=lambda candidate: candidate.shortfall(devices))


def _bound_by_memory(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    tiled_count: int,
    tiling: Tiling | None,
) -> Candidate:
    """Return a plan with smaller shares for devices without enough memory, as far as other devices can take over."""
    names = [device.name for device in devices]
    bounded_shares: dict[int, Fraction] = {}
    while True:
        shares = _divide_shares(devices, settings, bounded_shares)
        schemes = _candidate_schemes(graph, shares, tiled_count, settings)
        plan = divided_plan(
            settings.options.scheme,
            graph,
            names,
            settings.source,
            shares,
            schemes,
            tiling,
        )
        candidate = Candidate.of(make_dataflow(graph, plan, settings))
        excess = candidate.excess(devices)
        if not excess:
            return candidate
        # If a device without a share exceeds its memory, no other division of the layers helps.
        if any(shares[index] == 0 for index in excess):
            return candidate
        for index, missing in excess.items():
            divisible_weights = count_divisible_weights(candidate.flow, index)
            divisible_bytes = BYTES_PER_VALUE * divisible_weights
            remaining = 0.0
            if divisible_bytes:
                remaining = max(0.0, 1 - missing / divisible_bytes)
            rounded = Fraction(int(remaining * _SHARE_STEPS), _SHARE_STEPS)
            bounded_shares[index] = shares[index] * rounded
        # If the shares of all devices are bounded, no device can take over the rest.
        if len(bounded_shares) == len(devices):
            return candidate


def _divide_shares(
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    bounded_shares: Mapping[int, Fraction],
) -> tuple[Fraction, ...]:
    """Return the share of each device: its bounded share, or its part of the rest in proportion to its speed."""
    unbounded = []
    for index in range(len(devices)):
        if index not in bounded_shares:
            unbounded.append(index)
    speeds = _speeds([devices[index] for index in unbounded], settings)
    remaining = 1 - sum(bounded_shares.values())
    shares = dict(bounded_shares)
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
    graph: Graph, shares: Sequence[Fraction], tiled_count: int, settings: PlanSettings
) -> Schemes:
    """Return the scheme of each layer by the option ``scheme``."""
    options = settings.options
    if options.scheme == "lop" or options.scheme == "lip":
        return uniform_schemes(graph, options.scheme, tiled_count)
    if options.scheme == "fuse" and options.fused_pairs is not None:
        return fused_schemes(graph, options.fused_pairs, tiled_count)
    # The paper's FUSE has pairs and LOP (Table 2); its integer program may choose LIP as well (equation 11).
    return least_communication(
        graph,
        WorkerTotals.of(shares, settings.source),
        options.communication_formula,
        tiled_count,
        lip=options.scheme == "optimal",
    )


def _candidate_tilings(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    tiled_count: int,
) -> Iterator[Tiling | None]:
    """Yield the grid of the option ``tile_grid``, by default the fastest grid followed by finer ones.

    Yields None if no layer is tiled.
    """
    if not tiled_count:
        yield None
        return
    speeds = _speeds(devices, settings)
    layers = graph.layers[:tiled_count]
    reuse = settings.options.tile_overlap == "reuse"
    if settings.options.tile_grid is not None:
        rows, columns = settings.options.tile_grid
        yield make_tiling(layers, rows, columns, speeds, settings.source, reuse)
        return
    best = best_tiling(layers, speeds, settings.source, reuse)
    yield best
    # Finer grids need less memory, since a device computes one tile at a time, but more computation for halos.
    _, height, width = layers[-1].output
    for factor in (2, 3, 4):
        rows = min(factor * best.rows, height)
        columns = min(factor * best.columns, width)
        if rows * columns <= MAX_TILES:
            yield make_tiling(layers, rows, columns, speeds, settings.source, reuse)


_PROBES: tuple[int, ...] = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Numbers of devices that `enough_devices` tries; the steps grow, since each number needs a plan."""


def fitting_plan(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> DistributedPlan:
    """Return the plan of the option ``scheme``; raises `InputError` with advice if none fits into the memory."""
    best = best_candidate(graph, devices, settings)
    if not best.excess(devices):
        return best.flow.plan
    fullest = best.fullest(devices)
    available = formats.size(devices[fullest].memory)
    raise InputError(
        f"{devices[fullest].name} has {available} of memory, but its part of {graph.name} by "
        f"{settings.options.scheme} needs {formats.size(best.needs[fullest])}: {_advise(graph, devices, settings)}",
        ("devices", devices[fullest].name, "memory"),
    )


def _advise(graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings) -> str:
    """Return text with a sufficient number of devices, for another scheme if none suffices for this one."""
    configured = settings.options.scheme
    schemes: list[SchemeName] = []
    if configured != "single":
        schemes.append(configured)
    if configured in ("single", "sequential"):
        schemes.append("optimal")
    for scheme in schemes:
        count = enough_devices(graph, devices, settings.with_options(scheme=scheme))
        if count:
            advice = f"{count} devices would do"
            if scheme != configured:
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
    """Return the smallest sufficient number of devices, or 0 if no number in `_PROBES` suffices.

    Devices beyond ``devices`` are copies of the last one.
    """
    others = [*devices]
    source = others.pop(settings.source)
    ordered = [source, *others]
    source_first = replace(settings, source=0)

    def fits(count: int) -> bool:
        added = [ordered[-1]] * (count - len(ordered))
        team = [*ordered[:count], *added]
        available = sum(device.memory for device in team)
        # A quick check first, without a plan: whether the weights alone fit.
        if BYTES_PER_VALUE * graph.weights > available:
            return False
        return not best_candidate(graph, team, source_first).excess(team)

    # With more devices shares shrink, but the sums that a device merges grow. The sufficient numbers are thus
    # successive, and the smallest one lies between the first sufficient probe and the probe before.
    insufficient = 0
    for probe in _PROBES:
        if fits(probe):
            for count in range(insufficient + 1, probe):
                if fits(count):
                    return count
            return probe
        insufficient = probe
    return 0
