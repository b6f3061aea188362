"""Containers of a run: settings, creation, look-up and logs."""

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
"""Capabilities of the shaper: `NET_ADMIN` to configure networks, `NET_RAW` to send duplicates of packets, `SYS_ADMIN`
and `SYS_PTRACE` to enter the devices' namespaces, and `SYS_NICE` for real-time scheduling."""

SHAPER_MEMORY = 2 << 30
"""Memory limit of the shaper in bytes; its packet queues take most of it."""

_SYSCTLS = {
    # Without slow start after idle periods, since such a period between two batches must not reduce the rate of a link.
    "net.ipv4.tcp_slow_start_after_idle": "0",
    # Minimum, default and maximum of a window in bytes. At 1 Gbit/s over 100 ms each way, 25 MB are in flight: they fit
    # into 64 MiB, but the default maximum of 6 MB would limit the rate instead of the link.
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 16384 67108864",
}

_TMP_OPTIONS = "size=64m,mode=1777"
"""Options of the file system of ``/tmp``, which is in memory: 64 MiB at most, writable by every user."""
_MAX_DEVICE_TASKS = 256
"""Maximum number of processes and threads of a device."""
_MAX_SHAPER_TASKS = 1024
"""Maximum number of processes and threads of the shaper."""

_LOGS = LogConfig(
    type=LogConfig.types.JSON, config={"max-size": "10m", "max-file": "2"}
)

_LOG = logging.getLogger(__name__)

ControlUrl = Callable[[str, Mapping[str, Any]], str]
"""Returns the URL at which the controller reaches a container, from the container's name and inspection; empty if
unreachable."""


@dataclass(frozen=True)
class DeviceContainer:
    """The last known state of a device's container."""

    name: str
    id: str
    address: str
    """Address in the data network; constant for the whole run."""
    state: str
    """State as reported by the engine (created, running, paused, exited), or gone, or lost with its host."""
    pid: int = 0
    """Process ID in the engine's namespace; 0 if not running."""
    control_url: str = ""
    """URL reachable from the controller only; changes with each start, empty if not running."""


@dataclass
class ListedContainer:
    """A container of any run in any state, as listed by the engine."""

    run: str
    name: str
    state: str
    since: str
    """Uptime as reported by the engine, such as 'Up 3 minutes'."""
    address: str
    control_url: str = ""


def running_labs(client: docker.DockerClient) -> dict[str, list[ListedContainer]]:
    """Return the containers on the engine by run, including runs of other users and containers in any state.

    A lab without an active run also has a run ID, and is included.
    """
    # A run without containers may still have networks or volumes, and is listed without containers.
    labs: dict[str, list[ListedContainer]] = {}
    for run in sorted(labelled_runs(client)):
        labs[run] = []
    urls: dict[str, str] = {}
    for entry in client.api.containers(all=True, filters={"label": RUN}):
        labels = entry["Labels"]
        run = str(labels[RUN])
        name = labels.get(DEVICE) or labels.get(ROLE, "?")
        container = ListedContainer(
            run, name, entry["State"], entry["Status"], labels.get(ADDRESS, "")
        )
        labs.setdefault(run, []).append(container)
        for port in entry["Ports"]:
            # Only the control port of a shaper is published.
            if port.get("PublicPort"):
                urls[run] = f"http://127.0.0.1:{port['PublicPort']}"
    for run, containers in labs.items():
        containers.sort(key=lambda container: container.name)
        if run in urls:
            _set_control_urls(containers, urls[run])
    return labs


def _set_control_urls(containers: list[ListedContainer], shaper: str) -> None:
    for container in containers:
        if container.state != "running":
            continue
        if container.name == SHAPER:
            container.control_url = shaper
        else:
            container.control_url = device_url(shaper, container.name)


def container_logs(
    client: docker.DockerClient, run: str, name: str, *, follow: bool = False
) -> Iterator[bytes]:
    """Yield the output of a device's container, or the shaper's, in pieces; ``follow`` waits for further output.

    Raises InputError if the container does not exist.
    """
    try:
        yield from client.api.logs(
            container_name(run, name), stream=True, follow=follow
        )
    except NotFound:
        raise InputError(f"no container of {name} in {run}: see 'testbed ps'") from None


def container_name(run: str, name: str) -> str:
    """Return the container name of a device or the shaper.

    >>> container_name("quickstart-0a1b2c3d", "worker1")
    'testbed-quickstart-0a1b2c3d-worker1'
    """
    return f"testbed-{run}-{name}"


def device_url(shaper: str, name: str) -> str:
    """Return the URL at which a shaper forwards requests to a device.

    >>> device_url("http://127.0.0.1:32768", "worker1")
    'http://127.0.0.1:32768/devices/worker1'
    """
    return f"{shaper}/devices/{name}"


def published_url(inspection: Mapping[str, Any]) -> str:
    """Return the URL of an inspected container's published control port; empty without one.

    >>> published_url({"NetworkSettings": {"Ports": {"8700/tcp": [{"HostPort": "32768"}]}}})
    'http://127.0.0.1:32768'
    """
    # The engine responds with null for a stopped container, and for a port that is not published.
    ports = inspection["NetworkSettings"]["Ports"] or {}
    bindings = ports.get(f"{CONTROL_PORT}/tcp")
    if not bindings:
        return ""
    return f"http://127.0.0.1:{bindings[0]['HostPort']}"


def inspect(
    client: docker.DockerClient, run: str, name: str, address: str, find_url: ControlUrl
) -> DeviceContainer:
    """Return the current state of a container, ``gone`` for a missing one.

    ``find_url`` returns the control URL for the container's name and inspection.
    """
    try:
        inspection = client.api.inspect_container(container_name(run, name))
    except NotFound:
        # A missing container has no ID; the engine accepts a container's name wherever it accepts an ID.
        return DeviceContainer(name, container_name(run, name), address, "gone")
    status = inspection["State"]
    return DeviceContainer(
        name,
        inspection["Id"],
        address,
        status["Status"],
        status["Pid"],
        find_url(name, inspection),
    )


def device_settings(
    state: RunState, image: str, spec: DeviceSpec, addresses: Mapping[str, str]
) -> dict[str, Any]:
    """Return the engine settings of a device's container, with the addresses of all devices."""
    memory = int(spec.memory)
    labels = {DEVICE: spec.name, ADDRESS: addresses[spec.name]}
    environment = {
        "TESTBED_DEVICE": spec.name,
        "TESTBED_TOKEN": state.token_of(spec.name),
        # A single thread, because numeric libraries would start one for each processor of the host.
        "OMP_NUM_THREADS": "1",
    }
    # The device's disk is a volume, which survives a restart of the container. The removal finds volumes by label.
    disk_labels = {RUN: state.run, DEVICE: spec.name}
    disk = Mount("/state", None, type="volume", labels=disk_labels)
    gpus = None
    if spec.gpu:
        gpus = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    settings = container_settings(
        state,
        image,
        labels,
        environment,
        tmpfs={"/tmp": _TMP_OPTIONS},
        mounts=[disk],
        mem_limit=memory,
        # Equal to the memory: no swap, which a device does not have.
        memswap_limit=memory,
        pids_limit=_MAX_DEVICE_TASKS,
        nano_cpus=None if spec.cpus is None else int(spec.cpus * 1e9),
        sysctls=_SYSCTLS,
        device_requests=gpus,
        # Devices reach no name server, so programs find each other's names in /etc/hosts.
        extra_hosts=dict(addresses),
        # On one host, the shaper creates the network: the engine's own takes most of a container's start time.
        network_mode=network_name(state.run, "data") if state.hosts else "none",
    )
    if state.hosts:
        # A swarm worker learns of the overlay network only when a container that names the network starts, so no
        # container can be connected before. Therefore the network is part of the container's settings.
        endpoint = EndpointConfig(
            DEFAULT_DOCKER_API_VERSION,
            aliases=[spec.name],
            ipv4_address=addresses[spec.name],
        )
        settings["networking_config"] = {
            "EndpointsConfig": {network_name(state.run, "data"): endpoint}
        }
    return {**settings, "hostname": spec.name}


def shaper_settings(state: RunState, image: str, backend: str) -> dict[str, Any]:
    """Return the engine settings of the shaper's container; ``backend`` is the name of the link backend or ``auto``."""
    environment = {
        "TESTBED_TOKEN": state.token_of(SHAPER),
        "TESTBED_LINKS": backend,
        **environment_for([backend]),
    }
    # Several hosts share no control network. There, the keeper of each host, a container that carries the controller's
    # requests, enters the loopback of the host's containers.
    network: dict[str, Any] = {"network_mode": "none"}
    if not state.hosts:
        network = {
            "network_mode": network_name(state.run, "control"),
            # A free port of the loopback, so that no other machine reaches the shaper.
            "port_bindings": {CONTROL_PORT: ("127.0.0.1", None)},
        }
    settings = container_settings(
        state,
        image,
        {ROLE: SHAPER},
        environment,
        tmpfs={"/tmp": _TMP_OPTIONS, "/run": "size=16m,mode=755"},
        mem_limit=SHAPER_MEMORY,
        memswap_limit=SHAPER_MEMORY,
        pids_limit=_MAX_SHAPER_TASKS,
        cap_add=SHAPER_CAPABILITIES,
        # The namespaces of devices are opened by process IDs of the host.
        pid_mode="host",
        **network,
    )
    if not state.hosts:
        # The engine API wants a published port in both places: here as exposed, in `port_bindings` with its address.
        settings["ports"] = [CONTROL_PORT]
    return settings


def container_settings(
    state: RunState,
    image: str,
    labels: dict[str, str],
    environment: dict[str, str],
    **host: Any,
) -> dict[str, Any]:
    """Return the settings of a container for the engine API: common settings of all containers, and the caller's.

    ``host`` are arguments of `docker.types.HostConfig`; ``log_config`` replaces the common limits of logs.
    """
    variables = {"TESTBED_RUN": state.run}
    if state.lease is not None:
        variables[LEASE] = f"{state.lease:g}"
    if _LOG.isEnabledFor(logging.DEBUG):
        variables[LEVEL] = "debug"
    host_config = HostConfig(
        version=DEFAULT_DOCKER_API_VERSION,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        read_only=True,
        # Callers such as the keeper's may replace the limits of logs.
        **({"log_config": _LOGS} | host),
    )
    return {
        "image": image,
        # The label of the run is part of the creation: there is no instant at which the container exists without it,
        # so the removal by label, by the reaper or by 'testbed down', never misses one.
        "labels": {RUN: state.run, **labels},
        "environment": variables | environment,
        "host_config": host_config,
    }


def make_container(
    client: docker.DockerClient, run: str, name: str, settings: dict[str, Any]
) -> None:
    """Create and start a container. A fixed name makes a repeated request harmless.

    Raises `HostError` if the engine refuses.
    """
    full_name = container_name(run, name)
    try:
        client.api.create_container(name=full_name, use_config_proxy=False, **settings)
    except APIError as error:
        # 409: an earlier try of this request has created the container.
        if error.status_code != 409:
            raise HostError(
                f"cannot create the container of {name}: {error.explanation}"
            ) from error
    try:
        client.api.start(full_name)
    except APIError as error:
        raise HostError(
            f"cannot start the container of {name}: {error.explanation}"
        ) from error
