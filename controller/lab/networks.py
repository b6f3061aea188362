"""The two networks of a run: one for the controller, one for data, which the shaper makes; and their addresses."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

from controller.lab.removal import RUN
from testbed.common.errors import HostError, InputError
from testbed.network.checks import has_room, no_room, prefix_for

DEFAULT_RANGE = "198.18.0.0/15"
"""Set aside for benchmarks between networks (RFC 2544): no user's own network is there."""
_TAKEN = ("overlap", "conflict", "already used")
"""Words by which engines say that a subnet is taken; the last are Podman's."""
CLOSED = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
"""Options of the control network: nothing beyond this host is to be reached over it."""


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


def network_name(run: str, kind: str) -> str:
    """Return what a network of a run is called; ``kind`` is control or data."""
    return f"testbed-{run}-{kind}"


def data_subnet(within: str, devices: int) -> IPv4Network:
    """Return the subnet of the network that the shaper of a run makes, and that nothing outside of it meets.

    Raises InputError where the range is too small.
    """
    return next(free_subnets(within, devices, ()))


def make_control_network(client: docker.DockerClient, run: str) -> None:
    """Make the network over which the controller reaches the shaper; raises HostError where that cannot be."""
    found = free_subnets(DEFAULT_RANGE, 1, [*host_routes(), *subnets(client)])
    pools = ((subnet, IPAMPool(subnet=str(subnet))) for subnet in found)
    complaint = f"every subnet of {DEFAULT_RANGE} that would do is taken"
    settings = {"driver": "bridge", "options": CLOSED}
    make_network(client, run, "control", pools, "the control network", complaint, **settings)


def make_network(
    client: docker.DockerClient,
    run: str,
    kind: str,
    pools: Iterable[tuple[IPv4Network, IPAMPool]],
    title: str,
    complaint: str,
    **settings: Any,
) -> IPv4Network:
    """Make a network of a run in the first of these subnets that nobody takes meanwhile; return the subnet.

    Raises HostError where the engine refuses, or with the ``complaint`` where there is no subnet.
    """
    name = network_name(run, kind)
    for subnet, pool in pools:
        ipam = IPAMConfig(pool_configs=[pool])
        try:
            client.api.create_network(name, ipam=ipam, labels={RUN: run}, check_duplicate=True, **settings)
        except APIError as error:
            complaint = str(error.explanation)
            if "already exists" in complaint:  # the first try of a request that was repeated
                return subnet_of(client, run, kind)
            if not any(word in complaint for word in _TAKEN):
                break
            continue  # another run took it between our look and our request
        return subnet
    raise HostError(
        f"{title} cannot be made ({complaint}): remove old runs with 'testbed down --all' or give the scenario "
        "another network.subnet"
    )


def subnet_of(client: docker.DockerClient, run: str, kind: str) -> IPv4Network:
    """Return the subnet of a network of a run; raises docker's NotFound where it has no such network."""
    return IPv4Network(client.api.inspect_network(network_name(run, kind))["IPAM"]["Config"][0]["Subnet"])


def subnets(client: docker.DockerClient) -> list[IPv4Network]:
    """Return the subnets that networks of the engine have."""
    configurations = (each for network in client.api.networks() for each in network["IPAM"]["Config"] or ())
    return [IPv4Network(each["Subnet"]) for each in configurations if ":" not in each.get("Subnet", ":")]
