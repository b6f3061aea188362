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

import docker
import requests
from docker.errors import DockerException
from docker.tls import TLSConfig
from requests.adapters import BaseAdapter

from testbed.common.errors import HostError
from testbed_controller.lab import runstate
from testbed_controller.lab.engineaddress import CERTIFICATES, EngineAddress, chosen_engine
from testbed_controller.lab.paths import RECIPES, state_folder

Say = Callable[[str], None]

_POOL = 64
_TIMEOUT = 120
ANSWER_SECONDS = 8
"""For an engine of another machine to answer the first time."""
_START_PATIENCE = 60.0
PATIENCE = 60.0
"""Seconds for which an engine that has answered may not answer."""
_PAUSE = 0.25
SIMULATE = "'--runtime simulate' needs no engine"


def connect(engine: EngineAddress | None = None) -> docker.DockerClient:
    """Return a client of an engine, by default of the one that the user means; see `chosen_engine`.

    Raises HostError where no engine answers, with the reason and the remedy.
    """
    engine = engine or chosen_engine()
    if engine.is_ssh:
        raise HostError(f"{engine.title} is reached by ssh: {_hosts_advice(engine)}")
    try:
        return connect_to(engine, _TIMEOUT if engine.is_local else ANSWER_SECONDS)
    except (DockerException, OSError) as error:
        raise HostError(_advice(engine, error)) from error


def connect_to(engine: EngineAddress, timeout: int) -> docker.DockerClient:
    """Return a client of an engine, which has to answer within ``timeout`` seconds at first.

    Raises the errors of docker-py where no engine answers.
    """
    tls: Any = certificates_of(engine) or False
    if timeout < _TIMEOUT:
        docker.DockerClient(base_url=engine.url, tls=tls, timeout=timeout, version="auto").close()
    client = docker.DockerClient(base_url=engine.url, tls=tls, timeout=_TIMEOUT, version="auto", max_pool_size=_POOL)
    _be_patient(client)
    # Nothing private is pulled, and the client asks all credential helpers of the user's for a build.
    client.api.reload_config(str(RECIPES / "anonymous.json"))
    return client


def connect_to_run(run: str) -> docker.DockerClient:
    """Return a client of the engine that a run was made on, whichever the user means now.

    A run of another user is looked for on the engine that this user means. Raises HostError as `connect` does.
    """
    return connect(runstate.read(run).engine if run in runstate.runs() else None)


def connect_to_all() -> dict[EngineAddress, docker.DockerClient]:
    """Return the engine that the user means now, and those on which this user's runs are.

    Engines that do not answer are left out; raises HostError where none does.
    """
    states = [runstate.read(run) for run in runstate.runs()]
    remembered = [state.engine for state in states if state.engine is not None and not state.hosts]
    found: dict[EngineAddress, docker.DockerClient] = {}
    refusals: list[HostError] = []
    for engine in dict.fromkeys([chosen_engine(), *remembered]):
        if engine.url in {each.url for each in found}:
            continue
        try:
            found[engine] = connect(engine)
        except HostError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


class _Certificates(TLSConfig):
    """Those of a context, also where ``REQUESTS_CA_BUNDLE`` names others, which requests would prefer."""

    def configure_client(self, client: docker.APIClient) -> None:
        """Have the client of an engine use them."""
        super().configure_client(client)
        client.trust_env = False


def certificates_of(engine: EngineAddress) -> TLSConfig | None:
    """Return the certificates for an engine; None where it is spoken to without TLS."""
    if not engine.certificates:
        return None
    ca, certificate, key = (str(Path(engine.certificates) / name) for name in CERTIFICATES)
    return _Certificates(client_cert=(certificate, key), ca_cert=ca, verify=engine.verify)


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


def ensure_engine(say: Say, engine: EngineAddress | None = None) -> docker.DockerClient:
    """Return a client; start the engine, or install Debian's, where none answers and we are root.

    An engine that the user chose by ``DOCKER_HOST`` or a docker context is used or reported, never started.
    """
    engine = engine or chosen_engine()
    try:
        return connect(engine)
    except HostError:
        if not may_start(engine):
            raise
    if shutil.which("dockerd") is None:
        install_packages(["docker.io", "cgroupfs-mount"], say, why="no Docker engine answers and none is installed")
    try:
        return connect(engine)  # the package may have started it
    except HostError:
        return _start(say)


def lab_problem(client: docker.DockerClient, engine: EngineAddress) -> tuple[str, str] | None:
    """Return why no lab can be on an engine, and the remedy; None where one can."""
    if not engine.is_local:
        reason = f"{engine.title} is another machine, whose published ports are out of reach from here"
        return reason, _hosts_advice(engine)
    options = client.info().get("SecurityOptions") or ()
    for option, reason in _REFUSED_OPTIONS.items():
        if option in options:
            return reason, "use an engine without it, by DOCKER_HOST or a docker context"
    return None


_REFUSED_OPTIONS = {
    "name=rootless": "the container engine is rootless: the shaper may not enter the network namespaces of devices",
    "name=userns": "the container engine remaps user namespaces (userns-remap): the shaper may not see the devices' "
    "processes, nor enter their network namespaces",
}
"""Security options of an engine, as it lists them, and why no lab can be there."""


def refuse_unusable(client: docker.DockerClient, engine: EngineAddress) -> None:
    """Raise HostError for an engine on which no lab can be."""
    problem = lab_problem(client, engine)
    if problem is not None:
        raise HostError("; ".join([*problem, SIMULATE]))


_LIMITS = {"memory": "MemoryLimit", "processes": "PidsLimit"}
"""Limits of containers that need a controller of control groups, and how an engine reports it."""


def facts(client: docker.DockerClient) -> dict[str, Any]:
    """Return what the engine says of itself and of the machine it runs on.

    ``memory`` is in bytes; ``unlimited`` names the limits of containers that this machine's kernel ignores.
    """
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
        "unlimited": [name for name, key in _LIMITS.items() if not info.get(key)],
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


def may_start(engine: EngineAddress) -> bool:
    """Return whether an engine that does not answer may be installed or started here."""
    return os.geteuid() == 0 and not engine.chosen


def _hosts_advice(engine: EngineAddress) -> str:
    if engine.context:
        return f"run testbed on that machine, or here with '--hosts {engine.context}' (docs/hosts.md)"
    context = f"'docker context create NAME --docker host={engine.url}'"
    return f"run testbed on that machine, or make a docker context by {context} and add '--hosts NAME' (docs/hosts.md)"


def _advice(engine: EngineAddress, error: BaseException) -> str:
    """Return why no engine answers, and the remedy."""
    if engine.chosen:
        reason = f"no Docker engine answers at {engine.title} ({_reason(str(error))})"
        return f"{reason}: start it, or {engine.switch_back}; {SIMULATE}"
    if "Permission denied" in str(error):
        return (
            "the Docker engine refuses this user: add the user to the group 'docker' (sudo usermod -aG docker "
            f"{os.environ.get('USER', '$USER')}) and log in again, or run as root; {SIMULATE}"
        )
    if shutil.which("dockerd") is None:
        remedy = "run 'testbed setup images' once as root, or 'sudo apt-get install docker.io'"
        return f"there is no Docker engine: {remedy}; {SIMULATE}"
    return f"no Docker engine answers: start it with 'sudo systemctl start docker', or run once as root; {SIMULATE}"


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
            return connect(EngineAddress())
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
