"""Take a run away: its containers, its networks, its state file, found by label and in whatever state they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

import docker
from docker.errors import APIError, NotFound

from testbed.common.errors import HostError
from testbed_controller.lab import runstate

RUN = "testbed.run"
DEVICE = "testbed.device"
ADDRESS = "testbed.address"
ROLE = "testbed.role"

_PATIENCE = 30.0
_BEING_MADE = 300.0
"""Seconds for which a run without a running container counts as one that is being made."""
_SETTLE = 0.4
"""Seconds after which a request whose sender was killed has had its effect in the engine."""
_WORKERS = 8


def labelled_runs(client: docker.DockerClient) -> set[str]:
    """Return the id of every run that the engine still holds something of."""
    containers = client.api.containers(all=True, filters={"label": RUN})
    networks = client.api.networks(filters={"label": RUN})
    volumes = client.api.volumes(filters={"label": RUN})["Volumes"] or []
    return {str(thing["Labels"][RUN]) for thing in [*containers, *networks, *volumes]}


def abandoned_runs(client: docker.DockerClient) -> set[str]:
    """Return the runs, of any user, of which no container runs and to which nothing was added for some minutes.

    The shaper of a run ends when nobody has renewed its lease, so that a run whose controller is gone becomes one.
    """
    label = {"label": RUN}
    alive, made = set(), []
    for container in client.api.containers(all=True, filters=label):
        made.append((container, float(container["Created"])))
        if container["State"] in ("running", "paused", "restarting"):
            alive.add(str(container["Labels"][RUN]))
    for network in client.api.networks(filters=label):
        made.append((network, datetime.fromisoformat(network["Created"]).timestamp()))
    for volume in client.api.volumes(filters=label)["Volumes"] or []:
        made.append((volume, datetime.fromisoformat(volume["CreatedAt"]).timestamp()))
    # A run that is just being made has networks before it has a container.
    newest = time.time() - _BEING_MADE
    known = {str(thing["Labels"][RUN]) for thing, _ in made}
    fresh = {str(thing["Labels"][RUN]) for thing, at in made if at > newest}
    return known - alive - fresh


def remove_run(client: docker.DockerClient, run: str, *, settle: bool = True) -> int:
    """Remove everything of one run; return how many containers, networks and stray volumes there were.

    What is already gone counts as removed. With ``settle`` the engine is asked again a moment later, because a
    container that a killed controller had asked for may appear after the first look. Raises HostError where something
    does not go away.
    """
    count = remove_from(client, run, settle=settle)
    runstate.forget(run)
    return count


def remove_from(client: docker.DockerClient, run: str, *, settle: bool = True, networks: bool = True) -> int:
    """Do as `remove_run` does, on this engine of several, and leave the state file; raises `HostError` likewise.

    Without ``networks`` those of a swarm stay: they cannot go before a host that is away is back.
    """
    count = 0
    deadline = time.monotonic() + _PATIENCE
    quiet = False
    while True:
        things, problems = 0, []
        for list_ids, remove in _phases(client, {"label": f"{RUN}={run}"}, networks):
            ids = list_ids()
            things += len(ids)
            problems += _each(ids, remove)
        count += things - len(problems)
        if problems:
            if time.monotonic() > deadline:
                text = f"{problems[0]} of run {run} does not go away"
                raise HostError(f"{text}: see 'docker ps -a' and the engine's log")
            time.sleep(0.1)
        if not things:
            if quiet or not settle:
                return count
            time.sleep(_SETTLE)
        quiet = not things


def _phases(
    client: docker.DockerClient, label: dict[str, str], networks: bool
) -> list[tuple[Callable[[], list[str]], Callable[[str], Any]]]:
    """Return how things of one label are listed and removed, in the order in which that is possible."""
    api = client.api

    def list_containers() -> list[str]:
        return [str(one["Id"]) for one in api.containers(all=True, filters=label)]

    def list_networks() -> list[str]:
        found = api.networks(filters=label)
        # Those of a swarm are removed by its managers, once no host has a container on them.
        swarm = any(one["Scope"] == "swarm" for one in found) and networks and _manages(client)
        return [str(one["Id"]) for one in found if swarm or one["Scope"] != "swarm"]

    def list_volumes() -> list[str]:
        # Those of a container went with it, unless somebody removed it by other means.
        return [str(one["Name"]) for one in api.volumes(filters=label)["Volumes"] or []]

    return [
        (list_containers, partial(api.remove_container, force=True, v=True)),
        (list_networks, api.remove_network),
        (list_volumes, api.remove_volume),
    ]


def _manages(client: docker.DockerClient) -> bool:
    return bool(client.info()["Swarm"].get("ControlAvailable", False))


def _each(ids: Iterable[str], remove: Callable[[str], Any]) -> list[str]:
    """Remove at once; return what the engine says of those that it keeps for now."""

    def attempt(id_: str) -> str | None:
        try:
            remove(id_)
        except NotFound:
            return None
        except APIError as error:
            # 409: its removal is under way. Networks: 'has active endpoints' until the last container has left.
            # 400: a container of another host is still on the network.
            if error.status_code not in (400, 403, 409, 500):
                raise
            return str(error.explanation or error)
        return None

    with ThreadPoolExecutor(_WORKERS) as pool:
        return [problem for problem in pool.map(attempt, ids) if problem is not None]
