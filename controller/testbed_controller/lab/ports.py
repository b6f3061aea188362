"""Reachability of a container's published port, with the reason if the port is unreachable.

The engine publishes the control port of a container at a port of the engine's machine. The controller may be unable to
reach this port, for example if the controller runs in a container.
"""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import docker
from docker.errors import APIError

from testbed.wire.ports import CONTROL_PORT

_CONNECT_SECONDS = 1.0
"""Time-out of a connection within one machine, in seconds."""
_CONNECT_PROGRAM = f"import socket; socket.create_connection(('127.0.0.1', {CONTROL_PORT}), {_CONNECT_SECONDS})"
"""Python program that fails unless the control port accepts connections inside the container."""
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
"""Files that Docker and Podman create in every container."""


def port_problem(client: docker.DockerClient, container: str, url: str) -> str:
    """Return why a listening container is unreachable at ``url``, the URL of its published control port.

    Returns an empty text if the port is reachable, or if the container does not listen yet.
    """
    if _is_reachable(url) or not _is_listening(client, container):
        return ""
    # A second check, since the container may have begun to listen after the first one.
    if _is_reachable(url):
        return ""
    remedy = (
        "if the engine is on another machine, run testbed there, or add '--hosts NAME'"
    )
    if _is_in_container():
        remedy = f"this command seems to run in a container: start the container with '--network host'; {remedy}"
    return f"the engine publishes its port at {urlsplit(url).netloc}, which is unreachable from here; {remedy}"


def _is_reachable(url: str) -> bool:
    parts = urlsplit(url)
    address = (str(parts.hostname), int(parts.port or 0))
    try:
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _is_listening(client: docker.DockerClient, container: str) -> bool:
    """Return whether the control port answers inside the container."""
    try:
        command = ["python3", "-c", _CONNECT_PROGRAM]
        execution = client.api.exec_create(container, command)["Id"]
        client.api.exec_start(execution)
        return bool(client.api.exec_inspect(execution)["ExitCode"] == 0)
    except APIError:  # the container has ended
        return False


def _is_in_container() -> bool:
    return any(Path(file).exists() for file in _CONTAINER_FILES)
