"""Which device runs on which host. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.common.errors import InputError
from testbed.common.quantities import format_size
from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair

CORE_SPEED = 2e9
"""FLOP/s that a core is taken to give, where nobody has measured it."""
RESERVED = 1 << 30
"""Bytes of a host's memory that are left to its engine and shaper."""
AGENT = 256 << 20
"""Bytes that a device takes at least, unless it is held to less: its agent with torch. Limits are seldom reached."""


@dataclass(frozen=True)
class Capacity:
    """What a host has for devices."""

    cores: int
    memory: float
    """Bytes."""
    speed: float = CORE_SPEED
    """FLOP/s of each core."""


@dataclass(frozen=True)
class Load:
    """What a placement asks of a host."""

    devices: tuple[str, ...]
    cores: float
    """Cores that are busy while all of its devices compute."""
    memory: float
    """Bytes that its devices take at least."""


def place(
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
    given: Mapping[str, str],
    together: Sequence[Sequence[str]] = (),
) -> dict[str, str]:
    """Return the host of each device, by name.

    Devices go in the order of the scenario, those of ``together`` as one, to the host that is least loaded for its
    cores; of equally loaded ones to that with which they have the fastest links. ``given`` are placed as they say.
    Raises InputError where that names what is not there, or a host has not the memory.
    """
    names = [device.name for device in devices]
    for name, host in given.items():
        if name not in names:
            raise InputError(f"place: there is no device '{name}': {', '.join(names)}")
        if host not in hosts:
            raise InputError(f"place: {name} is to be on '{host}', which is not among the hosts {', '.join(hosts)}")
    specs = {device.name: device for device in devices}
    groups = {name: tuple(group) for group in together for name in group}
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (name not in given, -specs[name].speed, names.index(name))):
        if name in found:
            continue
        group = groups.get(name, (name,))
        choice = given.get(name) or min(hosts, key=lambda host: _cost(group, host, found, specs, links, hosts))
        for each in group:
            if given.get(each, choice) != choice:
                raise InputError(f"place: {' and '.join(group)} share a medium, and have to be on one host")
            found[each] = choice
    _check_memory(found, specs, hosts)
    return {name: found[name] for name in names}


def _cost(
    group: Sequence[str],
    host: str,
    found: Mapping[str, str],
    specs: Mapping[str, DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> tuple[float, float, float]:
    """Return what a host costs a group, least first: memory that is not there, load, links that would leave it."""
    after = {**found, **dict.fromkeys(group, host)}
    load = loads(after, specs, hosts)[host]
    lacking = max(0.0, load.memory + RESERVED - hosts[host].memory)
    leaving = sum(
        min(link.rate or 1e12, 1e12)
        for (a, b), link in links.items()
        if (a in group) != (b in group) and after.get(a, host) != after.get(b, host)
    )
    return lacking, round(load.cores / hosts[host].cores, 2), leaving


def loads(placed: Mapping[str, str], specs: Mapping[str, DeviceSpec], hosts: Mapping[str, Capacity]) -> dict[str, Load]:
    """Return what each host has to do."""
    found = {}
    for host, capacity in hosts.items():
        here = tuple(name for name, where in placed.items() if where == host)
        cores = sum(specs[name].speed * specs[name].processors for name in here) / capacity.speed
        found[host] = Load(here, cores, sum(min(specs[name].memory, AGENT) for name in here))
    return found


def _check_memory(placed: Mapping[str, str], specs: Mapping[str, DeviceSpec], hosts: Mapping[str, Capacity]) -> None:
    for host, load in loads(placed, specs, hosts).items():
        if load.memory > hosts[host].memory - RESERVED:
            raise InputError(
                f"{host} has {format_size(hosts[host].memory)} of memory, its {len(load.devices)} devices take at "
                f"least {format_size(load.memory)}, and {format_size(RESERVED)} is kept for its engine: place some "
                "elsewhere, or add a host"
            )


def described(
    placed: Mapping[str, str],
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    hosts: Mapping[str, Capacity],
) -> list[dict[str, Any]]:
    """Return of each host its devices, how many of its cores and bytes they ask for, and how many links leave it."""
    found = loads(placed, {device.name: device for device in devices}, hosts)
    return [
        {
            "host": host,
            "devices": list(load.devices),
            "busy": load.cores,
            "cores": hosts[host].cores,
            "memory": load.memory,
            "of": hosts[host].memory,
            "leaving": sum(placed[a] == host != placed[b] for a, b in links),
        }
        for host, load in found.items()
    ]
