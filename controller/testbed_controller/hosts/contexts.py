"""Engines of other hosts, reached by docker contexts: ``unix://``, ``tcp://`` and ``ssh://``."""

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

OLDEST = 19
"""Oldest supported engine version; older ones are untested in a common network."""


@dataclass(frozen=True)
class Host:
    """A responding engine, and its state in the swarm."""

    name: str
    """Name of the docker context."""
    client: docker.DockerClient
    reached: EngineAddress
    """Address of the engine from here."""
    socket: str
    """Socket of the engine on its own host."""
    engine: str
    """Node ID in the swarm; otherwise the engine's own ID."""
    node: str
    """Node name in the swarm, which is the host name."""
    address: str
    """Address in the swarm; empty outside a swarm."""
    manages: bool
    """Whether the host is a manager of the swarm."""
    swarm: str
    """ID of the swarm, known to managers only."""
    managers: tuple[str, ...]
    """Addresses of the swarm's managers known to the node."""
    cores: int
    memory: int
    """Bytes."""
    version: str
    kernel: str


def reach(name: str) -> Host:
    """Connect to the engine of a docker context.

    Raises InputError for an unknown context, and HostError if the engine does not respond.
    """
    engine = find_context(name)
    url = engine.url
    where = SOCKET
    if urlsplit(url).scheme == "unix":
        where = urlsplit(url).path
    elif engine.is_ssh:
        engine = replace(engine, url=f"unix://{_forward_socket(name, url)}")
    elif not engine.certificates and not engine.is_local:
        # Whoever reaches an engine is root on its host, and messages to the engine have the run's tokens.
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
    # The engine answers null outside a swarm.
    peers = swarm.get("RemoteManagers") or ()
    return Host(
        name=name,
        client=client,
        reached=engine,
        socket=where,
        engine=str(swarm.get("NodeID") or info["ID"]),
        node=str(info["Name"]),
        address=str(swarm.get("NodeAddr", "")),
        manages=bool(swarm.get("ControlAvailable", False)),
        swarm=str((swarm.get("Cluster") or {}).get("ID", "")),
        managers=tuple(sorted(peer["Addr"] for peer in peers)),
        cores=int(info["NCPU"]),
        memory=int(info["MemTotal"]),
        version=str(info["ServerVersion"]),
        kernel=str(info["KernelVersion"]),
    )


def reach_all(names: Sequence[str]) -> dict[str, Host]:
    """Connect to several hosts concurrently.

    Raises InputError or HostError as `reach` does, and InputError if two contexts lead to one engine.
    """
    with ThreadPoolExecutor(len(names)) as pool:
        hosts = dict(zip(names, pool.map(reach, names), strict=True))
    # On one engine, the shapers and keepers of both hosts would have the same names.
    engines: dict[str, str] = {}
    for name, host in hosts.items():
        other = engines.setdefault(host.engine, name)
        if other != name:
            raise InputError(
                f"--hosts: the contexts {other} and {name} lead to the same engine: remove one of them"
            )
    return hosts


def find_manager(hosts: Mapping[str, Host]) -> Host:
    """Return a host that manages the swarm; raises HostError if the hosts are not in one swarm."""
    for host in hosts.values():
        _check_member(host)
    managers = [host for host in hosts.values() if host.manages]
    if not managers:
        known = ", ".join(next(iter(hosts.values())).managers)
        raise HostError(
            f"no manager of the swarm among {', '.join(hosts)}: add the context of one of {known}"
        )
    first = managers[0]
    for host in hosts.values():
        # Workers do not know the ID of their swarm, but its managers.
        if host.managers != first.managers:
            raise HostError(
                f"{first.name} and {host.name} are in two swarms: run 'docker --context {host.name} swarm leave', "
                f"then join {host.name} to the swarm of {first.name}"
            )
    return first


def _check_member(host: Host) -> None:
    if not host.address:
        raise HostError(
            f"{host.name} is not in a swarm: run 'docker --context HOST swarm init' on one host and "
            "'swarm join' on the others"
        )
    if int(host.version.split(".")[0]) < OLDEST:
        raise HostError(
            f"{host.name} has Docker {host.version}: install version {OLDEST} or later there"
        )


def _forward_socket(name: str, url: str) -> Path:
    """Return a local socket that leads to a remote engine over a single ssh connection.

    Forwarded sockets are not ssh sessions, of which sshd allows ten per connection. The only session runs `cat`, which
    ends, together with the connection, when this process ends or is killed. Raises HostError if ssh is missing or
    fails.
    """
    if shutil.which("ssh") is None:
        raise HostError(
            f"{name}: {url} needs ssh, which is not installed here: apt-get install openssh-client"
        )
    folder = Path(tempfile.mkdtemp(prefix="testbed-ssh-"))
    path = folder / "engine"
    target = _ssh_target(url)
    # A context such as ssh://user@node1/run/user/1000/docker.sock names another socket of the host.
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


def _ssh_target(url: str) -> list[str]:
    """Return the arguments of ssh for the host of a URL, such as ``ssh://user@node1:2222``."""
    parts = urlsplit(url)
    port = ["-p", str(parts.port)] if parts.port else []
    user = f"{parts.username}@" if parts.username else ""
    return [*port, f"{user}{parts.hostname}"]
