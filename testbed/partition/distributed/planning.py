"""The plan of a scheme over given devices: shares by speed, bounded by memory, or why no such plan can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from testbed.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.models.chain import BYTES_PER_VALUE
from testbed.partition.distributed import choice, integer_program
from testbed.partition.distributed.build import alone, in_a_row, shared
from testbed.partition.distributed.choice import Pair, Schemes
from testbed.partition.distributed.communication import Crew, Reuse
from testbed.partition.distributed.network import Network
from testbed.partition.distributed.plan import DistributedPlan, Tiling
from testbed.partition.distributed.resources import memory, split_weights
from testbed.partition.distributed.shares import proportional
from testbed.partition.distributed.tiles import best_tiling, check_early, early_layers, tile

Name = Literal["single", "sequential", "lop", "lip", "fuse", "optimal"]
NAMES: tuple[Name, ...] = ("single", "sequential", "lop", "lip", "fuse", "optimal")
MOST_DEVICES = 64
"""How far the search for a number of devices that would do goes."""
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
    samples: int = 1
    """In a request."""
    in_flight: int = 1
    """Requests at once."""


def plan(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> DistributedPlan:
    """Return the plan of a scheme.

    Raises:
        InputError: for layers, grids and pairs that cannot be, and where a device has too little memory: with the
            smallest number of devices that would do.
    """
    found = draft(network, devices, wish)
    device, need = _fullest(network, devices, found, wish)
    if need <= devices[device].memory:
        return found
    raise InputError(
        f"{devices[device].name} has {_written(devices[device].memory)} of memory, but its part of {network.name} by "
        f"{wish.scheme} needs {_written(need)}: {_what_fits(network, devices, wish)}"
    )


def _fullest(network: Network, devices: Sequence[DeviceSpec], found: DistributedPlan, wish: Wish) -> tuple[int, float]:
    """Return the device that needs most of what it has, and what it needs."""
    needs = memory(network, found, wish.samples, wish.in_flight)
    device = max(range(len(devices)), key=lambda index: needs[index] / devices[index].memory)
    return device, needs[device]


def _lacks(network: Network, devices: Sequence[DeviceSpec], found: DistributedPlan, wish: Wish) -> float:
    """Return how many bytes the fullest device has too few; 0 where all fit."""
    device, need = _fullest(network, devices, found, wish)
    return max(0.0, need - devices[device].memory)


def draft(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> DistributedPlan:
    """Return a plan that fits into the devices; where there is none, the one that lacks least."""
    names = [device.name for device in devices]
    if wish.scheme == "single":
        return alone(wish.scheme, network, names, wish.source)
    if wish.scheme == "sequential":
        return in_a_row(wish.scheme, network, names, wish.source, [device.memory for device in devices])
    early = early_layers(network) if wish.early is None else wish.early
    check_early(network, early)
    drafts: list[DistributedPlan] = []
    for tiling in _tilings(network, devices, wish, early):
        drafts.append(_bounded(network, devices, wish, early, tiling))
        if not _lacks(network, devices, drafts[-1], wish):
            return drafts[-1]
    return min(drafts, key=lambda found: _lacks(network, devices, found, wish))


def _bounded(
    network: Network, devices: Sequence[DeviceSpec], wish: Wish, early: int, tiling: Tiling | None
) -> DistributedPlan:
    """Shrink the shares of devices that lack memory, as long as the others can take over."""
    names = [device.name for device in devices]
    caps: dict[int, Fraction] = {}
    while True:
        shares = _shares(devices, wish, caps)
        schemes = _schemes(network, shares, early, wish)
        found = shared(wish.scheme, network, names, wish.source, shares, schemes, tiling)
        needs = memory(network, found, wish.samples, wish.in_flight)
        excess = {
            index: need - device.memory
            for index, (need, device) in enumerate(zip(needs, devices, strict=True))
            if need > device.memory
        }
        if not excess or any(shares[index] == 0 for index in excess):
            return found
        for index, much in excess.items():
            shrinks = BYTES_PER_VALUE * split_weights(network, found, index)
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


def _what_fits(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> str:
    """Name the smallest number of devices that would do, by another scheme where this one has no such number."""
    ways: list[Name] = [wish.scheme] if wish.scheme != "single" else []
    if wish.scheme in ("single", "sequential"):
        ways.append("optimal")
    for scheme in ways:
        count = enough_devices(network, devices, replace(wish, scheme=scheme))
        if count:
            by = "" if scheme == wish.scheme else f" by the scheme {scheme}"
            like = f", the added ones like {devices[-1].name}" if count > len(devices) else ""
            return f"{count} devices would do{by}{like}"
    return (
        "no number of such devices would do, for what each needs whatever its share, activations above all, is too "
        f"much for one of them: give {devices[wish.source].name} and the others more memory, or use a smaller input, "
        "batch_size or in_flight"
    )


def enough_devices(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> int:
    """Return the smallest number of devices that hold a scheme; 0 where none up to `MOST_DEVICES` does.

    The source and the first of the others; beyond those that there are, more like the last one.
    """
    others = [device for index, device in enumerate(devices) if index != wish.source]
    ordered = [devices[wish.source], *others]
    inner = replace(wish, source=0)

    def fits(count: int) -> bool:
        some = [*ordered[:count], *[ordered[-1]] * (count - len(ordered))]
        if BYTES_PER_VALUE * network.weights > sum(device.memory for device in some):
            return False
        return not _lacks(network, some, draft(network, some, inner), inner)

    # What does not fit into so many will not fit into fewer, and is known at once.
    if not fits(MOST_DEVICES):
        return 0
    return next(count for count in range(1, MOST_DEVICES + 1) if fits(count))


def _written(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
