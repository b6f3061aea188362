"""The data network of a run over several hosts: an overlay of their swarm. There is no control network."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network

from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

from controller.hosts.contexts import Host
from controller.lab.addresses import free_subnets, host_routes
from controller.lab.networks import network_name, subnets
from controller.lab.removal import RUN
from testbed.common.errors import HostError

MTU = 1450
"""Bytes of a packet in a VXLAN over Ethernet."""


def make_overlay(manager: Host, hosts: Iterable[Host], run: str, within: str, devices: int) -> IPv4Network:
    """Make a run's overlay network; return its subnet.

    The first half is the devices'; each engine takes an address for itself out of the second. Raises HostError where
    the manager refuses, or every subnet is taken on one of the hosts.
    """
    there = [(each, host.name) for host in hosts for each in subnets(host.client)]
    taken = [*host_routes(), *(each for each, _ in there)]
    where = [f"{each} on {host}" for each, host in there if each.overlaps(IPv4Network(within))]
    complaint = f"every subnet of {within} that would do is taken: {', '.join(where) or 'by routes of this machine'}"
    for subnet in free_subnets(within, 2 * devices + 4, taken):
        first, second = subnet.subnets(prefixlen_diff=1)
        pool = IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet), iprange=str(second))])
        try:
            manager.client.api.create_network(
                network_name(run, "data"),
                "overlay",
                ipam=pool,
                labels={RUN: run},
                check_duplicate=True,
                internal=True,
                attachable=True,
            )
        except APIError as error:
            complaint = str(error.explanation)
            if "overlap" not in complaint and "conflict" not in complaint:
                break
            continue
        assert first.num_addresses > devices + 2
        return subnet
    raise HostError(
        f"{manager.name}: the overlay network cannot be made ({complaint}): remove old runs with 'testbed down', or "
        "give the scenario another network.subnet"
    )
