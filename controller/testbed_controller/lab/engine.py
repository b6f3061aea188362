"""The Docker engine: connection, installation, start, and its properties."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import DockerException
from docker.tls import TLSConfig
from requests.adapters import BaseAdapter

from testbed.common.errors import HostError
from testbed_controller.lab import runstate
from testbed_controller.lab.engineaddress import (
    CERTIFICATES,
    EngineAddress,
    chosen_engine,
)
from testbed_controller.lab.paths import RECIPES, state_folder

Say = Callable[[str], None]
"""A function that shows the user a line about the progress."""

_POOL_SIZE = 64
"""Maximum number of connections kept open to an engine, since containers are started concurrently."""
_REQUEST_SECONDS = 120
"""Time-out of a request to an engine in seconds: an engine that starts many containers answers late."""
ANSWER_SECONDS = 8
"""Time-out of the first response of a remote engine, in seconds."""
_START_SECONDS = 60.0
"""Time for a starting engine to respond, in seconds."""
PATIENCE = 60.0
"""Time, in seconds, during which an engine that has responded before may be silent."""
_RETRY_SECONDS = 0.25
"""Pause between two attempts to reach an engine, in seconds."""
SIMULATE_ADVICE = "'--runtime simulate' needs no engine"


def connect(engine: EngineAddress | None = None) -> docker.DockerClient:
    """Return a client of an engine, by default the chosen one (see `chosen_engine`).

    Raises HostError with the reason and the remedy if no engine responds.
    """
    engine = engine or chosen_engine()
    if engine.is_ssh:
        raise HostError(f"{engine.title} is reached by ssh: {_hosts_advice(engine)}")
    try:
        return connect_to(
            engine, _REQUEST_SECONDS if engine.is_local else ANSWER_SECONDS
        )
    except (DockerException, OSError) as error:
        raise HostError(_explain_missing_engine(engine, error)) from error


def connect_to(engine: EngineAddress, timeout: int) -> docker.DockerClient:
    """Return a client of an engine whose first response must arrive within ``timeout`` seconds.

    Raises the errors of docker-py if no engine responds.
    """
    tls: Any = certificates_of(engine) or False
    if timeout < _REQUEST_SECONDS:
        # A client has one time-out for all requests. For the first request, a separate client has a shorter one.
        probe_client = docker.DockerClient(
            base_url=engine.url, tls=tls, timeout=timeout, version="auto"
        )
        probe_client.close()
    client = docker.DockerClient(
        base_url=engine.url,
        tls=tls,
        timeout=_REQUEST_SECONDS,
        version="auto",
        max_pool_size=_POOL_SIZE,
    )
    _retry_requests(client)
    # Use no credentials: all images are public, and a build would query every credential helper of the user.
    client.api.reload_config(str(RECIPES / "anonymous.json"))
    return client


def connect_to_run(run: str) -> docker.DockerClient:
    """Return a client of the engine on which a run was created, whichever engine is chosen now.

    Runs of other users are expected on the chosen engine. Raises HostError as `connect` does.
    """
    return connect(runstate.engine_of(run))


def connect_to_all() -> dict[EngineAddress, docker.DockerClient]:
    """Return clients of the chosen engine and of all engines with runs of the user.

    Unresponsive engines are skipped; raises HostError if none responds.
    """
    engines = [chosen_engine()]
    for state in runstate.readable():
        if state.engine is not None and not state.hosts:
            engines.append(state.engine)
    clients: dict[EngineAddress, docker.DockerClient] = {}
    refusals: list[HostError] = []
    for engine in dict.fromkeys(engines):
        # A context and DOCKER_HOST may lead to the same engine.
        if any(engine.url == connected.url for connected in clients):
            continue
        try:
            clients[engine] = connect(engine)
        except HostError as error:
            refusals.append(error)
    if not clients:
        raise refusals[0]
    return clients


class _Certificates(TLSConfig):
    """Certificates of a docker context, which take precedence over ``REQUESTS_CA_BUNDLE``."""

    def configure_client(self, client: docker.APIClient) -> None:
        """Apply the certificates to a client."""
        super().configure_client(client)
        client.trust_env = False


def certificates_of(engine: EngineAddress) -> TLSConfig | None:
    """Return the certificates for an engine; None without TLS."""
    if not engine.certificates:
        return None
    folder = Path(engine.certificates)
    ca, certificate, key = [str(folder / name) for name in CERTIFICATES]
    return _Certificates(
        client_cert=(certificate, key), ca_cert=ca, verify=engine.verify
    )


def _retry_requests(client: docker.DockerClient) -> None:
    # The adapters are replaced, because all functions of docker-py send their requests through them.
    for prefix, adapter in list(client.api.adapters.items()):
        client.api.mount(prefix, _RetryingAdapter(adapter))


class _RetryingAdapter(BaseAdapter):
    """A transport adapter repeating requests while the engine is silent, for example during a restart.

    Raises HostError after `PATIENCE` seconds. A repeated request may already have been executed, so callers choose
    names themselves and treat a name conflict as success.
    """

    def __init__(self, inner: BaseAdapter) -> None:
        super().__init__()
        self._inner = inner

    def send(
        self, request: requests.PreparedRequest, *arguments: Any, **options: Any
    ) -> requests.Response:
        """Send a request repeatedly until the engine responds; a streamed body is sent once only."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self._inner.send(request, *arguments, **options)
            except requests.ReadTimeout as error:
                raise HostError(
                    f"the container engine took more than {_REQUEST_SECONDS} s for a request"
                ) from error
            except requests.ConnectionError as error:
                # A streamed body is partly consumed, and cannot be sent again.
                is_repeatable = isinstance(request.body, bytes | str | None)
                if time.monotonic() > until or not is_repeatable:
                    reason = _shorten_error(str(error))
                    raise HostError(
                        f"the container engine has not answered for {PATIENCE:.0f} s ({reason})"
                    ) from error
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Close all connections."""
        self._inner.close()


def ensure_engine(say: Say, engine: EngineAddress | None = None) -> docker.DockerClient:
    """Return a client; as root, start or install Debian's engine if none responds.

    An engine chosen by ``DOCKER_HOST`` or a docker context is never started. Raises HostError if no engine responds.
    """
    engine = engine or chosen_engine()
    try:
        return connect(engine)
    except HostError:
        if not can_start_engine(engine):
            raise
    if shutil.which("dockerd") is None:
        install_packages(
            ["docker.io", "cgroupfs-mount"],
            say,
            why="no Docker engine responds and none is installed",
        )
    try:
        return connect(engine)  # the installation may have started the engine
    except HostError:
        return _start_engine(say)


def lab_problem(
    client: docker.DockerClient, engine: EngineAddress
) -> tuple[str, str] | None:
    """Return (reason, remedy) for an engine that cannot host a lab; None for a suitable engine."""
    if not engine.is_local:
        reason = f"{engine.title} is another machine, whose published ports are unreachable from this one"
        return reason, _hosts_advice(engine)
    options = client.info().get("SecurityOptions") or ()
    for option, reason in _REFUSED_OPTIONS.items():
        if option in options:
            remedy = "choose another engine with DOCKER_HOST or a docker context"
            return reason, remedy
    return None


_REFUSED_OPTIONS = {
    "name=rootless": "the container engine is rootless: the shaper may not enter the network namespaces of devices",
    "name=userns": "the container engine remaps user namespaces (userns-remap): the shaper may not see the devices' "
    "processes, nor enter their network namespaces",
}
"""Security options that prevent a lab, by their names in the engine's info, with the reason."""


def refuse_unusable(client: docker.DockerClient, engine: EngineAddress) -> None:
    """Raise HostError for an engine that cannot host a lab, with the reason and the remedy."""
    problem = lab_problem(client, engine)
    if problem is not None:
        raise HostError("; ".join([*problem, SIMULATE_ADVICE]))


_LIMITS = {"memory": "MemoryLimit", "processes": "PidsLimit"}
"""Container limits that need a cgroup controller, with the engine's key for each."""


def facts(client: docker.DockerClient) -> dict[str, Any]:
    """Return properties of the engine and the machine.

    ``memory`` is in bytes; ``unlimited`` lists the container limits that the machine's kernel ignores.
    """
    info = client.info()
    version = client.version()
    name = "Docker"
    for part in version.get("Components") or ():
        if str(part.get("Name", "")).startswith("Podman"):
            name = "Podman"
    return {
        "name": name,
        "version": str(version.get("Version", "")),
        "api": str(version.get("ApiVersion", "")),
        "kernel": str(info.get("KernelVersion", "")),
        "architecture": str(info.get("Architecture", "")),
        "system": str(info.get("OperatingSystem", "")),
        "cgroup": f"v{info.get('CgroupVersion', '1')} ({info.get('CgroupDriver', '')})",
        "storage": str(info.get("Driver", "")),
        "cores": int(info.get("NCPU", 0)),
        "memory": int(info.get("MemTotal", 0)),
        "unlimited": [name for name, key in _LIMITS.items() if not info.get(key)],
    }


def describe_refusal_within(seconds: float, ask: Callable[[], object]) -> str:
    """Return the reason why an engine refuses an operation, or an empty text on success.

    The engine waits minutes for a registry that drops packets; this function returns after ``seconds``.
    """
    answers: list[str] = []

    def attempt() -> None:
        try:
            ask()
            answers.append("")
        except (DockerException, OSError) as error:
            reason = getattr(error, "explanation", None) or error
            answers.append(_last_line(str(reason)))

    # A daemon thread, because an unanswered request must not keep the process running.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no response within {seconds:.0f} s"


def install_packages(packages: list[str], say: Say, why: str) -> None:
    """Install Debian packages as root, and report the command with ``say``.

    Raises HostError with a manual command if the installation fails or the system is not Debian.
    """
    say(f"{why}: apt-get install {' '.join(packages)}")
    command = ["sh", str(RECIPES / "install"), why, *packages]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise HostError(_last_line(result.stdout))


def can_start_engine(engine: EngineAddress) -> bool:
    """Return whether an unresponsive engine may be installed or started by the testbed."""
    return os.geteuid() == 0 and not engine.chosen


def _hosts_advice(engine: EngineAddress) -> str:
    if engine.context:
        return f"run testbed on that machine, or here with '--hosts {engine.context}' (docs/hosts.md)"
    context = f"'docker context create NAME --docker host={engine.url}'"
    return f"run testbed on that machine, or create a context with {context} and add '--hosts NAME' (docs/hosts.md)"


def _explain_missing_engine(engine: EngineAddress, error: BaseException) -> str:
    """Return the reason why no engine responds, and the remedy."""
    if engine.chosen:
        reason = f"no Docker engine responds at {engine.title} ({_shorten_error(str(error))})"
        return f"{reason}: start it, or {engine.local_engine_advice}; {SIMULATE_ADVICE}"
    if "Permission denied" in str(error):
        return (
            "the Docker engine refuses this user: add the user to the group 'docker' (sudo usermod -aG docker "
            f"{os.environ.get('USER', '$USER')}) and log in again, or run as root; {SIMULATE_ADVICE}"
        )
    if shutil.which("dockerd") is None:
        remedy = "run 'testbed setup images' once as root, or 'sudo apt-get install docker.io'"
        return f"no Docker engine is installed: {remedy}; {SIMULATE_ADVICE}"
    remedy = "start it with 'sudo systemctl start docker', or run once as root"
    return f"the Docker engine does not respond: {remedy}; {SIMULATE_ADVICE}"


def _shorten_error(text: str) -> str:
    """Return a short form of a refused connection's error."""
    short_texts = {
        "FileNotFoundError": "the socket does not exist",
        "Connection refused": "connection refused",
    }
    for long, short in short_texts.items():
        if long in text:
            return short
    return _last_line(text)


def _start_engine(say: Say) -> docker.DockerClient:
    """Start the installed engine, through systemd if available, and wait for a response."""
    if Path("/run/systemd/system").is_dir():
        say("starting the Docker engine: systemctl start docker")
        subprocess.run(
            ["systemctl", "start", "docker"], check=False, stdin=subprocess.DEVNULL
        )
        return _wait_for_engine(None, "journalctl -u docker")
    _mount_cgroups()
    log = state_folder() / "dockerd.log"
    say(f"starting the Docker engine: dockerd (its log: {log})")
    environment = {**os.environ, "PATH": _path_with_working_iptables()}
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["dockerd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # survives this command and its terminal
        )
    return _wait_for_engine(process, str(log))


def _wait_for_engine(
    process: subprocess.Popen[bytes] | None, log: str
) -> docker.DockerClient:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return connect(EngineAddress())
        except HostError:
            if process is not None and process.poll() is not None:
                raise HostError(
                    f"the Docker engine did not start: {_last_error(Path(log))} (see {log})"
                ) from None
            if time.monotonic() > deadline:
                raise HostError(
                    f"the Docker engine did not respond within {_START_SECONDS:.0f} s: see {log}"
                ) from None
        time.sleep(0.1)


def _mount_cgroups() -> None:
    """Mount the control groups if no init system has done so."""
    for line in Path("/proc/mounts").read_text().splitlines():
        if line.split()[2].startswith("cgroup"):
            return
    command = ["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"]
    helper = shutil.which("cgroupfs-mount")
    if helper:
        command = [helper]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL)


def _path_with_working_iptables() -> str:
    """Return PATH, beginning with a folder of the legacy iptables if the kernel lacks nf_tables.

    Debian's iptables uses nf_tables by default. The folder has links, so the choice of the system stays unchanged.
    """
    path = _path_with_system_folders()
    if not _needs_legacy_iptables(path):
        return path
    folder = state_folder() / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("iptables", "ip6tables"):
        for suffix in ("", "-save", "-restore"):
            target = shutil.which(f"{name}-legacy{suffix}", path=path)
            link = folder / f"{name}{suffix}"
            if target and not link.is_symlink():
                link.symlink_to(target)
    return f"{folder}{os.pathsep}{path}"


def _path_with_system_folders() -> str:
    # The PATH of a user who became root by 'su' lacks the folders of iptables.
    path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    folders = path.split(os.pathsep)
    for system_folder in ("/usr/sbin", "/sbin"):
        if system_folder not in folders:
            folders.append(system_folder)
    return os.pathsep.join(folders)


def _needs_legacy_iptables(path: str) -> bool:
    current = shutil.which("iptables", path=path)
    legacy = shutil.which("iptables-legacy", path=path)
    if current is None or legacy is None:
        return False
    return not _iptables_works(current) and _iptables_works(legacy)


def _iptables_works(iptables: str) -> bool:
    # A request is needed, because `iptables --version` succeeds without access to the tables of the kernel.
    result = subprocess.run(
        [iptables, "-t", "nat", "-S"], capture_output=True, stdin=subprocess.DEVNULL
    )
    return result.returncode == 0


def _last_error(log: Path) -> str:
    """Return the last error in the engine's log."""
    last_line = "no reason given"
    last_error = ""
    for line in log.read_text(errors="replace").splitlines():
        if not line.strip():
            continue
        last_line = line
        # The engine's own messages have a level. Lines without a level belong to a crash.
        if "level=" not in line or "level=error" in line or "level=fatal" in line:
            last_error = line
    return last_error or last_line


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
