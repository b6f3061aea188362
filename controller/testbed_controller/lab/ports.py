"""Whether the published port of a container can be reached from here, and the reason where it cannot."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import docker
from docker.errors import APIError

from testbed.wire.ports import CONTROL_PORT

_CONNECT_SECONDS = 1.0
_TRY = f"import socket; socket.create_connection(('127.0.0.1', {CONTROL_PORT}), {_CONNECT_SECONDS})"
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
"""Files that Docker and Podman put into each container."""


def port_problem(client: docker.DockerClient, container: str, url: str) -> str:
    """Return why a container that listens cannot be reached at the URL of its published control port.

    Empty where the port is reachable, and while the container does not listen yet.
    """
    # Once more after the look inside: the container may have begun to listen in between.
    if _accepts(url) or not _listens(client, container) or _accepts(url):
        return ""
    remedy = "if the engine is on another machine, run testbed there, or add '--hosts NAME'"
    if _is_in_container():
        remedy = f"testbed seems to run in a container: start that container with '--network host'; {remedy}"
    return f"the engine publishes its port at {urlsplit(url).netloc}, which is out of reach from here; {remedy}"


def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((str(parts.hostname), int(parts.port or 0)), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _listens(client: docker.DockerClient, container: str) -> bool:
    """Return whether the control port answers inside the container."""
    try:
        started = client.api.exec_create(container, ["python3", "-c", _TRY])["Id"]
        client.api.exec_start(started)
        return bool(client.api.exec_inspect(started)["ExitCode"] == 0)
    except APIError:  # the container has ended
        return False


def _is_in_container() -> bool:
    return any(Path(each).exists() for each in _CONTAINER_FILES)
