"""``python -m testbed_controller.hosts.inside.keeper``: removes a run from its host after its controller falls silent.

The lease is the time that the controller may be silent. Beside this program, a relay runs in the keeper's container: at
every sign of life of the controller, it touches a file, which this program watches. Without a lease (environment
variable ``TESTBED_LEASE``), the keeper waits until it is removed.

The keeper uses the engine's socket on its own host, so it needs no network connection. The engine removes the keeper's
container when the program ends.
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

from testbed_controller.hosts.inside.relay import ALIVE_FILE

ENGINE_SOCKET = "/engine.sock"
"""Path at which the engine's socket is mounted."""
# Labels of containers, networks and volumes.
ROLE = "testbed.role"
RUN = "testbed.run"
_TICK_SECONDS = 1.0
"""Seconds between two checks of the lease, and between two attempts to remove the run."""
_CONCURRENT_REMOVALS = 8
"""Number of objects removed concurrently."""
_REMOVAL_SECONDS = 24 * 3600.0
"""Time for attempts to remove the run, in seconds; long, since the overlay network cannot be removed while another host
without contact uses it."""


class Engine(http.client.HTTPConnection):
    """An HTTP connection over the engine's socket."""

    def __init__(self, path: str = ENGINE_SOCKET) -> None:
        super().__init__("engine", timeout=30)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        # HTTPConnection itself connects to TCP ports only.
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def ask(self, method: str, path: str) -> Any:
        """Return the engine's JSON response to a request, None if the object does not exist.

        Raises OSError for any other error of the engine.
        """
        self.request(method, path)
        response = self.getresponse()
        content = response.read()
        if response.status >= 400 and response.status != 404:
            raise OSError(content.decode(errors="replace"))
        return json.loads(content or b"null") if response.status < 300 else None


def remove(run: str, socket_path: str = ENGINE_SOCKET) -> int:
    """Try once to remove a run's containers, networks and volumes from the engine, except the keeper.

    Returns the number of objects that existed before, 0 if nothing was left to remove.
    """
    engine = Engine(socket_path)
    filters = quote(json.dumps({"label": [f"{RUN}={run}"]}))
    paths = []
    for container in engine.ask("GET", f"/containers/json?all=1&filters={filters}"):
        if container["Labels"].get(ROLE) != "keeper":
            paths.append(f"/containers/{container['Id']}?force=1&v=1")
    # Only a manager of the swarm can remove its networks.
    is_manager = engine.ask("GET", "/info")["Swarm"].get("ControlAvailable", False)
    for network in engine.ask("GET", f"/networks?filters={filters}"):
        if network["Scope"] == "local" or is_manager:
            paths.append(f"/networks/{network['Id']}")
    volumes = engine.ask("GET", f"/volumes?filters={filters}")["Volumes"] or []
    paths += [f"/volumes/{volume['Name']}" for volume in volumes]
    # In any order: the engine refuses to remove a network in use, and the next try removes it.
    with ThreadPoolExecutor(_CONCURRENT_REMOVALS) as pool:
        list(pool.map(partial(_delete_object, socket_path), paths))
    return len(paths)


def _delete_object(socket_path: str, path: str) -> None:
    try:
        # A connection for each object, since an HTTPConnection serves one thread.
        Engine(socket_path).ask("DELETE", path)
    except (OSError, http.client.HTTPException) as error:
        print(f"{path}: {error}", flush=True)


def main() -> int:
    """Wait while the lease is renewed; then remove the run."""
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    lease = float(os.environ.get("TESTBED_LEASE") or "inf")
    run = os.environ["TESTBED_RUN"]
    _wait_for_silence(lease)
    text = f"{run}: the controller was silent for {lease:g} s: removing the run from this host"
    print(text, flush=True)
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while time.monotonic() < deadline:
        try:
            if not remove(run):
                return 0
        except (OSError, http.client.HTTPException) as error:
            print(error, flush=True)
        time.sleep(_TICK_SECONDS)
    return 1


def _wait_for_silence(seconds: float) -> None:
    """Return when the relay has not touched its file for a number of seconds."""
    file = Path(ALIVE_FILE)
    file.touch()
    remaining = seconds
    last_touch = 0
    while remaining > 0:
        # Ticks are counted instead of the clock's time, since a suspension of the host is no silence of the controller.
        time.sleep(_TICK_SECONDS)
        touch = file.stat().st_mtime_ns
        if touch == last_touch:
            remaining -= _TICK_SECONDS
        else:
            remaining = seconds
        last_touch = touch


if __name__ == "__main__":
    sys.exit(main())
