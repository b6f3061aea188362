"""Take a run away: its containers, its networks, its state file, found by label and in whatever state they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
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
    containers = client.api.containers(all=True, filters=label)
    alive = {str(each["Labels"][RUN]) for each in containers if each["State"] in ("running", "paused", "restarting")}
    made = [(str(each["Labels"][RUN]), float(each["Created"])) for each in containers]
    volumes = client.api.volumes(filters=label)["Volumes"] or []
    dated = [(each, "Created") for each in client.api.networks(filters=label)]
    dated += [(each, "CreatedAt") for each in volumes]
    for each, key in dated:
        made.append((str(each["Labels"][RUN]), datetime.fromisoformat(each[key]).timestamp()))
    # A run that is just being made has networks before it has a container.
    fresh = {run for run, at in made if time.time() - at < _BEING_MADE}
    return {run for run, _ in made} - alive - fresh


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
    label = {"label": f"{RUN}={run}"}
    count = 0
    deadline = time.monotonic() + _PATIENCE
    quiet = False
    while True:
        containers = [str(one["Id"]) for one in client.api.containers(all=True, filters=label)]
        listed = client.api.networks(filters=label)
        # Those of a swarm are removed by its managers, once no host has a container on them.
        of_swarm = any(one["Scope"] == "swarm" for one in listed) and networks and _manages(client)
        own = [str(one["Id"]) for one in listed if of_swarm or one["Scope"] != "swarm"]
        # What a container had goes with it, unless somebody removed that by other means.
        found = [] if containers else client.api.volumes(filters=label)["Volumes"] or []
        volumes = [str(one["Name"]) for one in found]
        if not containers and not own and not volumes:
            if quiet or not settle:
                break
            quiet = True
            time.sleep(_SETTLE)
            continue
        quiet = False
        problems = _each(containers, lambda id_: client.api.remove_container(id_, force=True, v=True))
        problems += _each(own, client.api.remove_network)
        problems += _each(volumes, client.api.remove_volume)
        count += len(containers) + len(own) + len(volumes) - len(problems)
        if problems and time.monotonic() > deadline:
            raise HostError(f"{problems[0]} of run {run} does not go away: see 'docker ps -a' and the engine's log")
        if problems:
            time.sleep(0.1)
    return count


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
