"""Which addresses a run's networks take, so that they meet nobody else's. Pure but for `host_routes`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from testbed.errors import HostError, InputError

DEFAULT_RANGE = "198.18.0.0/15"
"""Set aside for benchmarks between networks (RFC 2544): no user's own network is there."""
SMALLEST = 24
_RESERVED = 3
"""Of every subnet: its own address, the bridge's, and the broadcast address."""


def prefix_for(devices: int) -> int:
    """Return the length of prefix that leaves every device an address: 24, or less for more than 253."""
    prefix = SMALLEST
    while 2 ** (32 - prefix) < devices + _RESERVED:
        prefix -= 1
    return prefix


def free_subnets(within: str, devices: int, taken: Iterable[IPv4Network]) -> Iterator[IPv4Network]:
    """Yield the subnets of a range that have room for the devices and overlap nothing that is taken, lowest first.

    Raises InputError where the range is none, or too small for the devices.
    """
    try:
        whole = IPv4Network(within)
    except ValueError as error:
        raise InputError(
            f"'{within}' is not an IPv4 range ({error}): write '{DEFAULT_RANGE}'", ("network", "subnet")
        ) from error
    prefix = max(prefix_for(devices), whole.prefixlen)
    if 2 ** (32 - prefix) < devices + _RESERVED:
        raise InputError(
            f"'{within}' has no room for {devices} devices: write a range of /{prefix_for(devices)} or larger",
            ("network", "subnet"),
        )
    obstacles = [network for network in taken if network.overlaps(whole)]
    for subnet in whole.subnets(new_prefix=prefix):
        if not any(subnet.overlaps(obstacle) for obstacle in obstacles):
            yield subnet


def device_addresses(subnet: IPv4Network, names: Sequence[str]) -> dict[str, IPv4Address]:
    """Return each device's address, in the order of the scenario, from the third of the subnet on."""
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
