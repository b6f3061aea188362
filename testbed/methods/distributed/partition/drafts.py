"""Plans of a scheme over given devices, shares by speed and bounded by memory, that may still take too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, Self

from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition import choice, integer_program
from testbed.methods.distributed.partition.build import alone, in_a_row, shared
from testbed.methods.distributed.partition.choice import Pair, Schemes
from testbed.methods.distributed.partition.communication import Crew, Reuse
from testbed.methods.distributed.partition.early import check_early, early_layers
from testbed.methods.distributed.partition.execution import Execution
from testbed.methods.distributed.partition.flow import Flow, flow
from testbed.methods.distributed.partition.memory import memory
from testbed.methods.distributed.partition.network import Network
from testbed.methods.distributed.partition.plan import Tiling
from testbed.methods.distributed.partition.resources import divided_weights
from testbed.methods.distributed.partition.shares import proportional
from testbed.methods.distributed.partition.tiles import best_tiling, tile
from testbed.models.shapes import BYTES_PER_VALUE

Name = Literal["single", "sequential", "lop", "lip", "fuse", "optimal"]
NAMES: tuple[Name, ...] = ("single", "sequential", "lop", "lip", "fuse", "optimal")
MOST_TILES = 144
"""How fine a grid is looked at where a coarser one does not fit into memory."""
_STEPS = 1000
"""Shares that memory bounds are rounded down to so many parts of what they were."""


@dataclass(frozen=True)
class Wish:
    """What is asked of a plan."""

    scheme: Name = "optimal"
    """``fuse`` is LOP with fused pairs, ``optimal`` chooses LIP, too."""
    fused: tuple[Pair, ...] | None = None
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
class Draft:
    """A plan that may take more than there is."""

    flow: Flow
    needs: tuple[float, ...]
    """Bytes, by device."""

    @classmethod
    def of(cls, flow: Flow) -> Self:
        """Look at what a plan takes."""
        return cls(flow, memory(flow))

    def excess(self, devices: Sequence[DeviceSpec]) -> dict[int, float]:
        """Return how many bytes which devices have too few."""
        pairs = enumerate(zip(self.needs, devices, strict=True))
        return {index: need - device.memory for index, (need, device) in pairs if need > device.memory}

    def fullest(self, devices: Sequence[DeviceSpec]) -> int:
        """Return the device that needs most of what it has."""
        return max(range(len(devices)), key=lambda index: self.needs[index] / devices[index].memory)

    def lacks(self, devices: Sequence[DeviceSpec]) -> float:
        """Return how many bytes the fullest device has too few; 0 where all fit."""
        return self.excess(devices).get(self.fullest(devices), 0.0)


def draft(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> Draft:
    """Return a plan that fits into the devices; where there is none, the one that lacks least.

    Raises:
        InputError: for layers, grids and pairs that cannot be.
    """
    names = [device.name for device in devices]
    if wish.scheme == "single":
        return Draft.of(flow(network, alone(wish.scheme, network, names, wish.source), wish.execution))
    if wish.scheme == "sequential":
        capacities = [device.memory for device in devices]
        return Draft.of(flow(network, in_a_row(wish.scheme, network, names, wish.source, capacities), wish.execution))
    early = early_layers(network) if wish.early is None else wish.early
    check_early(network, early)
    drafts: list[Draft] = []
    for tiling in _tilings(network, devices, wish, early):
        drafts.append(_bounded(network, devices, wish, early, tiling))
        if not drafts[-1].excess(devices):
            return drafts[-1]
    return min(drafts, key=lambda found: found.lacks(devices))


def _bounded(network: Network, devices: Sequence[DeviceSpec], wish: Wish, early: int, tiling: Tiling | None) -> Draft:
    """Shrink the shares of devices that lack memory, as long as the others can take over."""
    names = [device.name for device in devices]
    caps: dict[int, Fraction] = {}
    while True:
        shares = _shares(devices, wish, caps)
        schemes = _schemes(network, shares, early, wish)
        plan = shared(wish.scheme, network, names, wish.source, shares, schemes, tiling)
        found = Draft.of(flow(network, plan, wish.execution))
        excess = found.excess(devices)
        if not excess or any(shares[index] == 0 for index in excess):
            return found
        for index, much in excess.items():
            shrinks = BYTES_PER_VALUE * divided_weights(found.flow, index)
            left = max(0.0, 1 - much / shrinks) if shrinks else 0.0
            caps[index] = shares[index] * Fraction(int(left * _STEPS), _STEPS)
        if len(caps) == len(devices):
            return found


def _shares(devices: Sequence[DeviceSpec], wish: Wish, caps: Mapping[int, Fraction]) -> tuple[Fraction, ...]:
    """Divide what the devices that memory bounds leave among the others, in proportion to their speed."""
    free = [index for index in range(len(devices)) if index not in caps]
    speeds = [devices[index].speed if wish.shares == "speed" else 1.0 for index in free]
    rest = 1 - sum(caps.values())
    shares = {**caps, **{index: rest * share for index, share in zip(free, proportional(speeds), strict=True)}}
    return tuple(shares[index] for index in range(len(devices)))


def _schemes(network: Network, shares: Sequence[Fraction], early: int, wish: Wish) -> Schemes:
    if wish.scheme == "lop" or wish.scheme == "lip":
        return choice.everywhere(network, wish.scheme, early)
    if wish.scheme == "fuse" and wish.fused is not None:
        return choice.fused(network, wish.fused, early)
    solve = (choice if wish.program == "dynamic" else integer_program).least_communication
    found: Schemes = solve(network, Crew.of(shares, wish.source), wish.reuse, early, lip=wish.scheme == "optimal")
    return found


def _tilings(network: Network, devices: Sequence[DeviceSpec], wish: Wish, early: int) -> Iterator[Tiling | None]:
    """Yield the grid that is wished for; or the soonest done, then finer ones, whose tiles take less memory."""
    if not early:
        yield None
        return
    speeds = [device.speed if wish.shares == "speed" else 1.0 for device in devices]
    layers = network.layers[:early]
    if wish.grid is not None:
        yield tile(layers, *wish.grid, speeds, wish.source)
        return
    best = best_tiling(layers, speeds, wish.source)
    yield best
    _, height, width = layers[-1].output
    for factor in (2, 3, 4):
        rows, columns = min(factor * best.rows, height), min(factor * best.columns, width)
        if rows * columns <= MOST_TILES:
            yield tile(layers, rows, columns, speeds, wish.source)
