"""Build the partition plan of a scheme, with shares proportional to speed and bounded by memory."""

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
from testbed_stahl.dataflow import Dataflow, dataflow
from testbed_stahl.demands import divided_weights, memory
from testbed_stahl.options import PlanSettings, SchemeName
from testbed_stahl.plan import (
    DistributedPlan,
    LayerPlan,
    Range,
    Tiling,
    divide,
    proportional,
)
from testbed_stahl.schemes import (
    Schemes,
    WorkerTotals,
    everywhere,
    fused,
    least_communication,
)
from testbed_stahl.tiles import best_tiling, check_early, early_layers, tile


def divided_plan(
    name: str,
    graph: Graph,
    devices: Sequence[str],
    source: int,
    shares: Sequence[Fraction],
    schemes: Schemes,
    tiling: Tiling | None = None,
) -> DistributedPlan:
    """Build the plan in which each device has its share of every layer the scheme splits."""
    layers: list[LayerPlan] = []
    for index, (layer, scheme) in enumerate(zip(graph.layers, schemes, strict=True)):
        if scheme in ("lop", "fuse1"):
            layers.append(
                LayerPlan(scheme=scheme, outputs=divide(layer.output_channels, shares))
            )
        elif scheme in ("lip", "fuse2"):
            layers.append(
                LayerPlan(scheme=scheme, inputs=_split_input(graph, index, shares))
            )
        else:
            layers.append(
                LayerPlan(scheme=scheme, owner=source if scheme == "whole" else None)
            )
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
    layer = graph.layers[index]
    if not graph.follows(index) or not graph.layers[index - 1].splits:
        return divide(layer.input_channels, shares)
    channels = graph.layers[index - 1].output_channels
    # More than one where a fully connected layer takes a feature map, of which each device has whole channels.
    factor = layer.input_channels // channels
    return tuple(
        Range(first * factor, last * factor) for first, last in divide(channels, shares)
    )


def single_plan(
    name: str, graph: Graph, devices: Sequence[str], source: int
) -> DistributedPlan:
    """Build the plan in which the source computes everything: equation (6)."""
    return _owned_layers(name, devices, source, [source] * len(graph.layers))


def sequential_plan(
    name: str,
    graph: Graph,
    devices: Sequence[str],
    source: int,
    capacities: Sequence[float],
) -> DistributedPlan:
    """Build a plan of sequential layer mapping (DL): contiguous layers over the devices, the source first.

    The cuts minimize the largest ratio of weights to memory.

    The cuts are those for which the weights on the fullest device are the least, in relation to its capacity.
    """
    order = [source, *(index for index in range(len(devices)) if index != source)][
        : len(graph.layers)
    ]
    costs = Costs(
        lambda stage, first, last: (
            sum(layer.weights for layer in graph.layers[first:last])
            / capacities[order[stage]]
        ),
        lambda _stage, _cut: 0.0,
    )
    _, cuts = best_cuts(len(graph.layers), len(order), costs, max)
    owners = [
        owner
        for owner, (first, last) in zip(order, pairwise(cuts), strict=True)
        for _ in range(first, last)
    ]
    return _owned_layers(name, devices, source, owners)


def _owned_layers(
    name: str, devices: Sequence[str], source: int, owners: Sequence[int]
) -> DistributedPlan:
    layers = tuple(LayerPlan(scheme="whole", owner=owner) for owner in owners)
    return DistributedPlan(
        scheme=name, devices=tuple(devices), source=source, layers=layers
    )


MOST_TILES = 144
"""How fine a grid is looked at where a coarser one does not fit into memory."""
_STEPS = 1000
"""Shares bounded by memory are rounded down to thousandths of their value."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its memory demand, which may exceed the memory of some devices."""

    flow: Dataflow
    needs: tuple[float, ...]
    """Bytes, by device."""

    @classmethod
    def of(cls, flow: Dataflow) -> Self:
        """Compute the memory demand of a plan."""
        return cls(flow, memory(flow))

    def excess(self, devices: Sequence[DeviceSpec]) -> dict[int, float]:
        """Return the missing bytes by device."""
        pairs = enumerate(zip(self.needs, devices, strict=True))
        return {
            index: need - device.memory
            for index, (need, device) in pairs
            if need > device.memory
        }

    def fullest(self, devices: Sequence[DeviceSpec]) -> int:
        """Return the device with the highest ratio of demand to memory."""
        return max(
            range(len(devices)),
            key=lambda index: self.needs[index] / devices[index].memory,
        )

    def shortfall(self, devices: Sequence[DeviceSpec]) -> float:
        """Return the bytes missing on the fullest device; 0 if every device fits."""
        return self.excess(devices).get(self.fullest(devices), 0.0)


def candidate(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> Candidate:
    """Return a plan that fits, otherwise the one with the smallest shortfall; raises `InputError` for invalid ones."""
    names, scheme = [device.name for device in devices], settings.options.scheme
    if scheme == "single":
        return Candidate.of(
            dataflow(
                graph, single_plan(scheme, graph, names, settings.source), settings
            )
        )
    if scheme == "sequential":
        plan = sequential_plan(
            scheme, graph, names, settings.source, [device.memory for device in devices]
        )
        return Candidate.of(dataflow(graph, plan, settings))
    early = (
        early_layers(graph)
        if settings.options.tiled_layers is None
        else settings.options.tiled_layers
    )
    check_early(graph, early)
    candidates: list[Candidate] = []
    for tiling in _candidate_tilings(graph, devices, settings, early):
        candidates.append(_bound_by_memory(graph, devices, settings, early, tiling))
        if not candidates[-1].excess(devices):
            return candidates[-1]
    return min(candidates, key=lambda option: option.shortfall(devices))


def _bound_by_memory(
    graph: Graph,
    devices: Sequence[DeviceSpec],
    settings: PlanSettings,
    early: int,
    tiling: Tiling | None,
) -> Candidate:
    """Shrink the shares of devices without enough memory while other devices can take over."""
    names = [device.name for device in devices]
    caps: dict[int, Fraction] = {}
    while True:
        shares = _divide_shares(devices, settings, caps)
        schemes = _candidate_schemes(graph, shares, early, settings)
        plan = divided_plan(
            settings.options.scheme,
            graph,
            names,
            settings.source,
            shares,
            schemes,
            tiling,
        )
        bounded = Candidate.of(dataflow(graph, plan, settings))
        excess = bounded.excess(devices)
        if not excess or any(shares[index] == 0 for index in excess):
            return bounded
        for index, much in excess.items():
            shrinks = BYTES_PER_VALUE * divided_weights(bounded.flow, index)
            left = max(0.0, 1 - much / shrinks) if shrinks else 0.0
            caps[index] = shares[index] * Fraction(int(left * _STEPS), _STEPS)
        if len(caps) == len(devices):
            return bounded


def _divide_shares(
    devices: Sequence[DeviceSpec], settings: PlanSettings, caps: Mapping[int, Fraction]
) -> tuple[Fraction, ...]:
    """Divide the remaining share among the devices without a memory bound, in proportion to their speed."""
    free = [index for index in range(len(devices)) if index not in caps]
    speeds = [
        devices[index].speed if settings.options.shares == "speed" else 1.0
        for index in free
    ]
    rest = 1 - sum(caps.values())
    shares = {
        **caps,
        **{
            index: rest * share
            for index, share in zip(free, proportional(speeds), strict=True)
        },
    }
    return tuple(shares[index] for index in range(len(devices)))


def _candidate_schemes(
    graph: Graph, shares: Sequence[Fraction], early: int, settings: PlanSettings
) -> Schemes:
    options, workers = settings.options, WorkerTotals.of(shares, settings.source)
    if options.scheme == "lop" or options.scheme == "lip":
        return everywhere(graph, options.scheme, early)
    if options.scheme == "fuse" and options.fused_pairs is not None:
        return fused(graph, options.fused_pairs, early)
    return least_communication(
        graph,
        workers,
        options.communication_formula,
        early,
        lip=options.scheme == "optimal",
    )


def _candidate_tilings(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings, early: int
) -> Iterator[Tiling | None]:
    """Yield the requested grid, or the fastest grid followed by finer ones, whose tiles need less memory."""
    if not early:
        yield None
        return
    speeds = [
        device.speed if settings.options.shares == "speed" else 1.0
        for device in devices
    ]
    layers = graph.layers[:early]
    reuse = settings.options.tile_overlap == "reuse"
    if settings.options.tile_grid is not None:
        yield tile(layers, *settings.options.tile_grid, speeds, settings.source, reuse)
        return
    best = best_tiling(layers, speeds, settings.source, reuse)
    yield best
    _, height, width = layers[-1].output
    for factor in (2, 3, 4):
        rows, columns = (
            min(factor * best.rows, height),
            min(factor * best.columns, width),
        )
        if rows * columns <= MOST_TILES:
            yield tile(layers, rows, columns, speeds, settings.source, reuse)


_PROBES = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Numbers of devices that are tried in the search for one that would do."""


def fitting_plan(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> DistributedPlan:
    """Return the plan of a scheme; raises `InputError` if none fits, with the number of devices required."""
    best = candidate(graph, devices, settings)
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
    ways: list[SchemeName] = (
        [settings.options.scheme] if settings.options.scheme != "single" else []
    )
    if settings.options.scheme in ("single", "sequential"):
        ways.append("optimal")
    for scheme in ways:
        count = enough_devices(graph, devices, settings.with_options(scheme=scheme))
        if count:
            by = "" if scheme == settings.options.scheme else f" by the scheme {scheme}"
            like = (
                f", the added ones like {devices[-1].name}"
                if count > len(devices)
                else ""
            )
            return f"{count} devices would do{by}{like}"
    return (
        "no number of such devices would do, for what each needs whatever its share, activations above all, is too "
        f"much for one of them: give {devices[settings.source].name} and the others more memory, or use a smaller "
        "input, batch_size or in_flight"
    )


def enough_devices(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> int:
    """Return how many devices a scheme needs, extra ones being copies of the last; 0 if no number in `_PROBES`
    suffices.
    """
    others = [
        device for index, device in enumerate(devices) if index != settings.source
    ]
    ordered = [devices[settings.source], *others]
    inner = replace(settings, source=0)

    def fits(count: int) -> bool:
        some = [*ordered[:count], *[ordered[-1]] * (count - len(ordered))]
        if BYTES_PER_VALUE * graph.weights > sum(device.memory for device in some):
            return False
        return not candidate(graph, some, inner).excess(some)

    # Shares fall with the number of devices, but sums to be merged grow: all that fit are next to each other.
    missed = 0
    for probe in _PROBES:
        if fits(probe):
            return next(
                count
                for count in range(missed + 1, probe + 1)
                if count == probe or fits(count)
            )
        missed = probe
    return 0
