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
from pathlib import Path
from typing import Any
from urllib.parse import quote

from testbed_controller.hosts.inside.relay import ALIVE

ENGINE = "/engine.sock"
ROLE = "testbed.role"
RUN = "testbed.run"
_TICK = 1.0
_AT_ONCE = 8
_PATIENCE = 24 * 3600.0
"""Time for attempts to remove the run, in seconds: the overlay network stays while an absent host uses it."""


class Engine(http.client.HTTPConnection):
    """HTTP over the engine's socket."""

    def __init__(self, path: str = ENGINE) -> None:
        super().__init__("engine", timeout=30)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
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
    found = engine.ask("GET", f"/containers/json?all=1&filters={filters}")
    ways = [
        f"/containers/{each['Id']}?force=1&v=1"
        for each in found
        if each["Labels"].get(ROLE) != "keeper"
    ]
    manages = engine.ask("GET", "/info")["Swarm"].get("ControlAvailable", False)
    networks = engine.ask("GET", f"/networks?filters={filters}")
    ways += [
        f"/networks/{each['Id']}"
        for each in networks
        if each["Scope"] == "local" or manages
    ]
    volumes = engine.ask("GET", f"/volumes?filters={filters}")["Volumes"] or []
    ways += [f"/volumes/{each['Name']}" for each in volumes]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda way: _delete_object(path, way), ways))
    return len(ways)


def _delete_object(path: str, way: str) -> None:
    try:
        Engine(path).ask("DELETE", way)
    except (OSError, http.client.HTTPException) as error:
        print(f"{way}: {error}", flush=True)


def main() -> int:
    """Wait while the lease is renewed; then remove the run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lease, run = (
        float(os.environ.get("TESTBED_LEASE") or "inf"),
        os.environ["TESTBED_RUN"],
    )
    alive = Path(ALIVE)
    alive.touch()
    left, seen = lease, 0
    while left > 0:
        time.sleep(
            _TICK
        )  # not the wall clock: a suspended host has not lost its controller
        now = alive.stat().st_mtime_ns
        left, seen = (lease if now != seen else left - _TICK), now
    print(
        f"{run}: the controller was silent for {lease:g} s: removing the run from this host",
        flush=True,
    )
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        try:
            if not remove(run):
                return 0
        except (OSError, http.client.HTTPException) as error:
            print(error, flush=True)
        time.sleep(_TICK)
    return 1


if __name__ == "__main__":
    sys.exit(main())
