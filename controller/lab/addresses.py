"""Which addresses a run's networks take, so that they meet nobody else's. Pure but for `host_routes`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from testbed.common.errors import HostError, InputError
from testbed.network.checks import has_room, no_room, prefix_for

DEFAULT_RANGE = "198.18.0.0/15"
"""Set aside for benchmarks between networks (RFC 2544): no user's own network is there."""


def free_subnets(within: str, devices: int, taken: Iterable[IPv4Network]) -> Iterator[IPv4Network]:
    """Yield the subnets of a range that have room for the devices and overlap nothing that is taken, lowest first.

    Raises InputError where the range is too small for the devices.
    """
    whole = IPv4Network(within)
    if not has_room(whole, devices):
        raise InputError(no_room(within, devices), ("network", "subnet"))
    prefix = max(prefix_for(devices), whole.prefixlen)
    obstacles = [network for network in taken if network.overlaps(whole)]
    for subnet in whole.subnets(new_prefix=prefix):
        if not any(subnet.overlaps(obstacle) for obstacle in obstacles):
            yield subnet


def device_addresses(subnet: IPv4Network, names: Sequence[str]) -> dict[str, IPv4Address]:
    """Return each device's address, in the order of the scenario, from the third of the subnet on.

    Raises `HostError` where the subnet has no room.
    """
    first = int(subnet.network_address) + 2
    if first + len(names) > int(subnet.broadcast_address):
        raise HostError(f"{subnet} has no room for {len(names)} devices")
    return {name: IPv4Address(first + index) for index, name in enumerate(names)}


def host_routes(table: Path = Path("/proc/net/route")) -> list[IPv4Network]:
    """Return the networks that this machine routes to, without the default route; none where it does not say."""
    try:
        lines = table.read_text().splitlines()[1:]
    except FileNotFoundError:
        return []
    networks = []
    for line in lines:
        _, destination, _, _, _, _, _, mask, *_ = line.split()
        if int(mask, 16):
            # The numbers are the addresses' bytes read in the host's own order.
            address = struct.pack("=I", int(destination, 16))
            networks.append(IPv4Network((address, int(mask, 16).bit_count()), strict=False))
    return networks
