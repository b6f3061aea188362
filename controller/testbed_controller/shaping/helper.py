"""Helper processes of the shaper's server: they handle packets, so that no request to the server delays a packet.

The server controls each of them over a local socket, with requests and responses as JSON.

The delay line (`engine.py`) holds packets that arrive at devices. The gate (`gatekeeper.py`) holds packets at the
sender until their transmission on a shared medium ends. Held there, a packet still occupies the buffer of its socket,
so the program notices a busy channel; and a broadcast is transmitted once for all of its receivers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from testbed.common.collector import never_collect
from testbed.common.errors import HostError
from testbed.network.link import Link
from testbed_controller.shaping import nfqueue
from testbed_controller.shaping.medium import QUEUE, Route, gate_rules
from testbed_controller.shaping.namespaces import command
from testbed_controller.shaping.plan import Access

MAX_REQUEST_BYTES = 1 << 20
"""Maximum size of a request or response, in bytes."""
_END_SECONDS = 5.0
"""Time for the helper to end before it is killed, in seconds."""
_SO_SNDBUFFORCE = 32
"""Constant of asm-generic/socket.h, which Python's `socket` lacks."""
_PR_SET_TIMERSLACK = 29
"""Constant of linux/prctl.h."""
_CAPABILITY_VERSION = 0x20080522
"""Constant of linux/capability.h: the version with 64 capabilities."""
_CAP_NET_ADMIN = 12
"""Constant of linux/capability.h."""
_BATCH_SIZE = 64
"""Maximum number of impairments in one request, of about 600 bytes each."""


def prioritise() -> str:
    """Ask the kernel for immediate wake-ups of this process; return the granted priority as a text."""
    # The slack of timers is 1 ns instead of the default of 50 us.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        return "real-time"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        return "nice -20"
    return "normal"


def give_up_capabilities() -> None:
    """Drop all capabilities except for packet verdicts, since these processes parse untrusted packets.

    Raises OSError if the kernel refuses.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    capabilities = 1 << _CAP_NET_ADMIN
    # Effective, permitted and inheritable sets, for the lower 32 capabilities and then for the upper ones.
    capability_sets = struct.pack("6I", capabilities, capabilities, 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, capability_sets) != 0:
        raise OSError(ctypes.get_errno(), "cannot drop capabilities")


def run(loop: Callable[[socket.socket], Any], descriptor: int) -> None:
    """Run the loop of a helper process on its inherited control socket; `Helper` starts the process with this call."""
    control = socket.socket(fileno=descriptor)
    # The priority is set before the capabilities are given up, since a real-time priority needs CAP_SYS_NICE.
    control.send(json.dumps({"priority": prioritise()}).encode())
    give_up_capabilities()
    # A collection of garbage would delay packets by milliseconds; the loops create no cycles.
    never_collect()
    loop(control).run()


def serve_request(
    control: socket.socket,
    execute: Callable[[dict[str, Any], list[int]], dict[str, Any] | None],
    descriptors: int,
) -> bool:
    """Receive one request, execute a function of (request, file descriptors), and send the result.

    ``descriptors`` is the maximum number of file descriptors. Returns False if the server has disconnected. An OSError
    becomes the response's ``error``.
    """
    data, received, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, descriptors)
    if not data:
        return False
    try:
        answer = execute(json.loads(data), received) or {}
    except OSError as error:
        answer = {"error": str(error)}
    control.send(json.dumps(answer).encode())
    return True


class Helper:
    """The server's end of a helper process. Thread-safe.

    The process runs the ``Loop`` of a module: it first sends a JSON object with its ``priority``, then answers
    requests, ends with the socket, and reports errors under the key ``error``.
    """

    def __init__(self, module: str, title: str) -> None:
        self._title = title
        # Sequenced packets, because each request must be received as a whole, together with its file descriptors.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * MAX_REQUEST_BYTES)
        self._control = ours
        self._control.settimeout(10)
        self._lock = threading.Lock()
        # A new interpreter instead of a fork, because a fork would copy locks that other threads of the server hold.
        code = f"from {module} import Loop; from {__name__} import run; run(Loop, {theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.priority = str(self._receive_answer()["priority"])
        """Scheduling priority of the process."""

    def _receive_answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(MAX_REQUEST_BYTES)
        except OSError as error:
            raise HostError(f"the {self._title} does not respond: {error}") from error
        if not data:
            raise HostError(
                f"the {self._title} has ended with status {self._process.wait()}; see the shaper's log"
            )
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def ask(
        self, request: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Send a request, optionally with file descriptors, and return the response; raises HostError."""
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if descriptors:
                    socket.send_fds(self._control, [data], list(descriptors))
                else:
                    self._control.send(data)
            except OSError as error:
                raise HostError(
                    f"the {self._title} has ended: {error}; see the shaper's log"
                ) from error
            return self._receive_answer()

    def forget(self, device: str) -> None:
        """Release a device; the kernel drops all queued packets."""
        self.ask({"do": "close", "device": device})

    def statistics(self) -> dict[str, Any]:
        """Return lateness percentiles in seconds, processor time in seconds, and counters of the process."""
        return self.ask({"do": "statistics"})

    def reset(self) -> None:
        """Reset the lateness statistics."""
        self.ask({"do": "reset"})

    def stop(self) -> None:
        """Stop the process; kill a process delayed by a busy host, since no cleanup is needed."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LatenessHistogram:
    """Lateness of released packets, in bins of 10 us up to 10 ms.

    >>> lateness = LatenessHistogram()
    >>> lateness.add(3e-5, packets=99)
    >>> lateness.add(2e-3, packets=1)
    >>> lateness.percentile(0.5), lateness.percentile(1.0)
    (4e-05, 0.002)
    """

    BIN = 1e-5
    """Width of a bin in seconds."""
    BINS = 1000

    def __init__(self) -> None:
        self._counts = [0] * (self.BINS + 1)
        self._worst = 0.0
        self._sum = 0.0

    def add(self, seconds: float, packets: int) -> None:
        """Count packets with a lateness in seconds."""
        index = int(seconds / self.BIN)
        # Comparisons instead of min and max, since this runs for every packet.
        self._counts[index if index < self.BINS else self.BINS] += packets
        self._sum += seconds * packets
        if seconds > self._worst:
            self._worst = seconds

    def percentile(self, fraction: float) -> float:
        """Return the lateness in seconds that a fraction of packets does not exceed, rounded up to a bin.

        Beyond the last bin, return the maximum.
        """
        threshold = fraction * sum(self._counts)
        cumulated = 0
        for index, count in enumerate(self._counts[: self.BINS]):
            cumulated += count
            if cumulated >= threshold and cumulated:
                return min((index + 1) * self.BIN, self._worst)
        return self._worst

    def summary(self) -> dict[str, float]:
        """Return mean, percentiles and maximum in seconds, for a report."""
        return {
            "mean": self._sum / max(1, sum(self._counts)),
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
            "p999": self.percentile(0.999),
            "max": self._worst,
        }


@dataclass(frozen=True)
class QueueImpairment:
    """The impairments of one queue."""

    queue: int
    limit: int
    """Maximum number of packets in the queue."""
    link: Link
    seed: str


class DelayLine(Helper):
    """The server's end of the delay line; the statistics have counters for each device and queue."""

    def __init__(self) -> None:
        super().__init__("testbed_controller.shaping.engine", "delay line")

    def open(
        self, device: str, netfilter: socket.socket, injector: socket.socket
    ) -> None:
        """Pass a device's netfilter socket and its loopback packet socket to the process; the originals are closed."""
        with netfilter, injector:
            descriptors = (netfilter.fileno(), injector.fileno())
            self.ask({"do": "open", "device": device}, descriptors)

    def set(
        self,
        device: str,
        impairments: Sequence[QueueImpairment],
        downlink: Access | None,
    ) -> None:
        """Configure the impairments of queues; raises HostError if the kernel refuses.

        ``downlink`` is shared by all queues of the device.
        """
        request = {
            "do": "set",
            "device": device,
            "downlink": None if downlink is None else (downlink.rate, downlink.limit),
        }
        # At least one request is sent: without impairments, it changes the downlink only.
        for first in range(0, max(1, len(impairments)), _BATCH_SIZE):
            batch = impairments[first : first + _BATCH_SIZE]
            fields = [asdict(impairment) for impairment in batch]
            self.ask({**request, "impairments": fields})


class Gate(Helper):
    """The server's end of the gate, which also sets the rules in the namespaces of devices.

    The statistics have counters of passed and dropped packets.
    """

    def __init__(self, iptables: str) -> None:
        super().__init__("testbed_controller.shaping.gatekeeper", "gate of the medium")
        self._iptables = iptables

    def apply(
        self,
        device: str,
        interface: str,
        old: Mapping[str, Route] | None,
        new: Mapping[str, Route],
    ) -> None:
        """Lead a device's packets for these addresses through the gate, in the device's namespace.

        ``old`` are the routes applied before in the same namespace; None the first time.
        """
        if old is None:
            with nfqueue.open_socket() as netfilter:
                self.ask({"do": "open", "device": device}, [netfilter.fileno()])
        # The gate must know the routes before a rule directs packets to it.
        routes = {address: asdict(route) for address, route in new.items()}
        self.ask({"do": "set", "device": device, "routes": routes})
        before = None if old is None else gate_rules(interface, old)
        gate_rules(interface, new).apply(self._iptables, before)

    def differences(self, interface: str, routes: Mapping[str, Route]) -> list[str]:
        """Return the differences between the routes and the rules and queues of the kernel."""
        present = command([self._iptables, "-w", "-S"])
        problems = gate_rules(interface, routes).differences(present)
        read_queues = {row["queue"] for row in nfqueue.kernel_queues()}
        if routes and QUEUE not in read_queues:
            problems.append("the gate's netfilter queue has no reader")
        return problems
