"""The Docker engine: reach it, start or install it where none answers, and know what it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import requests
from docker.errors import DockerException
from requests.adapters import BaseAdapter

from controller.lab.paths import RECIPES, state_folder
from testbed.common.errors import HostError

Say = Callable[[str], None]

_POOL = 64
_TIMEOUT = 120
_START_PATIENCE = 60.0
PATIENCE = 60.0
"""Seconds for which an engine that has answered may not answer."""
_PAUSE = 0.25


def connect() -> docker.DockerClient:
    """Return a client of the engine that ``DOCKER_HOST`` names, or of the local one.

    Raises HostError where no engine answers; says what to do.
    """
    client: docker.DockerClient | None = None
    try:
        client = docker.from_env(timeout=_TIMEOUT, max_pool_size=_POOL)
        client.ping()
        _be_patient(client)
    except (DockerException, OSError) as error:
        if client is not None:
            client.close()
        raise HostError(_advice(error)) from error
    return client


def connect_to(url: str, tls: Any, timeout: int) -> docker.DockerClient:
    """Return a client of the engine at a URL, which has to answer within ``timeout`` seconds at first.

    Raises what the engine's client does where none answers.
    """
    docker.DockerClient(base_url=url, tls=tls or False, timeout=timeout, version="auto").close()
    client = docker.DockerClient(base_url=url, tls=tls or False, timeout=_TIMEOUT, max_pool_size=_POOL)
    _be_patient(client)
    return client


def _be_patient(client: docker.DockerClient) -> None:
    for prefix, adapter in list(client.api.adapters.items()):
        client.api.mount(prefix, _Patient(adapter))


class _Patient(BaseAdapter):
    """Repeats requests while the engine, which has answered before, does not: it may be restarting.

    Raises HostError once it has not answered for `PATIENCE` seconds. What is repeated may have been done already: who
    makes something gives it a name, and takes a conflict for success.
    """

    def __init__(self, inner: BaseAdapter) -> None:
        super().__init__()
        self._inner = inner

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        """Send a request, again and again; what is streamed to the engine only once."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return self._inner.send(request, *arguments, **options)
            except requests.ReadTimeout as error:
                raise HostError(f"the container engine took more than {_TIMEOUT} s for a request") from error
            except requests.ConnectionError as error:
                if time.monotonic() > until or not isinstance(request.body, bytes | str | None):
                    text = f"the container engine has not answered for {PATIENCE:.0f} s ({_reason(str(error))})"
                    raise HostError(text) from error
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Let go of all connections."""
        self._inner.close()


def ensure_engine(say: Say) -> docker.DockerClient:
    """Return a client; start the engine, or install Debian's, where none answers and we are root.

    An engine named by ``DOCKER_HOST`` is somebody else's: it is used or reported, never started.
    """
    try:
        return connect()
    except HostError:
        if not _may_start():
            raise
    if shutil.which("dockerd") is None:
        install_packages(["docker.io", "cgroupfs-mount"], say, why="no Docker engine answers and none is installed")
    try:
        return connect()  # the package may have started it
    except HostError:
        return _start(say)


def refuse_rootless(client: docker.DockerClient) -> None:
    """Raise HostError for an engine whose containers may not see the host's processes, as the shaper has to."""
    if "name=rootless" in (client.info().get("SecurityOptions") or ()):
        raise HostError(
            "the container engine is rootless: the shaper may not enter the network namespaces of devices there; "
            "use an engine that root started (DOCKER_HOST=unix:///var/run/docker.sock), or '--runtime simulate'"
        )


def facts(client: docker.DockerClient) -> dict[str, Any]:
    """Return what the engine says of itself and of the machine it runs on; ``memory`` is in bytes."""
    info, version = client.info(), client.version()
    parts = [str(part.get("Name", "")) for part in version.get("Components") or ()]
    return {
        "name": "Podman" if any(part.startswith("Podman") for part in parts) else "Docker",
        "version": str(version.get("Version", "")),
        "api": str(version.get("ApiVersion", "")),
        "kernel": str(info.get("KernelVersion", "")),
        "architecture": str(info.get("Architecture", "")),
        "system": str(info.get("OperatingSystem", "")),
        "cgroup": f"v{info.get('CgroupVersion', '1')} ({info.get('CgroupDriver', '')})",
        "storage": str(info.get("Driver", "")),
        "cores": int(info.get("NCPU", 0)),
        "memory": int(info.get("MemTotal", 0)),
    }


def refusal_within(seconds: float, ask: Callable[[], object]) -> str:
    """Return why the engine refuses something, an empty text where it does it.

    It gives up on a registry that swallows packets only after minutes; here nobody waits longer than ``seconds``.
    """
    answers: list[str] = []

    def attempt() -> None:
        try:
            ask()
            answers.append("")
        except (DockerException, OSError) as error:
            answers.append(_last_line(str(getattr(error, "explanation", None) or error)))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:.0f} s"


def is_local(host: str | None = None) -> bool:
    """Return whether ports that the engine publishes on its loopback can be reached from here."""
    host = os.environ.get("DOCKER_HOST", "") if host is None else host
    if not host or host.startswith(("unix://", "/")):
        return True
    return urlsplit(host).hostname in ("localhost", "127.0.0.1", "::1")


def install_packages(packages: list[str], say: Say, why: str) -> None:
    """Install Debian packages, saying so; the caller is root.

    Raises HostError where this is no Debian, or apt failed; says what to run by hand.
    """
    say(f"{why}: apt-get install {' '.join(packages)}")
    command = ["sh", str(RECIPES / "install"), why, *packages]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise HostError(_last_line(done.stdout))


def _may_start() -> bool:
    return os.geteuid() == 0 and not os.environ.get("DOCKER_HOST")


def _advice(error: BaseException) -> str:
    """Say why no engine answers, in terms of what the user can do."""
    host = os.environ.get("DOCKER_HOST")
    if host:
        reason = _reason(str(error))
        return f"no Docker engine answers at DOCKER_HOST={host} ({reason}): start it, or unset DOCKER_HOST"
    if "Permission denied" in str(error):
        return (
            "the Docker engine refuses this user: add the user to the group 'docker' (sudo usermod -aG docker "
            f"{os.environ.get('USER', '$USER')}) and log in again, or run as root"
        )
    if shutil.which("dockerd") is None:
        return "there is no Docker engine: run 'testbed images' once as root, or 'sudo apt-get install docker.io'"
    return "no Docker engine answers: start it with 'sudo systemctl start docker', or run once as root"


def _reason(text: str) -> str:
    """Shorten what the client's layers make of a refused connection."""
    known = {"FileNotFoundError": "there is no such socket", "Connection refused": "connection refused"}
    return next((short for long, short in known.items() if long in text), _last_line(text))


def _start(say: Say) -> docker.DockerClient:
    """Start the installed engine, with systemd where that runs, and wait until it answers."""
    if Path("/run/systemd/system").is_dir():
        say("starting the Docker engine: systemctl start docker")
        subprocess.run(["systemctl", "start", "docker"], check=False, stdin=subprocess.DEVNULL)
        return _wait(None, "journalctl -u docker")
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
            start_new_session=True,  # it outlives this command and its terminal
        )
    return _wait(process, str(log))


def _wait(process: subprocess.Popen[bytes] | None, log: str) -> docker.DockerClient:
    deadline = time.monotonic() + _START_PATIENCE
    while True:
        try:
            return connect()
        except HostError:
            if process is not None and process.poll() is not None:
                raise HostError(f"the Docker engine does not start: {_complaint(Path(log))} (see {log})") from None
            if time.monotonic() > deadline:
                raise HostError(f"the Docker engine does not answer after {_START_PATIENCE:.0f} s: see {log}") from None
        time.sleep(0.1)


def _mount_cgroups() -> None:
    """Mount the control groups where nothing has: no init system did it for us."""
    if any(line.split()[2].startswith("cgroup") for line in Path("/proc/mounts").read_text().splitlines()):
        return
    helper = shutil.which("cgroupfs-mount")
    command = [helper] if helper else ["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"]
    subprocess.run(command, check=False, stdin=subprocess.DEVNULL)


def _path_with_working_iptables() -> str:
    """Return PATH with the legacy iptables in front where the kernel lacks nf_tables, which Debian's default needs.

    The system's own choice of iptables is left as it is.
    """
    path = os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    path = os.pathsep.join(
        [path, *(folder for folder in ("/usr/sbin", "/sbin") if folder not in path.split(os.pathsep))]
    )
    current, legacy = shutil.which("iptables", path=path), shutil.which("iptables-legacy", path=path)
    if current is None or legacy is None or _works(current) or not _works(legacy):
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


def _works(iptables: str) -> bool:
    done = subprocess.run([iptables, "-t", "nat", "-S"], capture_output=True, stdin=subprocess.DEVNULL)
    return done.returncode == 0


def _complaint(log: Path) -> str:
    """Return the last line of the engine's log that says what failed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    serious = [line for line in lines if "level=" not in line or "level=error" in line or "level=fatal" in line]
    return (serious or lines or ["no word of why"])[-1]


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
