"""The containers of a run: how they are set up, made, found, and what they wrote."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import APIError, NotFound
from docker.types import DeviceRequest, EndpointConfig, HostConfig, LogConfig, Mount

from testbed.common.errors import HostError, InputError
from testbed.common.logs import LEVEL
from testbed.hardware import DeviceSpec
from testbed.network.checks import SHAPER
from testbed.wire.ports import CONTROL_PORT
from testbed.wire.token import LEASE
from testbed_controller.lab.networks import network_name
from testbed_controller.lab.removal import ADDRESS, DEVICE, ROLE, RUN, labelled_runs
from testbed_controller.lab.runstate import RunState
from testbed_controller.shaping.backend import environment_for

SHAPER_CAPABILITIES = ["NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE", "SYS_NICE"]
"""To configure networks, to enter the devices' namespaces (two of them), and to be scheduled in time."""

SHAPER_MEMORY = 2 << 30
"""Bytes; packets that wait in its queues are most of it."""

_SYSCTLS = {
    # A link that idles between two batches would else start slowly again, which is no property of the link.
    "net.ipv4.tcp_slow_start_after_idle": "0",
    # Windows large enough for 1 Gbit/s over 100 ms each way: the usual 6 MB, and not the link, would set the pace.
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 16384 67108864",
}

_LOGS = LogConfig(type=LogConfig.types.JSON, config={"max-size": "10m", "max-file": "2"})

_LOG = logging.getLogger(__name__)

ControlUrl = Callable[[str, Mapping[str, Any]], str]
"""Takes the name of a device or the shaper and its container as inspected, and returns where its control port is
reached from here; empty when it is not."""


@dataclass(frozen=True)
class DeviceContainer:
    """A device's container as last seen."""

    name: str
    id: str
    address: str
    """On the data network; the same for the whole run."""
    state: str
    """The engine's word: created, running, paused, exited; or gone, or lost with its host."""
    pid: int = 0
    """In the engine's process namespace; 0 when it does not run."""
    control_url: str = ""
    """Reachable from the controller only; another one after each start, empty when it does not run."""


@dataclass
class RunningContainer:
    """One container of some run, as the engine lists it."""

    run: str
    name: str
    state: str
    since: str
    """In the engine's words, e.g. 'Up 3 minutes'."""
    address: str
    control_url: str = ""


def running_labs(client: docker.DockerClient) -> dict[str, list[RunningContainer]]:
    """Return every run that the engine holds something of, with its containers; anybody's, not only this user's."""
    found: dict[str, list[RunningContainer]] = {run: [] for run in sorted(labelled_runs(client))}
    urls: dict[str, str] = {}
    for each in client.api.containers(all=True, filters={"label": RUN}):
        labels = each["Labels"]
        run, name = str(labels[RUN]), labels.get(DEVICE) or labels.get(ROLE, "?")
        container = RunningContainer(run, name, each["State"], each["Status"], labels.get(ADDRESS, ""))
        found.setdefault(run, []).append(container)
        for port in each["Ports"]:
            if port.get("PublicPort"):
                urls[run] = f"http://127.0.0.1:{port['PublicPort']}"
    for run, containers in found.items():
        containers.sort(key=lambda container: container.name)
        if run in urls:
            _note_urls(containers, urls[run])
    return found


def _note_urls(containers: list[RunningContainer], shaper: str) -> None:
    for each in containers:
        if each.state == "running":
            each.control_url = shaper if each.name == SHAPER else device_url(shaper, each.name)


def container_logs(client: docker.DockerClient, run: str, name: str, *, follow: bool = False) -> Iterator[bytes]:
    """Yield what a device's container (or `shaper`) has written, piece by piece; with ``follow`` until it ends.

    Raises InputError where there is no such container, or no longer.
    """
    try:
        yield from client.api.logs(container_name(run, name), stream=True, follow=follow)
    except NotFound:
        raise InputError(f"there is no container of {name} in {run}, and so no log: see 'testbed ps'") from None


def container_name(run: str, name: str) -> str:
    """Return what the container of a device, or of the shaper, is called."""
    return f"testbed-{run}-{name}"


def device_url(shaper: str, name: str) -> str:
    """Return where the shaper at a URL leads on to a device."""
    return f"{shaper}/devices/{name}"


def published_url(found: Mapping[str, Any]) -> str:
    """Return where an inspected container's control port is published; empty when it is not."""
    bindings = (found["NetworkSettings"]["Ports"] or {}).get(f"{CONTROL_PORT}/tcp")
    return f"http://127.0.0.1:{bindings[0]['HostPort']}" if bindings else ""


def look(client: docker.DockerClient, run: str, name: str, address: str, url: ControlUrl) -> DeviceContainer:
    """Return a container as it is now; in state `gone` where there is none. ``url`` says how it is reached."""
    try:
        found = client.api.inspect_container(container_name(run, name))
    except NotFound:
        return DeviceContainer(name, container_name(run, name), address, "gone")
    status = found["State"]
    return DeviceContainer(name, found["Id"], address, status["Status"], status["Pid"], url(name, found))


def device_settings(state: RunState, image: str, spec: DeviceSpec, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a device's container, as the engine takes them; it knows the addresses of all devices."""
    memory = int(spec.memory)
    settings = container_settings(
        state,
        image,
        {DEVICE: spec.name, ADDRESS: addresses[spec.name]},
        {"TESTBED_DEVICE": spec.name, "TESTBED_TOKEN": state.token_of(spec.name), "OMP_NUM_THREADS": "1"},
        tmpfs={"/tmp": "size=64m,mode=1777"},
        mounts=[Mount("/state", None, type="volume", labels={RUN: state.run, DEVICE: spec.name})],
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=256,
        nano_cpus=None if spec.cpus is None else int(spec.cpus * 1e9),
        sysctls=_SYSCTLS,
        device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if spec.gpu else None,
        extra_hosts=dict(addresses),
        # On one host the shaper makes the network: what the engine has for that takes most of a container's start.
        network_mode=network_name(state.run, "data") if state.hosts else "none",
    )
    if state.hosts:
        # A worker's engine knows the overlay network only once a container is started there: none can be connected.
        endpoint = EndpointConfig(DEFAULT_DOCKER_API_VERSION, aliases=[spec.name], ipv4_address=addresses[spec.name])
        settings["networking_config"] = {"EndpointsConfig": {network_name(state.run, "data"): endpoint}}
    return {**settings, "hostname": spec.name}


def shaper_settings(state: RunState, image: str, links: str) -> dict[str, Any]:
    """Return the settings of the shaper's container; ``links`` names the link backend."""
    return container_settings(
        state,
        image,
        {ROLE: SHAPER},
        {"TESTBED_TOKEN": state.token_of(SHAPER), "TESTBED_LINKS": links, **environment_for([links])},
        tmpfs={"/tmp": "size=64m,mode=1777", "/run": "size=16m,mode=755"},
        mem_limit=SHAPER_MEMORY,
        memswap_limit=SHAPER_MEMORY,
        pids_limit=1024,
        cap_add=SHAPER_CAPABILITIES,
        pid_mode="host",
        # On several hosts there is no control network: the keepers enter the containers' own loopback.
        **({"network_mode": "none"} if state.hosts else _published(state.run)),
    ) | ({} if state.hosts else {"ports": [CONTROL_PORT]})


def _published(run: str) -> dict[str, Any]:
    return {"network_mode": network_name(run, "control"), "port_bindings": {CONTROL_PORT: ("127.0.0.1", None)}}


def container_settings(
    state: RunState,
    image: str,
    labels: dict[str, str],
    environment: dict[str, str],
    **host: Any,
) -> dict[str, Any]:
    """Return what all containers have in common, with what the caller adds for its own, as the engine takes it."""
    return {
        "image": image,
        "labels": {RUN: state.run, **labels},
        "environment": {
            "TESTBED_RUN": state.run,
            **({} if state.lease is None else {LEASE: f"{state.lease:g}"}),
            **({LEVEL: "debug"} if _LOG.isEnabledFor(logging.DEBUG) else {}),
            **environment,
        },
        "host_config": HostConfig(
            version=DEFAULT_DOCKER_API_VERSION,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            **({"log_config": _LOGS} | host),
        ),
    }


def make_container(client: docker.DockerClient, run: str, name: str, settings: dict[str, Any]) -> None:
    """Create and start a container. Its name is fixed: a request that is retried meets its first try.

    Raises `HostError` where the engine refuses.
    """
    title = container_name(run, name)
    try:
        client.api.create_container(name=title, use_config_proxy=False, **settings)
    except APIError as error:
        if error.status_code != 409:
            raise HostError(f"the container of {name} cannot be made: {error.explanation}") from error
    try:
        client.api.start(title)
    except APIError as error:
        raise HostError(f"the container of {name} cannot be started: {error.explanation}") from error
