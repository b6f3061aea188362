"""Bare network namespaces on a bridge: what containers would be, without an engine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from controller.shaping.namespaces import Namespace
from controller.shaping.plan import Endpoint

T = TypeVar("T")
_COUNT = itertools.count()


class Network:
    """Processes that sleep in namespaces of their own, each with a veth to one bridge in a further namespace."""

    def __init__(self, names: list[str]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bridge = self._sleeper()
        self.endpoints: dict[str, Endpoint] = {}
        self.namespaces: dict[str, Namespace] = {}
        self._sh(self._bridge, "ip link add bridge type bridge mcast_snooping 0; ip link set bridge up")
        for index, name in enumerate(names):
            self.add(name, f"198.18.0.{index + 2}")

    def add(self, name: str, address: str) -> Endpoint:
        """Start a device (or start it again) and plug it in."""
        pid = self._sleeper()
        port = f"p{next(_COUNT)}"
        self._sh(
            self._bridge,
            f"ip link add {port} type veth peer name data netns {pid}; ip link set {port} master bridge up",
        )
        self._sh(pid, f"ip link set lo up; ip address add {address}/15 broadcast + dev data; ip link set data up")
        self.endpoints[name] = Endpoint(name, pid, address)
        self.namespaces[name] = Namespace.of_process(pid)
        return self.endpoints[name]

    def stop(self, name: str) -> None:
        """End a device as a kill does."""
        pid = self.endpoints[name].pid
        self.namespaces.pop(name).close()
        for process in self._processes:
            if process.pid == pid:
                process.kill()
                process.wait()

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Call something in a device's namespace."""
        return self.namespaces[name].run(work)

    def sh(self, name: str, script: str) -> str:
        """Run a shell script in a device's namespace; return what it prints."""
        return self._sh(self.endpoints[name].pid, script)

    def _sleeper(self) -> int:
        process = subprocess.Popen(["unshare", "-n", "sleep", "inf"])
        self._processes.append(process)
        ours = Path("/proc/self/ns/net").stat().st_ino
        while Path(f"/proc/{process.pid}/ns/net").stat().st_ino == ours:
            time.sleep(0.002)
        return process.pid

    @staticmethod
    def _sh(pid: int, script: str) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(pid), "-n", "sh", "-ec", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        for namespace in self.namespaces.values():
            namespace.close()
        for process in self._processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """Make a network and take it down again."""
    made = Network(list(names))
    try:
        yield made
    finally:
        made.close()


def one_way(net: Network, source: str, destination: str, count: int, gap: float, size: int = 8) -> list[float]:
    """Send datagrams; return the delays in seconds of those that arrived, in the order of arrival."""
    return [delay for _, delay in flow(net, source, destination, count, gap, size)]


def flow(
    net: Network, source: str, destination: str, count: int, gap: float, size: int = 8
) -> list[tuple[float, float]]:
    """Send datagrams; return (monotonic time of sending, delay) of those that arrived, in the order of arrival."""
    receiver = net.inside(destination, lambda: _bound(net.endpoints[destination].address))
    sender = net.inside(source, lambda: _bound(net.endpoints[source].address))
    delays: list[tuple[float, float]] = []

    def listen() -> None:
        with contextlib.suppress(TimeoutError):
            while len(delays) < count:
                data = receiver.recv(2048)
                now = time.monotonic()
                sent = struct.unpack_from("d", data)[0]
                delays.append((sent, now - sent))

    receiver.settimeout(1.0)
    thread = threading.Thread(target=listen)
    thread.start()
    start = time.monotonic()
    for index in range(count):
        time.sleep(max(0.0, start + index * gap - time.monotonic()))
        sender.sendto(struct.pack("d", time.monotonic()).ljust(size, b"."), receiver.getsockname())
    thread.join()
    receiver.close()
    sender.close()
    return delays


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, 0))
    made.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)
    return made


def udp_rate(net: Network, source: str, destination: str, seconds: float, size: int = 1472) -> tuple[float, float]:
    """Send as fast as the link takes; return (bit/s on the wire after the first tenth, fraction lost)."""
    receiver = net.inside(destination, lambda: _bound(net.endpoints[destination].address))
    sender = net.inside(source, lambda: _bound(net.endpoints[source].address))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    arrivals: list[float] = []
    sent = 0

    def listen() -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                receiver.recv(2048)
                arrivals.append(time.monotonic())

    receiver.settimeout(0.7)
    thread = threading.Thread(target=listen)
    thread.start()
    payload = bytes(size)
    address = receiver.getsockname()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sender.sendto(payload, address)
        sent += 1
    thread.join()
    receiver.close()
    sender.close()
    counted = arrivals[len(arrivals) // 10 :]
    return (len(counted) - 1) * (size + 42) * 8 / (counted[-1] - counted[0]), 1 - len(arrivals) / sent


def tcp_rate(net: Network, source: str, destination: str, seconds: float) -> float:
    """Send over one TCP connection; return bit/s of content, after the first third."""
    pid = {name: str(endpoint.pid) for name, endpoint in net.endpoints.items()}
    address = net.endpoints[destination].address
    code = (
        "import socket,time,json,sys\n"
        f"s=socket.create_server(('{address}',5001)); print('ready',flush=True); c,_=s.accept(); t=[];n=0\n"
        "b=bytearray(1<<20)\n"
        "while True:\n"
        "    k=c.recv_into(b)\n"
        "    if not k: break\n"
        "    n+=k; t.append((time.monotonic(),n))\n"
        "print(json.dumps([t[len(t)//3],t[-1]]))\n"
    )
    listener = subprocess.Popen(
        ["nsenter", "-t", pid[destination], "-n", "python3", "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert listener.stdout is not None
    listener.stdout.readline()
    connection = net.inside(source, lambda: socket.create_connection((address, 5001)))
    payload = bytes(1 << 16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(payload)
    connection.close()
    (first, before), (last, after) = json.loads(listener.communicate(timeout=60)[0])
    return float((after - before) * 8 / (last - first))


def is_root() -> bool:
    return os.geteuid() == 0
