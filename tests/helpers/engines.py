"""Several Docker engines on one machine; each acts as a host with its own network namespace, name and data root.

A bridge connects the engines, which form a swarm. The controller reaches them over this bridge by TLS, so a host that
is disconnected from the bridge is unreachable for the controller, too. Engines share the kernel, the clock, the
processors and the files of images. As a program, run as root, ``python -m tests.helpers.engines COUNT COMMAND...`` runs
a command beside such engines, which are its docker contexts h1, h2 and so on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from testbed_controller.lab.engine import connect
from testbed_controller.lab.images import ensure_images
from tests.helpers.image_layers import share_images, unshareable_reason

BRIDGE = "tb-engines"
NETWORK = "10.78.0"
PORT = 2376
START_TIMEOUT = 60.0
# The names of bridge, namespaces and addresses are fixed, so only one process may have engines.
LOCK = Path("/tmp/testbed-engines.lock")
# The mount namespace gets its own /run, for sockets of the engine, and its own /sys, for the host's interfaces.
_START = """\
hostname {host}
mount -t tmpfs tmpfs /run
mount --rbind /sys/fs/cgroup {place}/cgroup; mount -t sysfs sysfs /sys; mount --rbind {place}/cgroup /sys/fs/cgroup
(cd {checkout} && exec {python} -m tests.helpers.ssh_server {address} {keys} {place}/ssh.pid) &
exec dockerd --data-root {place}/data --exec-root {place}/exec --pidfile {place}/pid -H unix://{place}/sock \\
    -H unix:///run/docker.sock -H tcp://{address}:{port} --tlsverify \\
    --tlscacert {keys}/cert.pem --tlscert {keys}/cert.pem --tlskey {keys}/key.pem
"""
_SSH = """\
#!/bin/sh
exec /usr/bin/ssh -i {keys}/id -oStrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -oLogLevel=ERROR "$@"
"""
_PROGRAMS = (
    "dockerd",
    "docker",
    "ip",
    "iptables",
    "nsenter",
    "unshare",
    "setpriv",
    "openssl",
    "ssh",
    "ssh-keygen",
)


def unavailable_reason() -> str:
    """Return why engines cannot be started here, or an empty text."""
    if os.geteuid() != 0:
        return "engines in their own namespaces need root"
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    if missing:
        return f"engines in their own namespaces need {', '.join(missing)}"
    probe = "ip link add tb-try type vxlan id 7 dstport 4790 && ip link del tb-try"
    if subprocess.run(["sh", "-c", probe], capture_output=True).returncode:
        return "this kernel does not support vxlan, which overlay networks need"
    if os.environ.get("TESTBED_ENGINES"):
        return ""
    reason = unshareable_reason(connect())
    if reason:
        return f"{reason}, so each engine loads its images for minutes; TESTBED_ENGINES=1 accepts this"
    return ""


def run_checked(*command: str) -> str:
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, f"{' '.join(command)}: {completed.stderr}"
    return completed.stdout


def disconnect_host(number: int) -> None:
    """Disconnect a host from the other hosts and the controller, while its engine and containers keep running."""
    run_checked("ip", "link", "set", f"tb-h{number}-o", "down")


def reconnect_host(number: int) -> None:
    run_checked("ip", "link", "set", f"tb-h{number}-o", "up")


@contextlib.contextmanager
def start_engines(folder: Path, count: int) -> Iterator[list[str]]:
    """Start engines h1, h2, ... in one swarm managed by h1, and yield the names of the docker contexts.

    The contexts are in ``folder / "docker"``, for ``DOCKER_CONFIG``. An ``ssh`` that reaches root on each host is in
    ``folder / "bin"``, for ``PATH``. A lock admits one caller at a time.
    """
    namespaces = [f"tb-h{number}" for number in range(1, count + 1)]
    folders = [folder / f"h{number}" for number in range(1, count + 1)]
    keys = folder / "keys"
    client = connect()
    images = ensure_images(client, print)
    with contextlib.ExitStack() as stack:
        fcntl.flock(stack.enter_context(LOCK.open("w")), fcntl.LOCK_EX)
        _remove_leftovers(namespaces)
        _create_keys(keys, count)
        _write_ssh(folder / "bin/ssh", keys)
        _add_bridge(stack)
        for number, (namespace, place) in enumerate(
            zip(namespaces, folders, strict=True), 1
        ):
            (place / "cgroup").mkdir(parents=True)
            tags = [images.device, images.shaper]
            mounts = share_images(client, tags, place / "data")
            _add_namespace(stack, namespace, number)
            engine = _start_engine(namespace, number, place, keys, mounts)
            stack.callback(_stop_engine, place, engine)
        for place in folders:
            _wait_until_ready(place)
        _join_swarm(folders)
        for number, place in enumerate(folders, 1):
            _create_context(folder / "docker", place.name, number, keys)
        yield [place.name for place in folders]


def _address(number: int) -> str:
    return f"{NETWORK}.1{number}"


def _remove_leftovers(namespaces: list[str]) -> None:
    """Remove the interfaces and namespaces of an earlier, killed process."""
    commands = [f"ip link del {BRIDGE}"]
    commands += [f"ip link del {name}-o; ip netns del {name}" for name in namespaces]
    for command in commands:
        subprocess.run(["sh", "-c", command], capture_output=True)


def _create_keys(keys: Path, count: int) -> None:
    """Create an ssh key, and a TLS certificate for the addresses of all engines."""
    keys.mkdir(parents=True)
    run_checked("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id"))
    addresses = ",".join(f"IP:{_address(number)}" for number in range(1, count + 1))
    options = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engines"]
    options += ["-addext", f"subjectAltName={addresses}"]
    files = ["-keyout", str(keys / "key.pem"), "-out", str(keys / "cert.pem")]
    run_checked("openssl", "req", "-x509", *options, *files)


def _write_ssh(ssh: Path, keys: Path) -> None:
    ssh.parent.mkdir()
    ssh.write_text(_SSH.format(keys=keys))
    ssh.chmod(0o755)


def _add_bridge(stack: contextlib.ExitStack) -> None:
    """Add the bridge between hosts, and schedule the removal in ``stack``."""
    run_checked("ip", "link", "add", BRIDGE, "type", "bridge")
    stack.callback(run_checked, "ip", "link", "del", BRIDGE)
    run_checked("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
    run_checked("ip", "link", "set", BRIDGE, "up")
    # With br_netfilter, the engine of this machine drops packets that pass other bridges.
    for direction in ("-i", "-o"):
        rule = ("FORWARD", direction, BRIDGE, "-j", "ACCEPT")
        run_checked("iptables", "-w", "-I", *rule)
        stack.callback(run_checked, "iptables", "-w", "-D", *rule)


def _add_namespace(stack: contextlib.ExitStack, namespace: str, number: int) -> None:
    """Add the network namespace of a host, connect it to the bridge, and remove both with ``stack``."""
    outer = f"{namespace}-o"
    run_checked("ip", "netns", "add", namespace)
    stack.callback(run_checked, "ip", "netns", "del", namespace)
    inner = ("peer", "name", "eth0", "netns", namespace)
    run_checked("ip", "link", "add", outer, "type", "veth", *inner)
    # The kernel removes it with the namespace, but some time later, when the name may be needed again.
    stack.callback(run_checked, "ip", "link", "del", outer)
    run_checked("ip", "link", "set", outer, "master", BRIDGE, "up")
    inside = ("ip", "-n", namespace)
    run_checked(*inside, "addr", "add", f"{_address(number)}/24", "dev", "eth0")
    run_checked(*inside, "link", "set", "eth0", "up")
    run_checked(*inside, "link", "set", "lo", "up")
    # The engine requires a default route, even one that leads nowhere.
    run_checked(*inside, "route", "add", "default", "via", f"{NETWORK}.1")


def _start_engine(
    namespace: str, number: int, place: Path, keys: Path, mounts: list[str]
) -> subprocess.Popen[bytes]:
    """Start the engine of a host, after the commands ``mounts``."""
    start = _START.format(
        host=namespace,
        place=place,
        address=_address(number),
        port=PORT,
        keys=keys,
        checkout=Path.cwd(),
        python=sys.executable,
    )
    script = place / "start"
    script.write_text("\n".join([*mounts, start]))
    # The signal ends the engine with this process, also if this process is killed.
    command = ["setpriv", "--pdeathsig", "TERM"]
    command += ["nsenter", f"--net=/run/netns/{namespace}"]
    command += ["unshare", "-m", "-u", "sh", str(script)]
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_until_ready(place: Path) -> None:
    # Engine and ssh server start concurrently.
    deadline = time.monotonic() + START_TIMEOUT
    info = ["docker", "-H", f"unix://{place}/sock", "info"]
    while (
        not (place / "ssh.pid").exists()
        or subprocess.run(info, capture_output=True).returncode
    ):
        assert time.monotonic() < deadline, (place / "log").read_text()[-500:]
        time.sleep(0.2)


def _join_swarm(folders: list[Path]) -> None:
    """Create a swarm of all engines with the first one as manager."""
    first, *others = (f"unix://{place}/sock" for place in folders)
    manager = _address(1)
    swarm = ("docker", "-H", first, "swarm")
    run_checked(*swarm, "init", "--advertise-addr", manager)
    token = run_checked(*swarm, "join-token", "-q", "worker").strip()
    for url in others:
        join = ("swarm", "join", "--token", token, f"{manager}:2377")
        run_checked("docker", "-H", url, *join)


def _create_context(config: Path, name: str, number: int, keys: Path) -> None:
    certificates = f"ca={keys}/cert.pem,cert={keys}/cert.pem,key={keys}/key.pem"
    endpoint = f"host=tcp://{_address(number)}:{PORT},{certificates}"
    create = ("context", "create", name, "--docker", endpoint)
    run_checked("docker", "--config", str(config), *create)


def _stop_engine(place: Path, engine: subprocess.Popen[bytes]) -> None:
    """Stop an engine, and remove all containers, mounts and files of the host."""
    docker = ["docker", "-H", f"unix://{place}/sock"]
    listing = subprocess.run([*docker, "ps", "-aq"], capture_output=True, text=True)
    containers = listing.stdout.split()
    if containers:
        subprocess.run([*docker, "rm", "-f", *containers], capture_output=True)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((place / "ssh.pid").read_text()), signal.SIGTERM)
    engine.send_signal(signal.SIGTERM)
    try:
        engine.wait(10)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()
    # In reverse, since later mounts can lie within earlier ones.
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        mount_point = line.split()[1]
        if mount_point.startswith(f"{place}/"):
            subprocess.run(["umount", "-l", mount_point], capture_output=True)
    subprocess.run(["rm", "-rf", str(place)], capture_output=True)


def main() -> int:
    count, *command = sys.argv[1:]
    # An exception runs the clean-up; the default action of SIGTERM would not.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    reason = unavailable_reason()
    if reason:
        print(reason, file=sys.stderr)
        return 3
    with (
        tempfile.TemporaryDirectory(prefix="engines-") as folder,
        start_engines(Path(folder), int(count)),
    ):
        environment = {
            **os.environ,
            "DOCKER_CONFIG": f"{folder}/docker",
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
        }
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
