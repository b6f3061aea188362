"""Several Docker engines on one machine, each as on a host of its own: a network namespace, a name, a data root.

A bridge joins them, and a swarm. They share the kernel, the clock and the processors of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

BRIDGE = "tb-engines"
NETWORK = "10.78.0"
PATIENCE = 60.0
_START = """\
hostname {host}
mount --rbind /sys/fs/cgroup {place}/cgroup; mount -t sysfs sysfs /sys; mount --rbind {place}/cgroup /sys/fs/cgroup
exec dockerd --data-root {place}/data --exec-root {place}/exec --pidfile {place}/pid -H unix://{place}/sock
"""


def missing() -> str:
    """Return why there can be none here, or an empty text."""
    if not os.environ.get("TESTBED_ENGINES"):
        return "bringing images to engines of their own takes minutes: set TESTBED_ENGINES=1"
    if os.geteuid() != 0:
        return "engines in namespaces of their own need root"
    lacking = [name for name in ("dockerd", "docker", "ip", "iptables", "nsenter", "unshare") if not shutil.which(name)]
    if lacking:
        return f"engines in namespaces of their own need {', '.join(lacking)}"
    probe = "ip link add tb-try type vxlan id 7 dstport 4790 && ip link del tb-try"
    if subprocess.run(["sh", "-c", probe], capture_output=True).returncode:
        return "this kernel has no vxlan, of which overlay networks are made"
    return ""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def engines(folder: Path, count: int) -> Iterator[dict[str, str]]:
    """Have engines h1, h2, ... in one swarm that h1 manages; yields the URL of each."""
    hosts = {f"tb-h{number}": folder / f"h{number}" for number in range(1, count + 1)}
    with contextlib.ExitStack() as stack:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(run, "ip", "link", "del", BRIDGE)
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for side in ("-i", "-o"):  # with br_netfilter the engine of this machine forbids what passes other bridges
            run("iptables", "-w", "-I", "FORWARD", side, BRIDGE, "-j", "ACCEPT")
            stack.callback(run, "iptables", "-w", "-D", "FORWARD", side, BRIDGE, "-j", "ACCEPT")
        for number, (host, place) in enumerate(hosts.items(), 1):
            (place / "cgroup").mkdir(parents=True)
            run("ip", "netns", "add", host)
            stack.callback(run, "ip", "netns", "del", host)
            run("ip", "link", "add", f"{host}-o", "type", "veth", "peer", "name", "eth0", "netns", host)
            run("ip", "link", "set", f"{host}-o", "master", BRIDGE, "up")
            run("ip", "-n", host, "addr", "add", f"{NETWORK}.1{number}/24", "dev", "eth0")
            run("ip", "-n", host, "link", "set", "eth0", "up")
            run("ip", "-n", host, "link", "set", "lo", "up")
            # The engine wants a way out, wherever that leads.
            run("ip", "-n", host, "route", "add", "default", "via", f"{NETWORK}.1")
            stack.callback(_end, place)
            start = place / "start"
            start.write_text(_START.format(host=host, place=place))
            with (place / "log").open("wb") as log:
                command = ["nsenter", f"--net=/run/netns/{host}", "unshare", "-m", "-u", "sh", str(start)]
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        urls = {place.name: f"unix://{place}/sock" for place in hosts.values()}
        for place in hosts.values():
            _await(place)
        first, *others = urls.values()
        run("docker", "-H", first, "swarm", "init", "--advertise-addr", f"{NETWORK}.11")
        token = run("docker", "-H", first, "swarm", "join-token", "-q", "worker").strip()
        for url in others:
            run("docker", "-H", url, "swarm", "join", "--token", token, f"{NETWORK}.11:2377")
        yield urls


def _await(place: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while subprocess.run(["docker", "-H", f"unix://{place}/sock", "info"], capture_output=True).returncode:
        assert time.monotonic() < deadline, (place / "log").read_text()[-500:]
        time.sleep(0.2)


def _end(place: Path) -> None:
    """End an engine and all that it has."""
    url = f"unix://{place}/sock"
    found = subprocess.run(["docker", "-H", url, "ps", "-aq"], capture_output=True, text=True).stdout.split()
    if found:
        subprocess.run(["docker", "-H", url, "rm", "-f", *found], capture_output=True)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        pid = int((place / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if line.split()[1].startswith(f"{place}/"):
            subprocess.run(["umount", "-l", line.split()[1]], capture_output=True)
    subprocess.run(["rm", "-rf", str(place)], capture_output=True)
