"""Bare network namespaces on a bridge, as a substitute for containers: the shaper needs no container engine for
them."""

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
_PORT_NUMBERS = itertools.count()
"""Numbers of bridge ports, which are unique in this process."""
_SETTINGS = {
    # The settings of devices: windows that fill 1 Gbit/s over 100 ms each way.
    "tcp_rmem": "4096 131072 67108864",
    "tcp_wmem": "4096 16384 67108864",
    "tcp_slow_start_after_idle": "0",
    # Connections are independent: the kernel would start a new one with the metrics of earlier ones.
    "tcp_no_metrics_save": "1",
}


class Network:
    """Sleeping processes in separate namespaces, each connected by a veth to a bridge in a further namespace.

    With ``plugged=False`` they have no interface, and a shaper connects them.
    """

    def __init__(self, names: Sequence[str], *, plugged: bool = True) -> None:
        self._plugged = plugged
        self._processes: list[subprocess.Popen[bytes]] = []
        self._bridge = self._start_sleeper()
        self.endpoints: dict[str, Endpoint] = {}
        self.namespaces: dict[str, Namespace] = {}
        _run_script(
            self._bridge,
            "ip link add bridge type bridge mcast_snooping 0; ip link set bridge up",
        )
        for index, name in enumerate(names):
            self.add(name, f"198.18.0.{index + 2}")

    def add(self, name: str, address: str) -> Endpoint:
        """Start or restart a device; with ``plugged``, connect the device to the bridge."""
        pid = self._start_sleeper()
        commands = ["ip link set lo up"]
        for key, value in _SETTINGS.items():
            commands.append(f"echo {value} > /proc/sys/net/ipv4/{key}")
        _run_script(pid, "; ".join(commands))
        if self._plugged:
            self._plug_in(pid, address)
        # The shaper creates an interface in the given network.
        network = None if self._plugged else "198.18.0.0/15"
        endpoint = Endpoint(name, pid, address, network=network)
        self.endpoints[name] = endpoint
        self.namespaces[name] = Namespace.of_process(pid)
        return endpoint

    def _plug_in(self, pid: int, address: str) -> None:
        port = f"p{next(_PORT_NUMBERS)}"
        _run_script(
            self._bridge,
            f"ip link add {port} type veth peer name data netns {pid}; ip link set {port} master bridge up",
        )
        # A prefix of 15 bits is that of the range 198.18.0.0/15, which RFC 2544 reserves for measurements.
        _run_script(
            pid,
            f"ip address add {address}/15 broadcast + dev data; ip link set data up",
        )

    def stop(self, name: str) -> None:
        """Kill the process of a device."""
        pid = self.endpoints[name].pid
        self.namespaces.pop(name).close()
        for process in self._processes:
            if process.pid == pid:
                process.kill()
                process.wait()

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Call a function in the namespace of a device."""
        return self.namespaces[name].run(work)

    def sh(self, name: str, script: str) -> str:
        """Run a shell script in the namespace of a device and return the output of the script."""
        return _run_script(self.endpoints[name].pid, script)

    def _start_sleeper(self) -> int:
        """Return the process id of a process that keeps a new namespace open."""
        # A namespace exists as long as a process is in it, or a file descriptor leads to it.
        with contextlib.closing(Namespace.scratch()) as scratch:
            process = scratch.run(lambda: subprocess.Popen(["sleep", "inf"]))
        self._processes.append(process)
        return process.pid

    def close(self) -> None:
        """Remove all namespaces."""
        for namespace in self.namespaces.values():
            namespace.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _run_script(pid: int, script: str) -> str:
    result = subprocess.run(
        ["nsenter", "-t", str(pid), "-n", "sh", "-ec", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise HostError(f"a bare network cannot be set up: {result.stderr.strip()}")
    return result.stdout
