"""The two networks of a run: one for the controller, one for data, whose links are shaped."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

import docker
from docker.errors import APIError
from docker.types import IPAMConfig, IPAMPool

from controller.lab.addresses import DEFAULT_RANGE, free_subnets, host_routes
from controller.lab.removal import RUN
from testbed.common.errors import HostError

CLOSED = {
    "com.docker.network.bridge.enable_icc": "false",
    "com.docker.network.bridge.enable_ip_masquerade": "false",
}
"""Options of the control network: nobody but the controller is to be reached over it, and nothing beyond it."""


def network_name(run: str, kind: str) -> str:
    """Return what a network of a run is called; ``kind`` is control or data."""
    return f"testbed-{run}-{kind}"


def make_networks(client: docker.DockerClient, run: str, within: str, devices: int) -> IPv4Network:
    """Make the control and the data network; return the subnet of the latter."""
    subnet = _make_network(client, run, "data", within, devices, internal=True)
    try:
        _make_network(client, run, "control", DEFAULT_RANGE, devices + 1, options=CLOSED)
    except HostError:
        # Without br_netfilter the engine cannot keep containers of one bridge apart; the devices' walls do.
        _make_network(client, run, "control", DEFAULT_RANGE, devices + 1)
    return subnet


def _make_network(
    client: docker.DockerClient, run: str, kind: str, within: str, devices: int, **settings: Any
) -> IPv4Network:
    taken = [*host_routes(), *subnets(client)]
    complaint = f"every subnet of {within} that would do is taken"
    for subnet in free_subnets(within, devices, taken):
        pool = IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet))])
        try:
            client.api.create_network(
                network_name(run, kind), "bridge", ipam=pool, labels={RUN: run}, check_duplicate=True, **settings
            )
        except APIError as error:
            complaint = str(error.explanation)
            if "already exists" in complaint:  # the first try of a request that was repeated
                made = client.api.inspect_network(network_name(run, kind))
                return IPv4Network(made["IPAM"]["Config"][0]["Subnet"])
            if "overlaps" not in complaint and "conflict" not in complaint:
                break
            continue  # another run took it between our look and our request
        return subnet
    raise HostError(
        f"the {kind} network cannot be made ({complaint}): remove old runs with 'testbed down --all' or give the "
        "scenario another network.subnet"
    )


def subnets(client: docker.DockerClient) -> list[IPv4Network]:
    """Return the subnets that networks of the engine have."""
    configurations = (each for network in client.api.networks() for each in network["IPAM"]["Config"] or ())
    return [IPv4Network(each["Subnet"]) for each in configurations if ":" not in each.get("Subnet", ":")]
