"""Connections to the engines of hosts by docker contexts: ``unix://``, ``tcp://`` and ``ssh://``.

The engines of a run's hosts belong to one swarm, Docker's cluster, since only a swarm has networks over several hosts.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import docker
from docker.errors import DockerException

from testbed.common.errors import HostError, InputError
from testbed_controller.lab.engine import ANSWER_SECONDS, connect_to
from testbed_controller.lab.engineaddress import SOCKET, EngineAddress, find_context

OLDEST_VERSION = 19
"""Oldest supported major version of Docker; overlay networks of older engines are untested."""


@dataclass(frozen=True)
class Host:
    """A responding engine, and the state of the engine in the swarm."""

    name: str
    """Name of the docker context."""
    client: docker.DockerClient
    address_from_here: EngineAddress
    """Address of the engine for connections from this machine."""
    socket: str
    """Path of the engine's socket on its own host."""
    engine_id: str
    """Node ID in the swarm; outside a swarm, the ID of the engine."""
    node: str
    """Node name in the swarm, which is the host name."""
    address: str
    """Address in the swarm; empty outside a swarm."""
    is_manager: bool
    """Whether the host is a manager of the swarm."""
    managers: tuple[str, ...]
    """Addresses of the swarm's managers known to the node."""
    cores: int
    memory: int
    """Memory in bytes."""
    version: str
    """Version of Docker."""


def reach(name: str) -> Host:
    """Connect to the engine of a docker context.

    Raises InputError for an unknown context, and HostError if the engine does not respond.
    """
    engine = find_context(name)
    url = engine.url
    engine_socket = SOCKET
    if urlsplit(url).scheme == "unix":
        engine_socket = urlsplit(url).path
    elif engine.is_ssh:
        engine = replace(engine, url=f"unix://{_forward_socket(name, url)}")
    elif not engine.certificates and not engine.is_local:
        # An unprotected connection is refused: it gives everybody root access to the host, and requests to the engine
        # contain the run's tokens.
        raise InputError(
            f"{name}: {url} is unprotected on the network: add certificates to the context, or use ssh://"
        )
    try:
        client = connect_to(engine, ANSWER_SECONDS)
        info = client.info()
    except (DockerException, OSError) as error:
        raise HostError(
            f"{name}: no engine responds at {url} ({error}): try 'docker --context {name} info'"
        ) from None
    swarm = info["Swarm"]
    # Outside a swarm, the engine responds with null.
    peers = swarm.get("RemoteManagers") or ()
    return Host(
        name=name,
        client=client,
        address_from_here=engine,
        socket=engine_socket,
        engine_id=str(swarm.get("NodeID") or info["ID"]),
        node=str(info["Name"]),
        address=str(swarm.get("NodeAddr", "")),
        is_manager=bool(swarm.get("ControlAvailable", False)),
        managers=tuple(sorted(peer["Addr"] for peer in peers)),
        cores=int(info["NCPU"]),
        memory=int(info["MemTotal"]),
        version=str(info["ServerVersion"]),
    )


def reach_all(names: Sequence[str]) -> dict[str, Host]:
    """Connect to several hosts concurrently.

    Raises InputError or HostError as `reach` does, and InputError if two contexts lead to one engine.
    """
    with ThreadPoolExecutor(len(names)) as pool:
        hosts = dict(zip(names, pool.map(reach, names), strict=True))
    # Two contexts of one engine are refused, since the shapers and keepers of both would have the same names.
    engines: dict[str, str] = {}
    for name, host in hosts.items():
        other = engines.setdefault(host.engine_id, name)
        if other != name:
            raise InputError(
                f"--hosts: the contexts {other} and {name} lead to the same engine: remove one of them"
            )
    return hosts


def find_manager(hosts: Mapping[str, Host]) -> Host:
    """Return a manager of the swarm among the hosts.

    Raises HostError if the hosts are not in one swarm, or none of them is a manager.
    """
    for host in hosts.values():
        check_member(host)
    managers = [host for host in hosts.values() if host.is_manager]
    if not managers:
        addresses = ", ".join(next(iter(hosts.values())).managers)
        raise HostError(
            f"no manager of the swarm among {', '.join(hosts)}: add the context of one of {addresses}"
        )
    first = managers[0]
    for host in hosts.values():
        # Workers know the managers of their swarm, but not its ID, so the managers are compared.
        if host.managers != first.managers:
            raise HostError(
                f"{first.name} and {host.name} are in two swarms: run 'docker --context {host.name} swarm leave', "
                f"then join {host.name} to the swarm of {first.name}"
            )
    return first


def check_member(host: Host) -> None:
    """Raise HostError if a host is not in a swarm or its Docker is too old."""
    if not host.address:
        raise HostError(
            f"{host.name} is not in a swarm: run 'docker --context HOST swarm init' on one host and "
            "'swarm join' on the others"
        )
    if int(host.version.split(".")[0]) < OLDEST_VERSION:
        raise HostError(
            f"{host.name} has Docker {host.version}: install version {OLDEST_VERSION} or later there"
        )


def _forward_socket(name: str, url: str) -> Path:
    """Return the path of a local socket leading to a remote engine over a single ssh connection.

    By default, sshd permits ten sessions on a connection; connections to a forwarded socket do not count as sessions.
    The only session runs `cat`: it ends when this process ends or is killed, and the ssh connection ends with it.
    Raises HostError if ssh is missing or fails.
    """
    if shutil.which("ssh") is None:
        raise HostError(
            f"{name}: {url} needs ssh, which is not installed here: apt-get install openssh-client"
        )
    folder = Path(tempfile.mkdtemp(prefix="testbed-ssh-"))
    path = folder / "engine"
    target = _ssh_arguments(url)
    # A context such as ssh://user@node1/run/user/1000/docker.sock names a socket other than the default.
    forward = f"{path}:{urlsplit(url).path or SOCKET}"
    process = subprocess.Popen(
        ["ssh", "-T", *_SSH_OPTIONS, "-L", forward, *target, "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # protects from the terminal's Ctrl-C
    )

    def close() -> None:
        process.terminate()
        path.unlink(missing_ok=True)
        folder.rmdir()

    atexit.register(close)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not path.exists():
        has_ended = process.poll() is not None
        if has_ended or time.monotonic() > deadline:
            assert process.stderr is not None
            reason = "no response"
            if has_ended:
                reason = process.stderr.read().decode(errors="replace").strip()
            raise HostError(
                f"{name}: ssh cannot reach {url} ({reason}): try '{' '.join(['ssh', *target])}'"
            )
        time.sleep(0.05)
    return path


_SSH_OPTIONS = (
    "-oBatchMode=yes",  # a question for a password would wait for ever
    "-oExitOnForwardFailure=yes",
    "-oServerAliveInterval=2",  # ends a connection whose other end is silent
    "-oConnectTimeout=6",
)


def _ssh_arguments(url: str) -> list[str]:
    """Return the arguments of ssh for the host of a URL like ``ssh://user@node1:2222``."""
    parts = urlsplit(url)
    port = ["-p", str(parts.port)] if parts.port else []
    user = f"{parts.username}@" if parts.username else ""
    return [*port, f"{user}{parts.hostname}"]
