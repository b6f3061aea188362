"""The plan of a scheme over given devices, or why no such plan can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed import formats
from testbed.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition.drafts import Name, Wish, draft
from testbed.methods.distributed.partition.network import Network
from testbed.methods.distributed.partition.plan import DistributedPlan
from testbed.models.shapes import BYTES_PER_VALUE

_PROBES = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Numbers of devices that are tried in the search for one that would do."""


def plan(network: Network, devices: Sequence[DeviceSpec], wish: Wish) -> DistributedPlan:
    """Return the plan of a scheme.

    Raises:
        InputError: for layers, grids and pairs that cannot be, and where a device has too little memory: with the
            smallest number of devices that would do.
    """
    found = draft(network, devices, wish)
    if not found.excess(devices):
        return found.flow.plan
    fullest = found.fullest(devices)
    available = formats.size(devices[fullest].memory)
    raise InputError(
        f"{devices[fullest].name} has {available} of memory, but its part of {network.name} by "
        f"{wish.scheme} needs {formats.size(found.needs[fullest])}: {_what_fits(network, devices, wish)}",
        ("devices", devices[fullest].name, "memory"),
    )


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
    """Return the smallest number of devices that hold a scheme; 0 where none does, up to the last of `_PROBES`.

    The source and the first of the others; beyond those that there are, more like the last one.
    """
    others = [device for index, device in enumerate(devices) if index != wish.source]
    ordered = [devices[wish.source], *others]
    inner = replace(wish, source=0)

    def fits(count: int) -> bool:
        some = [*ordered[:count], *[ordered[-1]] * (count - len(ordered))]
        if BYTES_PER_VALUE * network.weights > sum(device.memory for device in some):
            return False
        return not draft(network, some, inner).excess(some)

    # Shares fall with the number of devices, but sums to be merged grow: all that fit are next to each other.
    missed = 0
    for probe in _PROBES:
        if fits(probe):
            return next(count for count in range(missed + 1, probe + 1) if count == probe or fits(count))
        missed = probe
    return 0
