"""Provision of hosts for a run: images, a keeper, and a common network.

Images are built on one engine and copied over the docker contexts to all hosts that lack them. The controller reaches
the containers of a host through one of them, the keeper, so the run needs no control network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from testbed_controller.hosts.inside.keeper import ENGINE_SOCKET
from testbed_controller.lab.containers import (
    container_name,
    container_settings,
    make_container,
)
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
"""Name and role of the keeper's container."""
LEASE_SECONDS = 15.0
"""Time without contact to the controller after which a host's keeper removes the run there, in seconds."""
MTU = 1450
"""Maximum packet size in a VXLAN over Ethernet, in bytes."""
_KEEPER_MEMORY = 256 << 20
"""Memory limit of the keeper in bytes."""
_REPORT_BYTES = 200 << 20
"""Amount of copied data between two progress reports, in bytes."""


def copy_images(
    source: docker.DockerClient, hosts: Iterable[Host], tags: Iterable[str], say: Say
) -> None:
    """Copy missing images with the given tags to all hosts, several hosts at once.

    Raises HostError if a host refuses.
    """
    distinct_tags = sorted(set(tags))
    with ThreadPoolExecutor(8) as pool:
        copy = partial(_copy_to_host, source, tags=distinct_tags, say=say)
        list(pool.map(copy, hosts))


def _copy_to_host(
    source: docker.DockerClient, host: Host, tags: list[str], say: Say
) -> None:
    missing_tags = [tag for tag in tags if not image_exists(host.client, tag)]
    if not missing_tags:
        return
    # An upper bound, since the size of each image includes the layers that it shares with others.
    size = sum(int(source.images.get(tag).attrs["Size"]) for tag in missing_tags)
    say(f"{host.name}: copying {', '.join(missing_tags)} ({format_size(size)} at most)")
    try:
        # A single archive transfers shared layers only once. docker-py saves single images only.
        url = f"{source.api.base_url}/v{source.api.api_version}/images/get"
        names = {"names": missing_tags}
        with source.api.get(url, params=names, stream=True, timeout=600) as response:
            response.raise_for_status()
            archive = _report_progress(response.iter_content(1 << 20), host.name, say)
            host.client.images.load(archive)  # type: ignore[arg-type]
    except (APIError, DockerException, requests.RequestException) as error:
        reason = str(getattr(error, "explanation", error))
        text = f"{host.name}: the engine refused the images ({reason})"
        if "no space left" in reason:
            text += f": free some space with 'docker --context {host.name} system prune', or use a larger disk"
        raise HostError(text) from error


def _report_progress(pieces: Iterable[bytes], host: str, say: Say) -> Iterator[bytes]:
    """Yield all pieces unchanged, and report their total size every `_REPORT_BYTES` bytes."""
    total = 0
    reported = 0
    for piece in pieces:
        total += len(piece)
        if total - reported >= _REPORT_BYTES:
            reported = total
            say(f"{host}: copied {format_size(total)}")
        yield piece


def make_overlay(
    manager: Host, hosts: Iterable[Host], run: str, within: str, devices: int
) -> IPv4Network:
    """Create a run's overlay network for a number of devices; return the subnet, chosen from the range ``within``.

    The devices use the first half of the subnet; each engine takes an address from the second. Raises HostError if the
    manager refuses, or if every subnet is taken on a host.
    """
    routed = host_routes(within)
    host_subnets = {host.name: subnets(host.client) for host in hosts}
    taken = [*routed, *chain.from_iterable(host_subnets.values())]
    obstacles = describe_obstacles(within, routed, host_subnets)
    # An internal network has no route to the outside. Containers can join only an attachable overlay network, since by
    # default an overlay accepts swarm services alone.
    settings = {"driver": "overlay", "internal": True, "attachable": True}
    pools = _halved_pools(free_subnets(within, 2 * devices + 4, taken))
    title = f"{manager.name}: the overlay network"
    make_network(manager.client, run, "data", pools, title, obstacles, **settings)
    return subnet_of(manager.client, run, "data")


def _halved_pools(subnets: Iterable[IPv4Network]) -> Iterator[IPAMPool]:
    """Yield each subnet as a pool in which the engines choose addresses from the second half only."""
    for subnet in subnets:
        _, second_half = subnet.subnets()
        yield IPAMPool(subnet=str(subnet), iprange=str(second_half))


def make_keeper(host: Host, state: RunState, image: str) -> str:
    """Create and start a run's keeper on a host; return the name of the container."""
    lease = {} if state.lease is None else {LEASE: f"{LEASE_SECONDS:g}"}
    settings = container_settings(
        state,
        image,
        {ROLE: KEEPER},
        lease,
        # The keeper ends after it has removed the run. On a host without contact to the controller, only the engine can
        # then remove the keeper.
        auto_remove=True,
        # These capabilities allow entering the containers' network namespaces, and real-time scheduling.
        cap_add=["SYS_ADMIN", "SYS_PTRACE", "SYS_NICE"],
        log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "1m"}),
        mem_limit=_KEEPER_MEMORY,
        # The keeper needs no network: an exec of the engine carries its connection to the controller, and the mounted
        # socket its requests to the engine.
        mounts=[Mount(ENGINE_SOCKET, host.socket, type="bind")],
        network_mode="none",
        pid_mode="host",
        pids_limit=256,
        tmpfs={"/tmp": "size=16m", "/run": "size=1m,mode=755"},
    )
    settings["command"] = ["python3", "-m", "testbed_controller.hosts.inside.keeper"]
    make_container(host.client, state.run, KEEPER, settings)
    return container_name(state.run, KEEPER)
