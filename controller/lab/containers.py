"""The containers of a run: how they are set up, made, found, and what they wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import docker
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import APIError, NotFound
from docker.types import DeviceRequest, EndpointConfig, HostConfig, LogConfig, Mount

from controller.lab.networks import network_name
from controller.lab.removal import DEVICE, ROLE, RUN, labelled_runs
from controller.lab.runstate import RunState
from testbed.common.errors import HostError, InputError
from testbed.hardware import DeviceSpec
from testbed.network.checks import SHAPER
from testbed.wire.ports import CONTROL_PORT, DATA_PORT
from testbed.wire.token import LEASE

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


ControlUrl = Callable[[Mapping[str, Any]], str]
"""Takes an inspected container, and returns where its control port is reached from here; empty when it is not."""


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


@dataclass(frozen=True)
class RunningContainer:
    """One container of some run, as the engine lists it."""

    run: str
    name: str
    state: str
    since: str
    """In the engine's words, e.g. 'Up 3 minutes'."""
    address: str
    control_url: str


def running_labs(client: docker.DockerClient) -> dict[str, list[RunningContainer]]:
    """Return every run that the engine holds something of, with its containers; anybody's, not only this user's."""
    found: dict[str, list[RunningContainer]] = {run: [] for run in sorted(labelled_runs(client))}
    for each in client.api.containers(all=True, filters={"label": RUN}):
        run, labels = str(each["Labels"][RUN]), each["Labels"]
        networks = each["NetworkSettings"]["Networks"]
        data = networks.get(network_name(run, "data"), {})
        ports = [port["PublicPort"] for port in each["Ports"] if port.get("PublicPort")]
        found.setdefault(run, []).append(
            RunningContainer(
                run=run,
                name=labels.get(DEVICE) or labels.get(ROLE, "?"),
                state=each["State"],
                since=each["Status"],
                # A container that is down keeps its place in the network's settings, not in its own.
                address=data.get("IPAddress") or (data.get("IPAMConfig") or {}).get("IPv4Address", ""),
                control_url=f"http://127.0.0.1:{ports[0]}" if ports else "",
            )
        )
    for containers in found.values():
        containers.sort(key=lambda container: container.name)
    return found


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


def control_url(found: Mapping[str, Any]) -> str:
    """Return where an inspected container's control port is published; empty when it is not."""
    bindings = (found["NetworkSettings"]["Ports"] or {}).get(f"{CONTROL_PORT}/tcp")
    return f"http://127.0.0.1:{bindings[0]['HostPort']}" if bindings else ""


def look(
    client: docker.DockerClient, run: str, name: str, address: str, url: ControlUrl = control_url
) -> DeviceContainer:
    """Return a container as it is now; in state `gone` where there is none. ``url`` says how it is reached."""
    try:
        found = client.api.inspect_container(container_name(run, name))
    except NotFound:
        return DeviceContainer(name, container_name(run, name), address, "gone")
    status = found["State"]
    return DeviceContainer(name, found["Id"], address, status["Status"], status["Pid"], url(found))


def device_settings(state: RunState, image: str, spec: DeviceSpec, addresses: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a device's container, as the engine takes them; it knows the addresses of all devices."""
    memory = int(spec.memory)
    settings = container_settings(
        state,
        image,
        {DEVICE: spec.name},
        {
            "TESTBED_DEVICE": spec.name,
            "TESTBED_TOKEN": state.token_of(spec.name),
            "TESTBED_DATA_ADDRESS": f"{addresses[spec.name]}:{DATA_PORT}",
            **({"TESTBED_CONTROL_ADDRESS": f"127.0.0.1:{CONTROL_PORT}"} if state.hosts else {}),
            "OMP_NUM_THREADS": "1",
        },
        tmpfs={"/tmp": "size=64m,mode=1777"},
        mounts=[Mount("/state", None, type="volume", labels={RUN: state.run, DEVICE: spec.name})],
        mem_limit=memory,
        memswap_limit=memory,
        pids_limit=256,
        nano_cpus=None if spec.cpus is None else int(spec.cpus * 1e9),
        sysctls=_SYSCTLS,
        device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if spec.gpu else None,
        # Before what the engine answers, which is the control network's: closed to other devices.
        extra_hosts=dict(addresses),
        **({"network_mode": network_name(state.run, "data")} if state.hosts else {}),
    )
    if state.hosts:
        # A worker's engine knows the overlay network only once a container is started there: none can be connected.
        endpoint = EndpointConfig(DEFAULT_DOCKER_API_VERSION, aliases=[spec.name], ipv4_address=addresses[spec.name])
        settings["networking_config"] = {"EndpointsConfig": {network_name(state.run, "data"): endpoint}}
    return {**settings, "hostname": spec.name}


def shaper_settings(state: RunState, image: str, links: str) -> dict[str, Any]:
    """Return the settings of the shaper's container; ``links`` is the backend: auto, netem or userspace."""
    return container_settings(
        state,
        image,
        {ROLE: SHAPER},
        {"TESTBED_TOKEN": state.token_of(SHAPER), "TESTBED_LINKS": links},
        tmpfs={"/tmp": "size=64m,mode=1777", "/run": "size=16m,mode=755"},
        mem_limit=SHAPER_MEMORY,
        memswap_limit=SHAPER_MEMORY,
        pids_limit=1024,
        cap_add=SHAPER_CAPABILITIES,
        pid_mode="host",
        **({"network_mode": "none"} if state.hosts else {}),
    )


def container_settings(
    state: RunState,
    image: str,
    labels: dict[str, str],
    environment: dict[str, str],
    **host: Any,
) -> dict[str, Any]:
    """Return what all containers have in common, with what the caller adds for its own, as the engine takes it."""
    # On several hosts there is no control network: the keepers enter the containers' own loopback.
    published = "network_mode" not in host
    return {
        "image": image,
        "labels": {RUN: state.run, **labels},
        "environment": {
            "TESTBED_RUN": state.run,
            **({} if state.lease is None else {LEASE: f"{state.lease:g}"}),
            **environment,
        },
        **({"ports": [CONTROL_PORT]} if published else {}),
        "host_config": HostConfig(
            version=DEFAULT_DOCKER_API_VERSION,
            port_bindings={CONTROL_PORT: ("127.0.0.1", None)} if published else None,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            **({"network_mode": network_name(state.run, "control"), "log_config": _LOGS} | host),
        ),
    }


def make_container(
    client: docker.DockerClient,
    run: str,
    name: str,
    settings: dict[str, Any],
    address: str | None,
    url: ControlUrl = control_url,
) -> DeviceContainer:
    """Create, connect and start a container. Its name is fixed: a request that is retried meets its first try.

    Raises `HostError` where the engine refuses.
    """
    title = container_name(run, name)
    try:
        client.api.create_container(name=title, **settings)
    except APIError as error:
        if error.status_code != 409:
            raise HostError(f"the container of {name} cannot be made: {error.explanation}") from error
    try:
        if address is not None and "networking_config" not in settings:
            network = network_name(run, "data")
            try:
                client.api.connect_container_to_network(title, network, ipv4_address=address, aliases=[name])
            except APIError as error:
                if "already exists" not in str(error.explanation):  # as above
                    raise
        client.api.start(title)
    except APIError as error:
        raise HostError(f"the container of {name} cannot be started: {error.explanation}") from error
    return look(client, run, name, address or "", url)
