"""What a run over several hosts needs of each: the images, a keeper through which it is reached, and one network.

Images are built on one engine and brought to the others over their contexts, as far as they lack them. There is no
control network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from itertools import chain

import docker
import requests
from docker.errors import APIError, DockerException
from docker.types import IPAMPool, LogConfig, Mount

from testbed.common.errors import HostError
from testbed.common.quantities import format_size
from testbed.wire.token import LEASE
from testbed_controller.hosts.contexts import Host
from testbed_controller.hosts.inside.keeper import ENGINE
from testbed_controller.lab.containers import container_name, container_settings, make_container
from testbed_controller.lab.engine import Say
from testbed_controller.lab.images import image_exists
from testbed_controller.lab.networks import (
    describe_obstacles,
    free_subnets,
    host_routes,
    make_network,
    subnet_of,
    subnets,
)
from testbed_controller.lab.removal import ROLE
from testbed_controller.lab.runstate import RunState

KEEPER = "keeper"
LEASE_SECONDS = 15.0
"""How long a host keeps what a run has there, when it does not hear of the controller."""
MTU = 1450
"""Bytes of a packet in a VXLAN over Ethernet."""
_MEMORY = 256 << 20
"""Bytes."""
_SAID = 200 << 20
"""Bytes between two reports of how far it is."""


def bring(source: docker.DockerClient, hosts: Iterable[Host], tags: Iterable[str], say: Say) -> None:
    """Return when every host has these images; several hosts at once.

    Raises HostError where one cannot take them.
    """
    wanted = sorted(set(tags))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda host: _bring(source, host, wanted, say), hosts))


def _bring(source: docker.DockerClient, host: Host, tags: list[str], say: Say) -> None:
    lacking = [tag for tag in tags if not image_exists(host.client, tag)]
    if not lacking:
        return
    size = sum(int(source.images.get(tag).attrs["Size"]) for tag in lacking)
    say(f"{host.name}: bringing {', '.join(lacking)} ({format_size(size)} at most)")
    try:
        # One archive: layers that images share travel once.
        url = f"{source.api.base_url}/v{source.api.api_version}/images/get"
        with source.api.get(url, params={"names": lacking}, stream=True, timeout=600) as response:
            response.raise_for_status()
            found = _counted(response.iter_content(1 << 20), host.name, say)
            host.client.images.load(found)  # type: ignore[arg-type]
    except (APIError, DockerException, requests.RequestException) as error:
        said = str(getattr(error, "explanation", error))
        room = f": make room there, by 'docker --context {host.name} system prune' or a larger disk"
        full = "no space left" in said
        raise HostError(f"{host.name}: it does not take the images ({said}){room if full else ''}") from error


def _counted(pieces: Iterable[bytes], host: str, say: Say) -> Iterator[bytes]:
    """Yield what comes, and say how much it was."""
    total = said = 0
    for piece in pieces:
        total += len(piece)
        if total - said >= _SAID:
            said = total
            say(f"{host}: {format_size(total)} brought")
        yield piece


def make_overlay(manager: Host, hosts: Iterable[Host], run: str, within: str, devices: int) -> IPv4Network:
    """Make a run's overlay network; return its subnet.

    The first half is the devices'; each engine takes an address for itself out of the second. Raises HostError where
    the manager refuses, or every subnet is taken on one of the hosts.
    """
    routed = host_routes(within)
    held = {host.name: subnets(host.client) for host in hosts}
    taken = [*routed, *chain.from_iterable(held.values())]
    free = free_subnets(within, 2 * devices + 4, taken)
    pools = (IPAMPool(subnet=str(each), iprange=str([*each.subnets()][1])) for each in free)
    complaint = describe_obstacles(within, routed, held)
    settings = {"driver": "overlay", "internal": True, "attachable": True}
    make_network(manager.client, run, "data", pools, f"{manager.name}: the overlay network", complaint, **settings)
    return subnet_of(manager.client, run, "data")


def make_keeper(host: Host, state: RunState, image: str) -> str:
    """Make and start the keeper of a run on a host; return the name of its container."""
    lease = {} if state.lease is None else {LEASE: f"{LEASE_SECONDS:g}"}
    settings = {
        **container_settings(
            state,
            image,
            {ROLE: KEEPER},
            lease,
            auto_remove=True,
            # To enter the containers' network namespaces, and to be scheduled in time.
            cap_add=["SYS_ADMIN", "SYS_PTRACE", "SYS_NICE"],
            log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "1m"}),
            mem_limit=_MEMORY,
            mounts=[Mount(ENGINE, host.socket, type="bind")],
            network_mode="none",
            pid_mode="host",
            pids_limit=256,
            tmpfs={"/tmp": "size=16m", "/run": "size=1m,mode=755"},
        ),
        "command": ["python3", "-m", "testbed_controller.hosts.inside.keeper"],
    }
    make_container(host.client, state.run, KEEPER, settings)
    return container_name(state.run, KEEPER)
