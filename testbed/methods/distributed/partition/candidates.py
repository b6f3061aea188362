"""Plans of a scheme over given devices, shares by speed and bounded by memory, that may still need too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Self

from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition import integer_program, scheme_choice
from testbed.methods.distributed.partition.assembly import alone, in_a_row, shared
from testbed.methods.distributed.partition.communication import Reuse, WorkerTotals
from testbed.methods.distributed.partition.dataflow import Dataflow, dataflow
from testbed.methods.distributed.partition.distributed_plan import Tiling
from testbed.methods.distributed.partition.early import check_early, early_layers
from testbed.methods.distributed.partition.execution import Execution
from testbed.methods.distributed.partition.memory_bound import memory
from testbed.methods.distributed.partition.resources import divided_weights
from testbed.methods.distributed.partition.scheme_choice import LayerPair, Schemes
from testbed.methods.distributed.partition.shares import proportional
from testbed.methods.distributed.partition.tiles import best_tiling, tile
from testbed.models.graph import Graph
from testbed.models.shapes import BYTES_PER_VALUE

SchemeName = Literal["single", "sequential", "lop", "lip", "fuse", "optimal"]
SCHEMES: tuple[SchemeName, ...] = ("single", "sequential", "lop", "lip", "fuse", "optimal")
MOST_TILES = 144
"""How fine a grid is looked at where a coarser one does not fit into memory."""
_STEPS = 1000
"""Shares that memory bounds are rounded down to thousandths of what they were."""


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan."""

    scheme: SchemeName = "optimal"
    """``fuse`` is LOP with fused pairs, ``optimal`` chooses LIP, too."""
    fused: tuple[LayerPair, ...] | None = None
    """The pairs of ``fuse``; None: those with the least communication."""
    program: Literal["dynamic", "integer"] = "dynamic"
    """Which finds the optimum; both find one."""
    reuse: Reuse = "everywhere"
    """By which formula it is one. What is sent never holds what is there already."""
    shares: Literal["speed", "equal"] = "speed"
    early: int | None = None
    """How many of the first layers are tiled; None: `early_layers`."""
    grid: tuple[int, int] | None = None
    """Rows and columns of tiles; None: `best_tiling`."""
    source: int = 0
    execution: Execution = field(default_factory=Execution)


@dataclass(frozen=True)
class Candidate:
    """A plan that may need more memory than there is."""

    flow: Dataflow
    needs: tuple[float, ...]
    """Bytes, by device."""

    @classmethod
    def of(cls, flow: Dataflow) -> Self:
        """Work out what a plan needs."""
        return cls(flow, memory(flow))

    def excess(self, devices: Sequence[DeviceSpec]) -> dict[int, float]:
        """Return how many bytes which devices have too few."""
        pairs = enumerate(zip(self.needs, devices, strict=True))
        return {index: need - device.memory for index, (need, device) in pairs if need > device.memory}

    def fullest(self, devices: Sequence[DeviceSpec]) -> int:
        """Return the device that needs most of what it has."""
        return max(range(len(devices)), key=lambda index: self.needs[index] / devices[index].memory)

    def shortfall(self, devices: Sequence[DeviceSpec]) -> float:
        """Return how many bytes the fullest device has too few; 0 where all fit."""
        return self.excess(devices).get(self.fullest(devices), 0.0)


def candidate(graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest) -> Candidate:
    """Return a plan that fits into the devices; where there is none, the one with the smallest shortfall.

    Raises:
        InputError: for layers, grids and pairs that cannot be.
    """
    names = [device.name for device in devices]
    if request.scheme == "single":
        return Candidate.of(dataflow(graph, alone(request.scheme, graph, names, request.source), request.execution))
    if request.scheme == "sequential":
        capacities = [device.memory for device in devices]
        return Candidate.of(
            dataflow(graph, in_a_row(request.scheme, graph, names, request.source, capacities), request.execution)
        )
    early = early_layers(graph) if request.early is None else request.early
    check_early(graph, early)
    candidates: list[Candidate] = []
    for tiling in _tilings(graph, devices, request, early):
        candidates.append(_bounded(graph, devices, request, early, tiling))
        if not candidates[-1].excess(devices):
            return candidates[-1]
    return min(candidates, key=lambda found: found.shortfall(devices))


def _bounded(
    graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest, early: int, tiling: Tiling | None
) -> Candidate:
    """Shrink the shares of devices that lack memory, as long as the others can take over."""
    names = [device.name for device in devices]
    caps: dict[int, Fraction] = {}
    while True:
        shares = _shares(devices, request, caps)
        schemes = _schemes(graph, shares, early, request)
        plan = shared(request.scheme, graph, names, request.source, shares, schemes, tiling)
        found = Candidate.of(dataflow(graph, plan, request.execution))
        excess = found.excess(devices)
        if not excess or any(shares[index] == 0 for index in excess):
            return found
        for index, much in excess.items():
            shrinks = BYTES_PER_VALUE * divided_weights(found.flow, index)
            left = max(0.0, 1 - much / shrinks) if shrinks else 0.0
            caps[index] = shares[index] * Fraction(int(left * _STEPS), _STEPS)
        if len(caps) == len(devices):
            return found


def _shares(devices: Sequence[DeviceSpec], request: PlanRequest, caps: Mapping[int, Fraction]) -> tuple[Fraction, ...]:
    """Divide what the devices that memory bounds leave among the others, in proportion to their speed."""
    free = [index for index in range(len(devices)) if index not in caps]
    speeds = [devices[index].speed if request.shares == "speed" else 1.0 for index in free]
    rest = 1 - sum(caps.values())
    shares = {**caps, **{index: rest * share for index, share in zip(free, proportional(speeds), strict=True)}}
    return tuple(shares[index] for index in range(len(devices)))


def _schemes(graph: Graph, shares: Sequence[Fraction], early: int, request: PlanRequest) -> Schemes:
    if request.scheme == "lop" or request.scheme == "lip":
        return scheme_choice.everywhere(graph, request.scheme, early)
    if request.scheme == "fuse" and request.fused is not None:
        return scheme_choice.fused(graph, request.fused, early)
    solve = (scheme_choice if request.program == "dynamic" else integer_program).least_communication
    found: Schemes = solve(
        graph, WorkerTotals.of(shares, request.source), request.reuse, early, lip=request.scheme == "optimal"
    )
    return found


def _tilings(graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest, early: int) -> Iterator[Tiling | None]:
    """Yield the grid that is wished for; or the soonest done, then finer ones, whose tiles take less memory."""
    if not early:
        yield None
        return
    speeds = [device.speed if request.shares == "speed" else 1.0 for device in devices]
    layers = graph.layers[:early]
    reuse = request.execution.overlap == "reuse"
    if request.grid is not None:
        yield tile(layers, *request.grid, speeds, request.source, reuse)
        return
    best = best_tiling(layers, speeds, request.source, reuse)
    yield best
    _, height, width = layers[-1].output
    for factor in (2, 3, 4):
        rows, columns = min(factor * best.rows, height), min(factor * best.columns, width)
        if rows * columns <= MOST_TILES:
            yield tile(layers, rows, columns, speeds, request.source, reuse)
