"""The plan of a scheme over given devices, or why no such plan can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition.candidates import PlanRequest, SchemeName, candidate
from testbed.methods.distributed.partition.distributed_plan import DistributedPlan
from testbed.models.graph import Graph
from testbed.models.shapes import BYTES_PER_VALUE

_PROBES = (*range(1, 9), 12, 16, 24, 32, 48, 64)
"""Numbers of devices that are tried in the search for one that would do."""


def fitting_plan(graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest) -> DistributedPlan:
    """Return the plan of a scheme.

    Raises:
        InputError: for layers, grids and pairs that cannot be, and where a device has too little memory: with the
            smallest number of devices that would do.
    """
    found = candidate(graph, devices, request)
    if not found.excess(devices):
        return found.flow.plan
    fullest = found.fullest(devices)
    available = formats.size(devices[fullest].memory)
    raise InputError(
        f"{devices[fullest].name} has {available} of memory, but its part of {graph.name} by "
        f"{request.scheme} needs {formats.size(found.needs[fullest])}: {_what_fits(graph, devices, request)}",
        ("devices", devices[fullest].name, "memory"),
    )


def _what_fits(graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest) -> str:
    """Name the smallest number of devices that would do, by another scheme where this one has no such number."""
    ways: list[SchemeName] = [request.scheme] if request.scheme != "single" else []
    if request.scheme in ("single", "sequential"):
        ways.append("optimal")
    for scheme in ways:
        count = enough_devices(graph, devices, replace(request, scheme=scheme))
        if count:
            by = "" if scheme == request.scheme else f" by the scheme {scheme}"
            like = f", the added ones like {devices[-1].name}" if count > len(devices) else ""
            return f"{count} devices would do{by}{like}"
    return (
        "no number of such devices would do, for what each needs whatever its share, activations above all, is too "
        f"much for one of them: give {devices[request.source].name} and the others more memory, or use a smaller "
        "input, batch_size or in_flight"
    )


def enough_devices(graph: Graph, devices: Sequence[DeviceSpec], request: PlanRequest) -> int:
    """Return the smallest number of devices that hold a scheme; 0 where none does, up to the last of `_PROBES`.

    The source and the first of the others; beyond those that there are, more like the last one.
    """
    others = [device for index, device in enumerate(devices) if index != request.source]
    ordered = [devices[request.source], *others]
    inner = replace(request, source=0)

    def fits(count: int) -> bool:
        some = [*ordered[:count], *[ordered[-1]] * (count - len(ordered))]
        if BYTES_PER_VALUE * graph.weights > sum(device.memory for device in some):
            return False
        return not candidate(graph, some, inner).excess(some)

    # Shares fall with the number of devices, but sums to be merged grow: all that fit are next to each other.
    missed = 0
    for probe in _PROBES:
        if fits(probe):
            return next(count for count in range(missed + 1, probe + 1) if count == probe or fits(count))
        missed = probe
    return 0
