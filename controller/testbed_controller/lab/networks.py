"""The two networks of a run: one for the controller, one for data, which the shaper makes; and their addresses."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network
from socket import AF_INET
from typing import Any

import docker
from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

from testbed.common.errors import HostError, InputError
from testbed.network.checks import has_room, no_room, prefix_for
from testbed_controller.lab.removal import RUN

DEFAULT_RANGE = "198.18.0.0/15"
"""Set aside for benchmarks between networks (RFC 2544): no user's own network is there."""
_NAMED = 3
"""Obstacles that a message names."""
_TAKEN = ("overlap", "conflict", "already used")
"""Words by which engines say that a subnet is taken; the last are Podman's."""
_ALLOTTED_WITHIN = 10.0
"""Seconds within which a swarm gives an overlay network its subnet."""
CLOSED = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
"""Options of the control network: nothing beyond this host is to be reached over it."""


def free_subnets(within: str, devices: int, taken: Iterable[IPv4Network], key: str = "subnet") -> Iterator[IPv4Network]:
    """Yield the subnets of a range that have room for the devices and overlap nothing that is taken, lowest first.

    Raises InputError, located at this key of the scenario's network, where the range is too small for the devices.
    """
    whole = IPv4Network(within)
    if not has_room(whole, devices):
        raise InputError(no_room(within, devices), ("network", key))
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


def host_routes(within: str) -> list[IPv4Network]:
    """Return the networks inside a range that this machine routes to, by any routing table.

    A route that is wider than the range claims nothing of it, because the route of a new network there is preferred:
    VPNs take all addresses by a default route or by its two halves. Other tables than the main one count as well,
    since a policy rule (``ip rule``) may ask them first. Returns nothing on machines without Linux's routing tables.
    """
    if sys.platform != "linux":
        return []
    from pyroute2 import IPRoute  # late: commands that make no network start sooner

    whole = IPv4Network(within)
    with IPRoute() as kernel:
        routes = kernel.get_routes(family=AF_INET)
    networks = {IPv4Network((route.get("dst") or "0.0.0.0", route["dst_len"]), strict=False) for route in routes}
    return sorted(each for each in networks if each.prefixlen >= whole.prefixlen and each.overlaps(whole))


def network_name(run: str, kind: str) -> str:
    """Return what a network of a run is called; ``kind`` is control or data."""
    return f"testbed-{run}-{kind}"


def data_subnet(within: str, devices: int) -> IPv4Network:
    """Return the subnet of the network that the shaper of a run makes, and that nothing outside of it meets.

    Raises InputError where the range is too small.
    """
    return next(free_subnets(within, devices, ()))


def make_control_network(client: docker.DockerClient, run: str, within: str | None = None) -> None:
    """Make the network over which the controller reaches the shaper.

    Its subnet comes from ``within``; by default from `DEFAULT_RANGE`, or from the engine's own address pools when
    nothing of that range is free. Raises HostError where the network cannot be made.
    """
    chosen = within or DEFAULT_RANGE
    routed, held = host_routes(chosen), subnets(client)
    pools: list[IPAMPool | None] = []
    for subnet in free_subnets(chosen, 1, [*routed, *held], "control_subnet"):
        pools.append(IPAMPool(subnet=str(subnet)))
    if within is None:
        pools.append(None)
    complaint = all_taken(chosen, routed, {"the engine": held})
    make_network(client, run, "control", pools, "the control network", complaint, driver="bridge", options=CLOSED)


def all_taken(within: str, routed: Iterable[IPv4Network], held: Mapping[str, Iterable[IPv4Network]]) -> str:
    """Name what takes a range: routes of this machine, and networks that each of these engines has."""
    whole = IPv4Network(within)
    obstacles = [f"a route of this machine to {each}" for each in routed]
    for engine, networks in held.items():
        obstacles += [f"the network {each} of {engine}" for each in networks if each.overlaps(whole)]
    more = f" and {len(obstacles) - _NAMED} more" if len(obstacles) > _NAMED else ""
    return f"{within} is taken by {', '.join(obstacles[:_NAMED])}{more}"


def make_network(
    client: docker.DockerClient,
    run: str,
    kind: str,
    pools: Iterable[IPAMPool | None],
    title: str,
    complaint: str,
    **settings: Any,
) -> None:
    """Make a network of a run in the first of these pools that nobody takes meanwhile; None is the engine's choice.

    Raises HostError where the engine refuses, or with the ``complaint`` where there is no pool.
    """
    name = network_name(run, kind)
    complaints = [complaint]
    for pool in pools:
        ipam = None if pool is None else IPAMConfig(pool_configs=[pool])
        try:
            client.api.create_network(name, ipam=ipam, labels={RUN: run}, check_duplicate=True, **settings)
        except APIError as error:
            refusal = str(error.explanation)
            if "already exists" in refusal:  # the first try of a request that was repeated
                return
            if pool is None:
                complaints.append(f"the engine's own address pools: {refusal}")
                break
            complaints = [refusal]
            if not any(word in refusal for word in _TAKEN):
                break
            continue  # another run took it between our look and our request
        return
    key = "subnet" if kind == "data" else "control_subnet"
    raise HostError(f"{title} cannot be made ({'; '.join(complaints)}): choose a free range by network.{key}")


def subnet_of(client: docker.DockerClient, run: str, kind: str) -> IPv4Network:
    """Return the subnet of a network of a run; raises docker's NotFound where it has no such network.

    A swarm allots the subnet of an overlay network a moment after the network was made; HostError where it does not.
    """
    deadline = time.monotonic() + _ALLOTTED_WITHIN
    while True:
        pools = client.api.inspect_network(network_name(run, kind))["IPAM"]["Config"]
        if pools:
            return IPv4Network(pools[0]["Subnet"])
        if time.monotonic() > deadline:
            raise HostError(f"the engine gave the network {network_name(run, kind)} no subnet: is its swarm healthy?")
        time.sleep(0.1)


def subnets(client: docker.DockerClient) -> list[IPv4Network]:
    """Return the subnets that networks of the engine have."""
    configurations = (each for network in client.api.networks() for each in network["IPAM"]["Config"] or ())
    return [IPv4Network(each["Subnet"]) for each in configurations if ":" not in each.get("Subnet", ":")]
