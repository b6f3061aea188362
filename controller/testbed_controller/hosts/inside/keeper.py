"""``python -m testbed_controller.hosts.inside.keeper``: removes a run from its host after its controller falls silent.

The keeper uses the engine's socket on its own host, so it needs no network connection. Its container removes itself
when the program ends. Without ``TESTBED_LEASE``, the keeper waits until it is removed.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from testbed_controller.hosts.inside.relay import ALIVE

ENGINE = "/engine.sock"
ROLE = "testbed.role"
RUN = "testbed.run"
_TICK = 1.0
"""Seconds between two checks of the lease, and between two attempts to remove the run."""
_AT_ONCE = 8
"""Number of objects removed concurrently."""
_PATIENCE = 24 * 3600.0
"""Time for attempts to remove the run, in seconds: the overlay network stays while an absent host uses it."""


class Engine(http.client.HTTPConnection):
    """HTTP over the engine's socket."""

    def __init__(self, path: str = ENGINE) -> None:
        super().__init__("engine", timeout=30)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        # HTTPConnection itself connects to TCP ports only.
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def ask(self, method: str, path: str) -> Any:
        """Return the engine's JSON response to a request; raises OSError for a refusal."""
        self.request(method, path)
        response = self.getresponse()
        content = response.read()
        if response.status >= 400 and response.status != 404:
            raise OSError(content.decode(errors="replace"))
        return json.loads(content or b"null") if response.status < 300 else None


def remove(run: str, path: str = ENGINE) -> int:
    """Try once to remove a run's parts from the engine, except keepers; return the number of remaining parts."""
    engine = Engine(path)
    filters = quote(json.dumps({"label": [f"{RUN}={run}"]}))
    objects = []
    for container in engine.ask("GET", f"/containers/json?all=1&filters={filters}"):
        if container["Labels"].get(ROLE) != "keeper":
            objects.append(f"/containers/{container['Id']}?force=1&v=1")
    # Only a swarm's managers can remove its networks.
    manages = engine.ask("GET", "/info")["Swarm"].get("ControlAvailable", False)
    for network in engine.ask("GET", f"/networks?filters={filters}"):
        if network["Scope"] == "local" or manages:
            objects.append(f"/networks/{network['Id']}")
    volumes = engine.ask("GET", f"/volumes?filters={filters}")["Volumes"] or []
    objects += [f"/volumes/{volume['Name']}" for volume in volumes]
    # All at once: a network in use is refused now and removed by the next try.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(partial(_delete_object, path), objects))
    return len(objects)


def _delete_object(path: str, url: str) -> None:
    # A connection of its own: HTTPConnection serves one thread.
    try:
        Engine(path).ask("DELETE", url)
    except (OSError, http.client.HTTPException) as error:
        print(f"{url}: {error}", flush=True)


def main() -> int:
    """Wait while the lease is renewed; then remove the run."""
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lease = float(os.environ.get("TESTBED_LEASE") or "inf")
    run = os.environ["TESTBED_RUN"]
    _wait_for_silence(lease)
    text = f"{run}: the controller was silent for {lease:g} s: removing the run from this host"
    print(text, flush=True)
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            if not remove(run):
                return 0
        except (OSError, http.client.HTTPException) as error:
            print(error, flush=True)
        time.sleep(_TICK)
    return 1


def _wait_for_silence(seconds: float) -> None:
    """Return when the relay has not touched its file for a number of seconds."""
    alive = Path(ALIVE)
    alive.touch()
    left = seconds
    last_touch = 0
    while left > 0:
        # Ticks instead of the clock: after a suspension of the host, the controller has not been silent.
        time.sleep(_TICK)
        touch = alive.stat().st_mtime_ns
        left = seconds if touch != last_touch else left - _TICK
        last_touch = touch


if __name__ == "__main__":
    sys.exit(main())
