"""Several Docker engines on one machine, each as on a host of its own: a network namespace, a name, a data root.

A bridge joins them, and a swarm. They are reached over that bridge, by TLS, so that whoever is cut off from it is cut
off from the controller as well. They share the kernel, the clock and the processors of this machine, and the files of
its images. As a program: ``python -m tests.helpers.engines COUNT COMMAND...`` runs a command beside such engines, which
are its docker contexts h1, h2 and so on; as root.
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
PATIENCE = 60.0
LOCK = Path("/tmp/testbed-engines.lock")
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


def unavailable_reason() -> str:
    """Return why there can be none here, or an empty text."""
    if os.geteuid() != 0:
        return "engines in namespaces of their own need root"
    wanted = (
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
    if lacking := [name for name in wanted if not shutil.which(name)]:
        return f"engines in namespaces of their own need {', '.join(lacking)}"
    probe = "ip link add tb-try type vxlan id 7 dstport 4790 && ip link del tb-try"
    if subprocess.run(["sh", "-c", probe], capture_output=True).returncode:
        return "this kernel has no vxlan, of which overlay networks are made"
    if not os.environ.get("TESTBED_ENGINES") and (why := unshareable_reason(connect())):
        return f"{why}, so that bringing them to engines takes minutes: set TESTBED_ENGINES=1"
    return ""


def run_checked(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def disconnect_host(number: int) -> None:
    """Cut a host off from the others and from here; its engine and its containers go on."""
    run_checked("ip", "link", "set", f"tb-h{number}-o", "down")


def reconnect_host(number: int) -> None:
    run_checked("ip", "link", "set", f"tb-h{number}-o", "up")


@contextlib.contextmanager
def start_engines(folder: Path, count: int) -> Iterator[list[str]]:
    """Have engines h1, h2, ... in one swarm that h1 manages; yields their names, which are those of docker contexts.

    The contexts are in ``folder / "docker"``, for ``DOCKER_CONFIG``; an ``ssh`` that reaches root on each host is in
    ``folder / "bin"``, for ``PATH``. Only one caller at a time has engines.
    """
    hosts = {f"tb-h{number}": folder / f"h{number}" for number in range(1, count + 1)}
    keys, client = folder / "keys", connect()
    images = ensure_images(client, print)
    with contextlib.ExitStack() as stack:
        fcntl.flock(stack.enter_context(LOCK.open("w")), fcntl.LOCK_EX)
        for command in (
            f"ip link del {BRIDGE}",
            *(f"ip link del {each}-o; ip netns del {each}" for each in hosts),
        ):
            subprocess.run(
                ["sh", "-c", command], capture_output=True
            )  # what somebody who was killed has left
        keys.mkdir(parents=True)
        names = ",".join(f"IP:{NETWORK}.1{number}" for number in range(1, count + 1))
        made = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engines"]
        files = ["-keyout", str(keys / "key.pem"), "-out", str(keys / "cert.pem")]
        run_checked(
            "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id")
        )
        ssh = folder / "bin/ssh"
        ssh.parent.mkdir()
        ssh.write_text(_SSH.format(keys=keys))
        ssh.chmod(0o755)
        run_checked(
            "openssl",
            "req",
            "-x509",
            *made,
            "-addext",
            f"subjectAltName={names}",
            *files,
        )
        run_checked("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(run_checked, "ip", "link", "del", BRIDGE)
        run_checked("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        run_checked("ip", "link", "set", BRIDGE, "up")
        for side in (
            "-i",
            "-o",
        ):  # with br_netfilter the engine of this machine forbids what passes other bridges
            run_checked("iptables", "-w", "-I", "FORWARD", side, BRIDGE, "-j", "ACCEPT")
            stack.callback(
                run_checked,
                "iptables",
                "-w",
                "-D",
                "FORWARD",
                side,
                BRIDGE,
                "-j",
                "ACCEPT",
            )
        for number, (host, place) in enumerate(hosts.items(), 1):
            (place / "cgroup").mkdir(parents=True)
            layers = share_images(
                client, [images.device, images.shaper], place / "data"
            )
            run_checked("ip", "netns", "add", host)
            stack.callback(run_checked, "ip", "netns", "del", host)
            run_checked(
                "ip",
                "link",
                "add",
                f"{host}-o",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host,
            )
            stack.callback(
                run_checked, "ip", "link", "del", f"{host}-o"
            )  # the kernel would do it a while after the other end
            run_checked("ip", "link", "set", f"{host}-o", "master", BRIDGE, "up")
            run_checked(
                "ip",
                "-n",
                host,
                "addr",
                "add",
                f"{NETWORK}.1{number}/24",
                "dev",
                "eth0",
            )
            run_checked("ip", "-n", host, "link", "set", "eth0", "up")
            run_checked("ip", "-n", host, "link", "set", "lo", "up")
            # The engine wants a way out, wherever that leads.
            run_checked(
                "ip", "-n", host, "route", "add", "default", "via", f"{NETWORK}.1"
            )
            start = place / "start"
            settings = {
                "host": host,
                "place": place,
                "address": f"{NETWORK}.1{number}",
                "port": PORT,
                "keys": keys,
            }
            settings |= {"checkout": Path.cwd(), "python": sys.executable}
            start.write_text("\n".join([*layers, _START.format(**settings)]))
            with (place / "log").open("wb") as log:
                # It ends with this process, also where that is killed.
                command = [
                    "setpriv",
                    "--pdeathsig",
                    "TERM",
                    "nsenter",
                    f"--net=/run/netns/{host}",
                ]
                command += ["unshare", "-m", "-u", "sh", str(start)]
                engine = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            stack.callback(_end, place, engine)
        for place in hosts.values():
            _await(place)
        first, *others = (f"unix://{place}/sock" for place in hosts.values())
        run_checked(
            "docker", "-H", first, "swarm", "init", "--advertise-addr", f"{NETWORK}.11"
        )
        token = run_checked(
            "docker", "-H", first, "swarm", "join-token", "-q", "worker"
        ).strip()
        for url in others:
            run_checked(
                "docker",
                "-H",
                url,
                "swarm",
                "join",
                "--token",
                token,
                f"{NETWORK}.11:2377",
            )
        certificates = f"ca={keys}/cert.pem,cert={keys}/cert.pem,key={keys}/key.pem"
        for number, place in enumerate(hosts.values(), 1):
            at = f"host=tcp://{NETWORK}.1{number}:{PORT},{certificates}"
            run_checked(
                "docker",
                "--config",
                str(folder / "docker"),
                "context",
                "create",
                place.name,
                "--docker",
                at,
            )
        yield [place.name for place in hosts.values()]


def _await(place: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    info = ["docker", "-H", f"unix://{place}/sock", "info"]
    while (
        not (place / "ssh.pid").exists()
        or subprocess.run(info, capture_output=True).returncode
    ):
        assert time.monotonic() < deadline, (place / "log").read_text()[-500:]
        time.sleep(0.2)


def _end(place: Path, engine: subprocess.Popen[bytes]) -> None:
    """End an engine and all that it has."""
    url = f"unix://{place}/sock"
    found = subprocess.run(
        ["docker", "-H", url, "ps", "-aq"], capture_output=True, text=True
    ).stdout.split()
    if found:
        subprocess.run(["docker", "-H", url, "rm", "-f", *found], capture_output=True)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((place / "ssh.pid").read_text()), signal.SIGTERM)
    engine.send_signal(signal.SIGTERM)
    try:
        engine.wait(10)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if line.split()[1].startswith(f"{place}/"):
            subprocess.run(["umount", "-l", line.split()[1]], capture_output=True)
    subprocess.run(["rm", "-rf", str(place)], capture_output=True)


def main() -> int:
    count, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if why := unavailable_reason():
        print(why, file=sys.stderr)
        return 3
    with (
        tempfile.TemporaryDirectory(prefix="engines-") as name,
        start_engines(Path(name), int(count)),
    ):
        own = {
            "DOCKER_CONFIG": f"{name}/docker",
            "PATH": f"{name}/bin:{os.environ['PATH']}",
        }
        return subprocess.run(command, env={**os.environ, **own}).returncode


if __name__ == "__main__":
    sys.exit(main())
