"""Networks of a run: a control network of the engine, and a data network created by the shaper; their addresses."""

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
from testbed.network.checks import has_room, no_room_text, prefix_for
from testbed_controller.lab.removal import RUN

DEFAULT_RANGE = "198.18.0.0/15"
"""Range reserved for benchmarks of networks (RFC 2544), hence free of users' networks."""
_MAX_OBSTACLES = 3
"""Maximum number of obstacles in a message."""
_TAKEN_TEXTS = ("overlap", "conflict", "already used")
"""Parts of engine errors about occupied subnets; the last is Podman's."""
_SUBNET_SECONDS = 10.0
"""Time for a swarm to assign a subnet to an overlay network, in seconds."""
CONTROL_OPTIONS = {"com.docker.network.bridge.enable_ip_masquerade": "false"}
"""Options of the control network, which must not lead beyond this host."""


def free_subnets(
    within: str, devices: int, used: Iterable[IPv4Network], key: str = "subnet"
) -> Iterator[IPv4Network]:
    """Yield the subnets of a range with room for the devices and without overlaps with ``used``, lowest first.

    Raises InputError, located at ``key`` of the scenario's network, if the range is too small.

    >>> taken = [IPv4Network("198.18.0.0/24")]
    >>> next(free_subnets("198.18.0.0/16", 5, taken))
    IPv4Network('198.18.1.0/24')
    """
    allowed_range = IPv4Network(within)
    if not has_room(allowed_range, devices):
        raise InputError(no_room_text(within, devices), ("network", key))
    prefix = max(prefix_for(devices), allowed_range.prefixlen)
    obstacles = [network for network in used if network.overlaps(allowed_range)]
    for subnet in allowed_range.subnets(new_prefix=prefix):
        if not any(subnet.overlaps(obstacle) for obstacle in obstacles):
            yield subnet


def device_addresses(
    subnet: IPv4Network, names: Sequence[str]
) -> dict[str, IPv4Address]:
    """Return the address of each device, in the order of the scenario.

    The first device has the third address of the subnet; the first two are not assigned to devices. Raises
    `HostError` if the subnet is too small.

    >>> device_addresses(IPv4Network("198.18.0.0/29"), ["source", "worker1"])["worker1"]
    IPv4Address('198.18.0.3')
    """
    first_address = int(subnet.network_address) + 2
    if first_address + len(names) > int(subnet.broadcast_address):
        raise HostError(f"{subnet} has no room for {len(names)} devices")
    addresses = {}
    for index, name in enumerate(names):
        addresses[name] = IPv4Address(first_address + index)
    return addresses


def host_routes(within: str) -> list[IPv4Network]:
    """Return the networks within a range with a route on the machine, in any routing table.

    A route to a wider network is not returned, such as those of a VPN for all addresses: the route of a network within
    the range is more specific and takes precedence. All routing tables are read, since a policy rule (``ip rule``) may
    give any of them precedence over the main table. Returns no networks on other systems than Linux.
    """
    if sys.platform != "linux":
        return []
    # Imported here: other commands start faster without pyroute2.
    from pyroute2 import IPRoute

    allowed_range = IPv4Network(within)
    with IPRoute() as kernel:
        routes = kernel.get_routes(family=AF_INET)
    networks = set()
    for route in routes:
        network = IPv4Network(
            (route.get("dst") or "0.0.0.0", route["dst_len"]), strict=False
        )
        if network.prefixlen >= allowed_range.prefixlen and network.overlaps(
            allowed_range
        ):
            networks.add(network)
    return sorted(networks)


def network_name(run: str, kind: str) -> str:
    """Return the name of a run's network; ``kind`` is control or data.

    >>> network_name("quickstart-0a1b2c3d", "control")
    'testbed-quickstart-0a1b2c3d-control'
    """
    return f"testbed-{run}-{kind}"


def data_subnet(within: str, devices: int) -> IPv4Network:
    """Return the subnet of a run's data network, which is isolated and created by the shaper.

    Raises InputError if the range is too small.
    """
    return next(free_subnets(within, devices, ()))


def make_control_network(
    client: docker.DockerClient, run: str, within: str | None = None
) -> None:
    """Create the network over which the controller reaches the shaper.

    Its subnet comes from ``within``; by default from `DEFAULT_RANGE`, or from the engine's address pools if the range
    is occupied. Raises HostError if the network cannot be created.
    """
    allowed_range = within or DEFAULT_RANGE
    routed = host_routes(allowed_range)
    engine_subnets = subnets(client)
    used = [*routed, *engine_subnets]
    pools: list[IPAMPool | None] = []
    for subnet in free_subnets(allowed_range, 1, used, "control_subnet"):
        pools.append(IPAMPool(subnet=str(subnet)))
    # The engine may choose a subnet only if the user has not named a range.
    if within is None:
        pools.append(None)
    no_pool_text = describe_obstacles(
        allowed_range, routed, {"the engine": engine_subnets}
    )
    settings = {"driver": "bridge", "options": CONTROL_OPTIONS}
    title = "the control network"
    make_network(client, run, "control", pools, title, no_pool_text, **settings)


def describe_obstacles(
    within: str,
    routed: Iterable[IPv4Network],
    engine_networks: Mapping[str, Iterable[IPv4Network]],
) -> str:
    """Name the obstacles in a range: routes of this machine and networks of engines.

    >>> describe_obstacles("10.0.0.0/8", [IPv4Network("10.1.0.0/16")], {})
    '10.0.0.0/8 is taken by a route of this machine to 10.1.0.0/16'
    """
    allowed_range = IPv4Network(within)
    obstacles = [f"a route of this machine to {network}" for network in routed]
    for engine, networks in engine_networks.items():
        for network in networks:
            if network.overlaps(allowed_range):
                obstacles.append(f"the network {network} of {engine}")
    more = (
        f" and {len(obstacles) - _MAX_OBSTACLES} more"
        if len(obstacles) > _MAX_OBSTACLES
        else ""
    )
    return f"{within} is taken by {', '.join(obstacles[:_MAX_OBSTACLES])}{more}"


def make_network(
    client: docker.DockerClient,
    run: str,
    kind: str,
    pools: Iterable[IPAMPool | None],
    title: str,
    no_pool_text: str,
    **settings: Any,
) -> None:
    """Create a network of a run in the first free pool; None leaves the choice to the engine.

    Raises HostError if the engine refuses, or with ``no_pool_text`` if no pool is available.
    """
    name = network_name(run, kind)
    reasons = [no_pool_text]
    for pool in pools:
        ipam = None if pool is None else IPAMConfig(pool_configs=[pool])
        # Older engines allow several networks of one name, so a repeated request would create a second one.
        try:
            client.api.create_network(
                name, ipam=ipam, labels={RUN: run}, check_duplicate=True, **settings
            )
        except APIError as error:
            refusal = str(error.explanation)
            if "already exists" in refusal:  # created by an earlier try of the request
                return
            if pool is None:
                reasons.append(f"the engine's own address pools: {refusal}")
                break
            reasons = [refusal]
            if not any(word in refusal for word in _TAKEN_TEXTS):
                break
            continue  # another run has occupied the subnet in the meantime
        return
    key = "subnet" if kind == "data" else "control_subnet"
    raise HostError(
        f"cannot create {title} ({'; '.join(reasons)}): choose a free range with network.{key}"
    )


def subnet_of(client: docker.DockerClient, run: str, kind: str) -> IPv4Network:
    """Return the subnet of a run's network; raises docker's NotFound for a missing network.

    A swarm assigns the subnet of an overlay network with a delay; raises HostError after a time-out.
    """
    deadline = time.monotonic() + _SUBNET_SECONDS
    while True:
        pools = client.api.inspect_network(network_name(run, kind))["IPAM"]["Config"]
        if pools:
            return IPv4Network(pools[0]["Subnet"])
        if time.monotonic() > deadline:
            raise HostError(
                f"the engine assigned no subnet to {network_name(run, kind)}: check its swarm with 'docker node ls'"
            )
        time.sleep(0.1)


def subnets(client: docker.DockerClient) -> list[IPv4Network]:
    """Return the subnets of the engine's networks."""
    networks = []
    for network in client.api.networks():
        for configuration in network["IPAM"]["Config"] or ():
            subnet = configuration.get("Subnet", ":")
            if ":" not in subnet:  # no IPv6
                networks.append(IPv4Network(subnet))
    return networks
