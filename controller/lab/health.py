"""Whether the containers of a run answer, and how those ended that do not."""

from __future__ import annotations

import contextlib
import http.client
import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

import docker
from docker.errors import NotFound

from controller.lab.containers import container_logs, container_name
from testbed.common.errors import HostError
from testbed.common.quantities import format_size

PATIENCE = 60.0
"""Seconds for a container to answer; many starting at once on few processors take their time."""
INTERVAL = 0.04
LOOK_INTERVAL = 0.5
"""Seconds between two looks whether a container still runs: on a busy host, asking costs what is asked for."""
KILLED = 137
"""The status of what SIGKILL has ended."""
KILL_NOTED = 0.5
"""Seconds within which the engine's events have a kill."""


class Health:
    """The health of a run's containers; ``memory`` holds the limit of each device in bytes."""

    def __init__(self, client: docker.DockerClient, run: str, memory: Mapping[str, float]) -> None:
        self._client = client
        self._run = run
        self._memory = memory

    def wait_for(self, urls: Mapping[str, str]) -> None:
        """Return once all containers answer, given by name with their control URL.

        Raises HostError, with the last line that it wrote, for a container that has ended or stays silent.
        """
        waiting = dict(urls)
        began = looked = time.monotonic()
        while True:
            waiting = {name: url for name, url in waiting.items() if not healthy(url)}
            if not waiting:
                return
            now = time.monotonic()
            if now - looked > LOOK_INTERVAL:
                looked = now
                for name in waiting:
                    self.check_alive(name)
            if now - began > PATIENCE:
                self._give_up(next(iter(waiting)), f"does not answer within {PATIENCE:.0f} s")
            time.sleep(INTERVAL)

    def starved(self, name: str, patience: float = 0.0) -> str | None:
        """Return a message if the kernel has ended this device for want of memory, else None.

        Waits up to ``patience`` seconds for a container to end that still seems to run.
        """
        deadline = time.monotonic() + patience
        with contextlib.suppress(NotFound):
            while (status := self._ended(name)) is None and time.monotonic() < deadline:
                time.sleep(INTERVAL)
            return None if status is None else self._starvation(name, status)
        return None

    def _ended(self, name: str) -> dict[str, Any] | None:
        """Return the engine's state of a container that has ended, else None."""
        status: dict[str, Any] = self._client.api.inspect_container(container_name(self._run, name))["State"]
        return status if status["Status"] in ("exited", "dead") else None

    def _starvation(self, name: str, status: Mapping[str, Any]) -> str | None:
        """Return a message if a device that ended in this way ran out of memory."""
        limit = self._memory.get(name)
        if limit is None:
            return None
        starved = status.get("OOMKilled") or (status["ExitCode"] == KILLED and not self._was_killed(name, status))
        return _out_of_memory(name, limit) if starved else None

    def _was_killed(self, name: str, status: Mapping[str, Any]) -> bool:
        """Tell whether the engine was asked to kill a device that has ended; if not, the kernel did it.

        With cgroup v1 the engine misses most kills for want of memory: the group is gone before it looks.
        """
        filters = {"container": container_name(self._run, name), "event": "kill"}
        began, ended = (datetime.fromisoformat(status[key]).timestamp() for key in ("StartedAt", "FinishedAt"))
        # The engine notes a kill just after it has sent the signal, and answers when that time is over.
        window = int(began), math.ceil(ended + KILL_NOTED)
        with contextlib.closing(self._client.events(*window, decode=True, filters=filters)) as events:
            return any(event["timeNano"] / 1e9 >= began for event in events)

    def check_alive(self, name: str) -> None:
        """Raise HostError with the reason if the container has ended."""
        status = self._ended(name)
        if status is None:
            return
        if why := self._starvation(name, status):
            raise HostError(why)
        self._give_up(name, f"ended with status {status['ExitCode']}")

    def _give_up(self, name: str, why: str) -> NoReturn:
        log = b"".join(container_logs(self._client, self._run, name)).decode(errors="replace").strip().splitlines()
        raise HostError(f"{name} {why}; the last it said: {log[-1] if log else 'nothing'}")


def _out_of_memory(name: str, limit: float) -> str:
    return (
        f"{name} ran out of memory: its container is held to {format_size(limit)}, of which the agent with torch takes "
        "about 200MB beside the weights and activations of the plan: give it more, or let it hold less by more "
        "devices, a smaller model, batch_size or in_flight"
    )


def healthy(url: str) -> bool:
    """Return whether an agent or shaper answers there."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
