"""Health of a run's containers: responses, and the causes of ended containers."""

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
"""Time for a container to respond, in seconds; containers start slowly if many start at once on few processors."""
HEALTH_CHECK_SECONDS = 0.04
"""Interval of health checks, in seconds."""
END_CHECK_SECONDS = 0.5
"""Interval of checks for ended containers, in seconds. More frequent queries slow down the start on a busy host."""
PORT_CHECK_SECONDS = 1.0
"""Silence, in seconds, after which the published port of a container is checked."""
KILLED_CODE = 137
"""Exit code after SIGKILL."""
TERMINATED_CODES = (0, 143)
"""Exit codes of agents and shapers after SIGTERM."""
STOP_SECONDS = 12.0
"""Time, in seconds, within which a stopping engine ends all containers: it kills them after 10 s."""
LOGGED_LINES = 40
"""Number of lines of a failed container's log in the controller's log."""
KILL_EVENT_SECONDS = 0.5
"""Time until a kill appears in the engine's events, in seconds."""


@dataclass(frozen=True)
class Ending:
    """The cause of a container's end."""

    text: str
    """Description that follows the name of the container in a message."""
    out_of_memory: bool = False
    """Whether the container exceeded its memory limit."""
    requested: bool = False
    """Whether a client of the engine requested the end: a fault, a user, or another program."""


class Health:
    """Health checks of a run's containers; ``memory`` has the limit of each device in bytes."""

    def __init__(
        self, client: docker.DockerClient, run: str, memory: Mapping[str, float]
    ) -> None:
        self._client = client
        self._run = run
        self._memory = memory
        self._oom_kills_before = _count_oom_kills()
        self.shares_kernel = True
        """Whether the containers run on the kernel of this machine, whose counter of OOM kills then includes them."""

    def wait_for(self, urls: Mapping[str, str], *, published: bool = False) -> None:
        """Wait until all containers respond, given their control URLs by name.

        Set ``published`` if the engine publishes the ports. Raises HostError if a container has ended, if no further
        container responds for `PATIENCE` seconds, or if a published port is unreachable. The error contains the last
        log line of the container.
        """
        waiting = dict(urls)
        # The instant at which a container responded last.
        last_progress = time.monotonic()
        last_check = last_progress
        while True:
            still_waiting = {}
            for name, url in waiting.items():
                if not is_healthy(url):
                    still_waiting[name] = url
            if not still_waiting:
                return
            now = time.monotonic()
            # If another container responds, then the machine is busy and the remaining containers may respond later.
            if len(still_waiting) < len(waiting):
                last_progress = now
            waiting = still_waiting
            silent_seconds = now - last_progress
            if now - last_check > END_CHECK_SECONDS:
                last_check = now
                are_ports_due = published and silent_seconds > PORT_CHECK_SECONDS
                self._check_all(waiting, ports=are_ports_due)
            if silent_seconds > PATIENCE:
                first = next(iter(waiting))
                self._raise_with_log(first, f"does not answer within {PATIENCE:.0f} s")
            time.sleep(HEALTH_CHECK_SECONDS)

    def _check_all(self, urls: Mapping[str, str], *, ports: bool) -> None:
        for name, url in urls.items():
            self.check_alive(name)
            if ports:
                self._check_port(name, url)

    def ending(self, name: str, wait_seconds: float = 0.0) -> Ending | None:
        """Return the cause of a container's end; None for a running container.

        Waits up to ``wait_seconds`` for the end of a running container.
        """
        deadline = time.monotonic() + wait_seconds
        try:
            status = self._ended_state(name)
            while status is None and time.monotonic() < deadline:
                time.sleep(HEALTH_CHECK_SECONDS)
                status = self._ended_state(name)
        except NotFound:
            return Ending("was removed from outside")
        return None if status is None else self._explain(name, status)

    def _explain(self, name: str, status: Mapping[str, Any]) -> Ending:
        """Return the cause of an end, given the engine's state of the container."""
        if status.get("OOMKilled"):
            return self._explain_lack_of_memory(name)
        code = status["ExitCode"]
        if self._was_requested(name, status):
            return Ending(
                f"was ended through the engine (exit code {code})", requested=True
            )
        if code in TERMINATED_CODES and self._wait_for_all_to_end():
            return Ending(
                "was ended with all other containers of the run: the container engine was stopped"
            )
        if code != KILLED_CODE:
            return Ending(f"ended by itself with exit code {code}")
        # With cgroup v1, the engine misses most OOM kills, because the cgroup disappears before it checks.
        if self.shares_kernel and _count_oom_kills() > self._oom_kills_before:
            return self._explain_lack_of_memory(name)
        return Ending("was ended from outside (SIGKILL)")

    def _wait_for_all_to_end(self) -> bool:
        """Wait for the end of all containers; return whether all ended.

        An engine that is stopped first ends its containers, and reports no events about it.
        """
        deadline = time.monotonic() + STOP_SECONDS
        running = {"label": f"{RUN}={self._run}", "status": "running"}
        while self._client.api.containers(filters=running):
            if time.monotonic() > deadline:
                return False
            time.sleep(END_CHECK_SECONDS)
        return True

    def _ended_state(self, name: str) -> dict[str, Any] | None:
        """Return the engine's state of an ended container, otherwise None."""
        title = container_name(self._run, name)
        status: dict[str, Any] = self._client.api.inspect_container(title)["State"]
        return status if status["Status"] in ("exited", "dead") else None

    def _explain_lack_of_memory(self, name: str) -> Ending:
        limit = self._memory.get(name)
        if limit is None:
            return Ending(
                "was killed by the kernel because of insufficient memory",
                out_of_memory=True,
            )
        return Ending(_describe_lack_of_memory(limit), out_of_memory=True)

    def _was_requested(self, name: str, status: Mapping[str, Any]) -> bool:
        """Return whether a client of the engine requested the end of the container."""
        filters = {"container": container_name(self._run, name), "event": "kill"}
        start = datetime.fromisoformat(status["StartedAt"]).timestamp()
        end = datetime.fromisoformat(status["FinishedAt"]).timestamp()
        # The engine records a kill shortly after sending the signal, so the window extends beyond the end. The engine
        # responds after the end of the window.
        until = math.ceil(end + KILL_EVENT_SECONDS)
        events = self._client.events(int(start), until, decode=True, filters=filters)
        with contextlib.closing(events):
            # The window begins at a whole second, so it may include a kill before this start of the container.
            return any(event["timeNano"] / 1e9 >= start for event in events)

    def check_alive(self, name: str) -> None:
        """Raise HostError with the cause if the container has ended."""
        ending = self.ending(name)
        if ending is None:
            return
        if ending.out_of_memory:
            raise HostError(f"{name} {ending.text}")
        self._raise_with_log(name, ending.text)

    def _check_port(self, name: str, url: str) -> None:
        problem = port_problem(self._client, container_name(self._run, name), url)
        if problem:
            raise HostError(f"{name}: {problem}")

    def _raise_with_log(self, name: str, reason: str) -> NoReturn:
        output = b"".join(container_logs(self._client, self._run, name))
        lines = output.decode(errors="replace").strip().splitlines()
        end = "\n".join(lines[-LOGGED_LINES:])
        _LOG.info("the log of %s ends with:\n%s", name, end)
        last_line = lines[-1] if lines else "none"
        raise HostError(f"{name} {reason}; last log line: {last_line}")


def _count_oom_kills() -> int:
    """Return the number of processes killed by this kernel for lack of memory; 0 without statistics."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _describe_lack_of_memory(limit: float) -> str:
    return (
        f"ran out of memory: its container is limited to {format_size(limit)}, of which the agent with torch takes "
        "about 200MB in addition to the plan's weights and activations: raise the limit, or reduce the load with more "
        "devices, a smaller model, batch_size or in_flight"
    )


def is_healthy(url: str) -> bool:
    """Return whether an agent or shaper responds at a URL."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=2)
    try:
        connection.request("GET", f"{parts.path}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
