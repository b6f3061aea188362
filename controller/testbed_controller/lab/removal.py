"""Removal of a run: containers, networks and state file, found by label in any state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

import docker
from docker.errors import APIError, NotFound

from testbed.common.errors import HostError
from testbed_controller.lab import runstate

RUN = "testbed.run"
"""Label with the run's ID, on every container, network and volume of the run."""
DEVICE = "testbed.device"
"""Label with the name of the device, on its container and its volume."""
ADDRESS = "testbed.address"
"""Label with the device's address in the data network."""
ROLE = "testbed.role"
"""Label of a container that is not a device, such as ``shaper``."""

_RETRY_SECONDS = 30.0
"""Time, in seconds, for an engine to remove objects that it refused to remove at first."""
_CREATION_SECONDS = 300.0
"""Time, in seconds, during which a run without a running container counts as being created."""
_SETTLE_SECONDS = 0.4
"""Time, in seconds, after which a request of a killed client has taken effect in the engine."""
_WORKERS = 8
"""Number of containers removed concurrently."""


def labelled_runs(client: docker.DockerClient) -> set[str]:
    """Return the ID of every run with anything left on the engine."""
    containers = client.api.containers(all=True, filters={"label": RUN})
    networks = client.api.networks(filters={"label": RUN})
    # The engine responds with null instead of an empty list of volumes.
    volumes = client.api.volumes(filters={"label": RUN})["Volumes"] or []
    return {_run_of(entry) for entry in [*containers, *networks, *volumes]}


def _run_of(entry: Mapping[str, Any]) -> str:
    """Return the run of a listed container, network or volume."""
    return str(entry["Labels"][RUN])


def abandoned_runs(client: docker.DockerClient) -> set[str]:
    """Return the runs of all users without a running container and without recent additions.

    A shaper ends when its lease expires, so a run without a controller becomes abandoned eventually.
    """
    label = {"label": RUN}
    alive = set()
    # Each part of a run, with the time of its creation in seconds since 1970.
    parts = []
    for container in client.api.containers(all=True, filters=label):
        parts.append((_run_of(container), float(container["Created"])))
        if container["State"] in ("running", "paused", "restarting"):
            alive.add(_run_of(container))
    for network in client.api.networks(filters=label):
        created = datetime.fromisoformat(network["Created"])
        parts.append((_run_of(network), created.timestamp()))
    for volume in client.api.volumes(filters=label)["Volumes"] or []:
        created = datetime.fromisoformat(volume["CreatedAt"])
        parts.append((_run_of(volume), created.timestamp()))
    runs = set()
    recent = set()
    for run, created_at in parts:
        runs.add(run)
        # A run in creation has networks before it has containers.
        if created_at > time.time() - _CREATION_SECONDS:
            recent.add(run)
    return runs - alive - recent


def remove_run(client: docker.DockerClient, run: str, *, recheck: bool = True) -> int:
    """Remove everything of one run; return the number of removed containers, networks and volumes.

    Missing parts count as removed. With ``recheck``, the engine is queried again after a moment, because a container
    requested by a killed controller may appear late. Raises HostError if a part cannot be removed.
    """
    count = remove_from(client, run, recheck=recheck)
    runstate.forget(run)
    return count


def remove_from(
    client: docker.DockerClient,
    run: str,
    *,
    recheck: bool = True,
    networks: bool = True,
) -> int:
    """Remove a run from one engine of several, and keep the state file; raises `HostError`.

    Without ``networks``, the swarm's networks stay, since they can be removed only after an absent host returns.
    """
    count = 0
    deadline = time.monotonic() + _RETRY_SECONDS
    was_empty = False
    label = {"label": f"{RUN}={run}"}
    while True:
        remaining = 0
        problems: list[str] = []
        for list_ids, remove in _list_phases(client, label, networks=networks):
            ids = list_ids()
            remaining += len(ids)
            problems += _remove_all(ids, remove)
        count += remaining - len(problems)
        if problems:
            if time.monotonic() > deadline:
                text = f"cannot remove a part of run {run}: {problems[0]}"
                raise HostError(f"{text}: see 'docker ps -a' and the engine's log")
            time.sleep(0.1)
        if not remaining:
            # The engine is queried a second time, because a request of a killed client may take effect after the first.
            if was_empty or not recheck:
                return count
            time.sleep(_SETTLE_SECONDS)
        was_empty = not remaining


def _list_phases(
    client: docker.DockerClient, label: dict[str, str], *, networks: bool
) -> list[tuple[Callable[[], list[str]], Callable[[str], Any]]]:
    """Return functions for listing and removing labelled objects, in the required order.

    The engine refuses to remove networks and volumes in use by a container.
    """
    api = client.api

    def list_containers() -> list[str]:
        containers = api.containers(all=True, filters=label)
        return [str(container["Id"]) for container in containers]

    def list_networks() -> list[str]:
        local: list[str] = []
        swarm_networks: list[str] = []
        for network in api.networks(filters=label):
            kind = swarm_networks if network["Scope"] == "swarm" else local
            kind.append(str(network["Id"]))
        # Only a swarm's managers can remove its networks, after the last container has left.
        if swarm_networks and networks and _is_manager(client):
            return local + swarm_networks
        return local

    def list_volumes() -> list[str]:
        # Volumes disappear with their container, unless the container was removed by other means.
        volumes = api.volumes(filters=label)["Volumes"] or []
        return [str(volume["Name"]) for volume in volumes]

    # ``force`` removes running containers too, and ``v`` their anonymous volumes, which are the disks of devices.
    return [
        (list_containers, partial(api.remove_container, force=True, v=True)),
        (list_networks, api.remove_network),
        (list_volumes, api.remove_volume),
    ]


def _is_manager(client: docker.DockerClient) -> bool:
    return bool(client.info()["Swarm"].get("ControlAvailable", False))


def _remove_all(ids: Iterable[str], remove: Callable[[str], Any]) -> list[str]:
    """Remove objects concurrently; return the engine's reasons for the remaining ones."""

    def attempt(id_: str) -> str | None:
        try:
            remove(id_)
        except NotFound:
            return None
        except APIError as error:
            # A later attempt may succeed after these codes. 400: a container of another host is still on the network.
            # 403: the network has endpoints until the last container has left. 409: the removal is under way.
            if error.status_code not in (400, 403, 409, 500):
                raise
            return str(error.explanation or error)
        return None

    problems = []
    with ThreadPoolExecutor(_WORKERS) as pool:
        for problem in pool.map(attempt, ids):
            if problem is not None:
                problems.append(problem)
    return problems
