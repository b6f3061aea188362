"""Whether the containers of a run answer, and how those ended that do not."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import docker
from docker.errors import NotFound

from testbed.common.errors import HostError
from testbed.common.quantities import format_size
from testbed_controller.lab.containers import container_logs, container_name
from testbed_controller.lab.ports import port_problem
from testbed_controller.lab.removal import RUN

_LOG = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds for a container to answer; many starting at once on few processors take their time."""
INTERVAL = 0.04
LOOK_INTERVAL = 0.5
"""Seconds between two looks whether a container still runs: on a busy host, asking costs what is asked for."""
PORT_SECONDS = 1.0
"""Seconds of silence after which a container is asked whether only its published port is out of reach."""
KILLED = 137
"""The status of what SIGKILL has ended."""
TERMINATED = (0, 143)
"""The statuses of agents and shapers after SIGTERM."""
STOP_SECONDS = 12.0
"""Seconds within which an engine that stops has ended all containers: it kills those that take 10 s."""
LOGGED_LINES = 40
"""Lines of a container's log that the controller logs where it gives the container up."""
KILL_NOTED = 0.5
"""Seconds within which the engine's events have a kill."""


@dataclass(frozen=True)
class Ending:
    """How a container ended, in the engine's words."""

    text: str
    """To be put after its name."""
    starved: bool = False
    """Whether it needed more memory than it has."""
    asked: bool = False
    """Whether the engine was asked for it: by a fault, by hand, by any other client."""


class Health:
    """The health of a run's containers; ``memory`` holds the limit of each device in bytes."""

    def __init__(self, client: docker.DockerClient, run: str, memory: Mapping[str, float]) -> None:
        self._client = client
        self._run = run
        self._memory = memory
        self._kills = _killed_for_memory()
        self.is_here = True
        """Whether the containers run on this machine's kernel, whose counts then say something of them."""

    def wait_for(self, urls: Mapping[str, str], *, published: bool = False) -> None:
        """Return once all containers answer, given by name with their control URL; ``published`` by the engine.

        Raises HostError, with the last line that it wrote, for a container that has ended, or for one that stays silent
        for `PATIENCE` seconds in which no other answered either; and for a published port that is out of reach.
        """
        waiting = dict(urls)
        began = looked = time.monotonic()
        while True:
            before, waiting = waiting, {name: url for name, url in waiting.items() if not healthy(url)}
            if not waiting:
                return
            now = time.monotonic()
            if len(waiting) < len(before):
                began = now
            if now - looked > LOOK_INTERVAL:
                looked = now
                self._check_all(waiting, ports=published and now - began > PORT_SECONDS)
            if now - began > PATIENCE:
                self._give_up(next(iter(waiting)), f"does not answer within {PATIENCE:.0f} s")
            time.sleep(INTERVAL)

    def _check_all(self, urls: Mapping[str, str], ports: bool) -> None:
        for name, url in urls.items():
            self.check_alive(name)
            if ports:
                self._check_port(name, url)

    def ending(self, name: str, patience: float = 0.0) -> Ending | None:
        """Return how a container ended, else None.

        Waits up to ``patience`` seconds for one to end that still seems to run.
        """
        deadline = time.monotonic() + patience
        try:
            status = self._ended(name)
            while status is None and time.monotonic() < deadline:
                time.sleep(INTERVAL)
                status = self._ended(name)
        except NotFound:
            return Ending("was removed from outside")
        return None if status is None else self._explain(name, status)

    def _explain(self, name: str, status: Mapping[str, Any]) -> Ending:
        """Return the cause of an ending, given the state of the container."""
        if status.get("OOMKilled"):
            return self._starvation(name)
        code = status["ExitCode"]
        if self._was_asked(name, status):
            return Ending(f"was ended through the engine (exit code {code})", asked=True)
        if code in TERMINATED and self._all_end():
            return Ending("was ended with all other containers of the run: the container engine was stopped")
        if code != KILLED:
            return Ending(f"ended by itself with exit code {code}")
        # With cgroup v1 the engine misses most kills for want of memory: the group is gone before it looks.
        if self.is_here and _killed_for_memory() > self._kills:
            return self._starvation(name)
        return Ending("was ended from outside (SIGKILL)")

    def _all_end(self) -> bool:
        """Wait for all containers of the run to end; return whether they do.

        An engine that is stopped in an orderly way ends its containers first, of which it notes no event.
        """
        deadline = time.monotonic() + STOP_SECONDS
        running = {"label": f"{RUN}={self._run}", "status": "running"}
        while self._client.api.containers(filters=running):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_INTERVAL)
        return True

    def _ended(self, name: str) -> dict[str, Any] | None:
        """Return the engine's state of a container that has ended, else None."""
        status: dict[str, Any] = self._client.api.inspect_container(container_name(self._run, name))["State"]
        return status if status["Status"] in ("exited", "dead") else None

    def _starvation(self, name: str) -> Ending:
        limit = self._memory.get(name)
        return Ending("was ended by the kernel for want of memory" if limit is None else _out_of_memory(limit), True)

    def _was_asked(self, name: str, status: Mapping[str, Any]) -> bool:
        """Return whether the engine was asked to end a container that has ended."""
        filters = {"container": container_name(self._run, name), "event": "kill"}
        began, ended = (datetime.fromisoformat(status[key]).timestamp() for key in ("StartedAt", "FinishedAt"))
        # The engine notes a kill just after it has sent the signal, and answers when that time is over.
        window = int(began), math.ceil(ended + KILL_NOTED)
        with contextlib.closing(self._client.events(*window, decode=True, filters=filters)) as events:
            return any(event["timeNano"] / 1e9 >= began for event in events)

    def check_alive(self, name: str) -> None:
        """Raise HostError with the reason if the container has ended."""
        ending = self.ending(name)
        if ending is None:
            return
        if ending.starved:
            raise HostError(f"{name} {ending.text}")
        self._give_up(name, ending.text)

    def _check_port(self, name: str, url: str) -> None:
        problem = port_problem(self._client, container_name(self._run, name), url)
        if problem:
            raise HostError(f"{name}: {problem}")

    def _give_up(self, name: str, why: str) -> NoReturn:
        log = b"".join(container_logs(self._client, self._run, name)).decode(errors="replace").strip().splitlines()
        _LOG.info("the log of %s ends with:\n%s", name, "\n".join(log[-LOGGED_LINES:]))
        raise HostError(f"{name} {why}; the last it said: {log[-1] if log else 'nothing'}")


def _killed_for_memory() -> int:
    """Return how many processes this kernel has ended for want of memory; 0 where it does not count them."""
    with contextlib.suppress(OSError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def _out_of_memory(limit: float) -> str:
    return (
        f"ran out of memory: its container is held to {format_size(limit)}, of which the agent with torch takes "
        "about 200MB beside the weights and activations of the plan: give it more, or let it hold less by more "
        "devices, a smaller model, batch_size or in_flight"
    )


def healthy(url: str) -> bool:
    """Return whether an agent or shaper answers there."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=2)
    try:
        connection.request("GET", f"{parts.path}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
