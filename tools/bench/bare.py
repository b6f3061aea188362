"""Bare network namespaces on a bridge: what containers would be to the shaper, without an engine."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Sequence
from typing import TypeVar

from testbed.common.errors import HostError
from testbed_controller.shaping.namespaces import Namespace
from testbed_controller.shaping.plan import Endpoint

T = TypeVar("T")
_COUNT = itertools.count()
_SETTINGS = {
    # As devices have them: windows that fill 1 Gbit/s over 100 ms each way.
    "tcp_rmem": "4096 131072 67108864",
    "tcp_wmem": "4096 16384 67108864",
    "tcp_slow_start_after_idle": "0",
    # Nothing that an earlier connection learned may help or hinder a later one.
    "tcp_no_metrics_save": "1",
}


class Network:
    """Processes that sleep in namespaces of their own, each with a veth to one bridge in a further namespace.

    Or without that, where a shaper is to plug them in.
    """

    def __init__(self, names: Sequence[str], *, plugged: bool = True) -> None:
        self._plugged = plugged
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bridge = self._sleeper()
        self.endpoints: dict[str, Endpoint] = {}
        self.namespaces: dict[str, Namespace] = {}
        self._sh(
            self._bridge,
            "ip link add bridge type bridge mcast_snooping 0; ip link set bridge up",
        )
        for index, name in enumerate(names):
            self.add(name, f"198.18.0.{index + 2}")

    def add(self, name: str, address: str) -> Endpoint:
        """Start a device (or start it again) and plug it in."""
        pid = self._sleeper()
        settings = "; ".join(
            f"echo {value} > /proc/sys/net/ipv4/{key}"
            for key, value in _SETTINGS.items()
        )
        self._sh(pid, f"ip link set lo up; {settings}")
        if self._plugged:
            port = f"p{next(_COUNT)}"
            self._sh(
                self._bridge,
                f"ip link add {port} type veth peer name data netns {pid}; ip link set {port} master bridge up",
            )
            self._sh(
                pid,
                f"ip address add {address}/15 broadcast + dev data; ip link set data up",
            )
        self.endpoints[name] = Endpoint(
            name, pid, address, network=None if self._plugged else "198.18.0.0/15"
        )
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
        with contextlib.closing(Namespace.scratch()) as scratch:
            process = scratch.run(lambda: subprocess.Popen(["sleep", "inf"]))
        self._processes.append(process)
        return process.pid

    @staticmethod
    def _sh(pid: int, script: str) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(pid), "-n", "sh", "-ec", script],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HostError(f"a bare network cannot be set up: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Take everything down."""
        for namespace in self.namespaces.values():
            namespace.close()
        for process in self._processes:
            process.kill()
            process.wait()
