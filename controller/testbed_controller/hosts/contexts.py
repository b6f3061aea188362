"""Engines of other hosts, by the docker contexts that the user has made: ``unix://``, ``tcp://`` and ``ssh://``."""

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
"""Version of an engine; older ones were never tried on one network with these."""


@dataclass(frozen=True)
class Host:
    """An engine that answers, and what its swarm says of it."""

    name: str
    """Name of its docker context."""
    client: docker.DockerClient
    reached: EngineAddress
    """The address at which the engine is reached from here."""
    socket: str
    """Where the engine listens on its own host."""
    engine: str
    """Its id: of the node in the swarm, or where it is in none, the engine's own."""
    node: str
    """Its name in the swarm, which is the host's."""
    address: str
    """In the swarm; empty where it is in none."""
    manages: bool
    """Whether it is a manager of the swarm."""
    swarm: str
    """The swarm's id, as managers know it; empty on workers."""
    managers: tuple[str, ...]
    """Addresses of the swarm's managers, as the node knows them."""
    cores: int
    memory: int
    """Bytes."""
    version: str
    kernel: str


def reach(name: str) -> Host:
    """Connect to the engine of a context.

    Raises InputError where there is no such context; HostError where no engine answers.
    """
    engine = find_context(name)
    given, where = engine.url, SOCKET
    if urlsplit(given).scheme == "unix":
        where = urlsplit(given).path
    elif engine.is_ssh:
        engine = replace(engine, url=f"unix://{_forwarded(name, given)}")
    elif not engine.certificates and not engine.is_local:
        text = "is open to everybody on the way: give the context certificates, or use ssh://"
        raise InputError(f"{name}: {given} {text}")
    try:
        client = connect_to(engine, ANSWER_SECONDS)
        info = client.info()
    except (DockerException, OSError) as error:
        raise HostError(f"{name}: no engine answers at {given} ({error}): try 'docker --context {name} info'") from None
    swarm = info["Swarm"]
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
        managers=tuple(sorted(each["Addr"] for each in swarm.get("RemoteManagers") or ())),
        cores=int(info["NCPU"]),
        memory=int(info["MemTotal"]),
        version=str(info["ServerVersion"]),
        kernel=str(info["KernelVersion"]),
    )


def reach_all(names: Sequence[str]) -> dict[str, Host]:
    """Connect to several at once.

    Raises InputError or HostError as `reach` does, and where two names lead to one engine.
    """
    with ThreadPoolExecutor(len(names)) as pool:
        hosts = dict(zip(names, pool.map(reach, names), strict=True))
    engines: dict[str, str] = {}
    for name, host in hosts.items():
        if (other := engines.setdefault(host.engine, name)) != name:
            raise InputError(f"--hosts: the contexts {other} and {name} lead to one engine: leave one of them away")
    return hosts


def manager(hosts: Mapping[str, Host]) -> Host:
    """Return the host that makes the networks of all; raises HostError where they are not of one swarm."""
    outside = [name for name, host in hosts.items() if not host.address]
    if outside:
        raise HostError(
            f"{', '.join(outside)} is in no swarm: 'docker --context HOST swarm init' on one, and 'swarm join' on the "
            "others, makes one"
        )
    for host in hosts.values():
        if int(host.version.split(".")[0]) < OLDEST:
            raise HostError(f"{host.name} has Docker {host.version}, older than {OLDEST}: install a later one there")
    managers = [host for host in hosts.values() if host.manages]
    if not managers:
        known = ", ".join(next(iter(hosts.values())).managers)
        raise HostError(f"no manager of the swarm is among {', '.join(hosts)}: add the context of one of {known}")
    for host in hosts.values():
        if host.managers != managers[0].managers:
            raise HostError(
                f"{managers[0].name} and {host.name} are in two swarms: 'docker --context {host.name} swarm leave', "
                f"then join it to that of {managers[0].name}"
            )
    return managers[0]


def _forwarded(name: str, url: str) -> Path:
    """Return a socket here that leads to the engine's over one ssh connection, kept open by this process.

    Forwarded sockets are no sessions, of which sshd allows ten to a connection; the one session is that of `cat`, whose
    input ends with this process, also when it is killed, and the connection with it.
    Raises HostError where there is no ssh here, or it does not reach the host.
    """
    if shutil.which("ssh") is None:
        raise HostError(f"{name}: {url} needs ssh, which is not installed here: apt-get install openssh-client")
    folder = Path(tempfile.mkdtemp(prefix="testbed-ssh-"))
    path, parts = folder / "engine", urlsplit(url)
    port = ["-p", str(parts.port)] if parts.port else []
    user = f"{parts.username}@" if parts.username else ""
    options = [
        f"-o{each}"
        for each in ("BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=2", "ConnectTimeout=6")
    ]
    target = [*port, f"{user}{parts.hostname}"]
    command = ["ssh", "-T", *options, "-L", f"{path}:{parts.path or SOCKET}", *target, "cat"]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=nothing, stderr=pipe, start_new_session=True)

    def close() -> None:
        process.terminate()
        path.unlink(missing_ok=True)
        folder.rmdir()

    atexit.register(close)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            assert process.stderr is not None
            said = process.stderr.read().decode(errors="replace").strip() if process.poll() is not None else "no answer"
            raise HostError(f"{name}: {url} is not reached by ssh ({said}): try '{' '.join(['ssh', *target])}'")
        time.sleep(0.05)
    return path
