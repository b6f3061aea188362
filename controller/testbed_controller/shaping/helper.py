"""Processes of their own beside the shaper's server, spoken to over a local socket: no request makes a packet late.

The delay line (`engine.py`) holds what arrives at devices, the gate (`gatekeeper.py`) what leaves them for a shared
medium, where it still counts as unsent: a socket feels that the channel is busy, a cast is over when its last bit is,
and one transmission is charged once however many hear it.
"""

from __future__ import annotations

import array
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

LARGEST_REQUEST = 1 << 20
"""Bytes of one request or answer, at most."""
_END_SECONDS = 5.0
_SO_SNDBUFFORCE = 32
_PR_SET_TIMERSLACK = 29
_CAPABILITY_VERSION = 0x20080522
"""linux/capability.h"""
_CAP_NET_ADMIN = 12
_AT_ONCE = 64
"""Impairments in one request, each some 600 bytes."""


def prioritise() -> str:
    """Ask the kernel to wake this process at once; return what was granted."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        except OSError:
            return "normal"
        return "nice -20"
    return "real-time"


def give_up_capabilities() -> None:
    """Keep nothing of root's but what verdicts on packets need: these processes read what devices send.

    Raises OSError where the kernel refuses.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    kept = 1 << _CAP_NET_ADMIN
    # Effective, permitted and inheritable, of the lower 32 capabilities and then of the upper.
    wanted = struct.pack("6I", kept, kept, 0, 0, 0, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, wanted) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def run(loop: Callable[[socket.socket], Any], descriptor: int) -> None:
    """Run a loop on a control socket that was inherited."""
    control = socket.socket(fileno=descriptor)
    control.send(json.dumps({"priority": prioritise()}).encode())
    give_up_capabilities()
    never_collect()
    loop(control).run()


def serve_request(
    control: socket.socket, carry_out: Callable[[dict[str, Any], list[int]], dict[str, Any] | None], descriptors: int
) -> bool:
    """Answer one request of the server by what carries it out, given it and at most this many file descriptors.

    Returns False when the server is gone. An OSError is the answer's ``error``.
    """
    data, received, _, _ = socket.recv_fds(control, LARGEST_REQUEST, descriptors)
    if not data:
        return False
    try:
        answer = carry_out(json.loads(data), received) or {}
    except OSError as error:
        answer = {"error": str(error)}
    control.send(json.dumps(answer).encode())
    return True


class Helper:
    """The server's end. Safe to use from several threads.

    The process runs the ``Loop`` of a module: it first sends a JSON object with its ``priority``, then answers
    each request, ends when the socket does, and reports what goes wrong under the key ``error``.
    """

    def __init__(self, module: str, what: str) -> None:
        self._what = what
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * LARGEST_REQUEST)
        self._control = ours
        self._control.settimeout(10)
        self._lock = threading.Lock()
        code = f"from {module} import Loop; from {__name__} import run; run(Loop, {theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.priority = str(self._answer()["priority"])
        """How the kernel schedules the process."""

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(LARGEST_REQUEST)
        except OSError as error:
            raise HostError(f"the {self._what} does not answer: {error}") from error
        if not data:
            raise HostError(f"the {self._what} has ended with status {self._process.wait()}; see the shaper's log")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Make a request, perhaps with file descriptors; raises HostError for one that cannot be met."""
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    self._control.sendmsg([data], [rights])
                else:
                    self._control.send(data)
            except OSError as error:
                raise HostError(f"the {self._what} has ended: {error}; see the shaper's log") from error
            return self._answer()

    def forget(self, device: str) -> None:
        """Forget a device; the kernel drops what is still queued for it."""
        self.ask({"do": "close", "device": device})

    def statistics(self) -> dict[str, Any]:
        """Return lateness percentiles and processor time, and what else the process counts."""
        return self.ask({"do": "statistics"})

    def reset(self) -> None:
        """Reset the lateness figures."""
        self.ask({"do": "reset"})

    def stop(self) -> None:
        """End the process; one that a busy host keeps from ending by itself is killed, having nothing to tidy up."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LatenessHistogram:
    """How much later than due packets were let go, in bins of 10 us up to 10 ms."""

    BIN = 1e-5
    BINS = 1000

    def __init__(self) -> None:
        self._counts = [0] * (self.BINS + 1)
        self._worst = 0.0
        self._sum = 0.0

    def add(self, seconds: float, packets: int) -> None:
        """Count packets that were this late."""
        index = int(seconds / self.BIN)
        self._counts[index if index < self.BINS else self.BINS] += packets
        self._sum += seconds * packets
        if seconds > self._worst:
            self._worst = seconds

    def percentile(self, fraction: float) -> float:
        """Return the lateness in seconds below which this fraction of packets stayed; in the last bin, the worst."""
        wanted = fraction * sum(self._counts)
        seen = 0
        for index, count in enumerate(self._counts[: self.BINS]):
            seen += count
            if seen >= wanted and seen:
                return min((index + 1) * self.BIN, self._worst)
        return self._worst

    def summary(self) -> dict[str, float]:
        """Return the figures for a report."""
        return {
            "mean": self._sum / max(1, sum(self._counts)),
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
            "p999": self.percentile(0.999),
            "max": self._worst,
        }


@dataclass(frozen=True)
class QueueImpairment:
    """What one queue does to its packets."""

    queue: int
    limit: int
    """Packets that it holds at most."""
    link: Link
    seed: str


class DelayLine(Helper):
    """The server's end. Its statistics also count, per device and queue, what passed and was dropped."""

    def __init__(self) -> None:
        super().__init__("testbed_controller.shaping.engine", "delay line")

    def open(self, device: str, netfilter: socket.socket, injector: socket.socket) -> None:
        """Hand over a device's netfilter socket and its packet socket on the loopback; the caller's are closed."""
        with netfilter, injector:
            self.ask({"do": "open", "device": device}, (netfilter.fileno(), injector.fileno()))

    def set(self, device: str, impairments: Sequence[QueueImpairment], downlink: Access | None) -> None:
        """Say what becomes of the packets of these queues from now on; raises HostError if the kernel refuses.

        ``downlink`` is what all queues of the device share.
        """
        shared = None if downlink is None else (downlink.rate, downlink.limit)
        for first in range(0, max(1, len(impairments)), _AT_ONCE):
            some = [asdict(each) for each in impairments[first : first + _AT_ONCE]]
            self.ask({"do": "set", "device": device, "impairments": some, "downlink": shared})


class Gate(Helper):
    """The server's end of the gate. Its rules come and go by `apply`, in the device's namespace.

    Its statistics also count what passed and was lost.
    """

    def __init__(self, iptables: str) -> None:
        super().__init__("testbed_controller.shaping.gatekeeper", "gate of the medium")
        self._iptables = iptables

    def apply(self, device: str, interface: str, old: Mapping[str, Route] | None, new: Mapping[str, Route]) -> None:
        """Let what the device sends to these addresses wait for its turn, and nothing else.

        ``old`` is what was applied before in the same namespace, None at first.
        """
        if old is None:
            with nfqueue.open_socket() as netfilter:
                self.ask({"do": "open", "device": device}, [netfilter.fileno()])
        # It must be known what becomes of packets before a rule leads them here.
        self.ask({"do": "set", "device": device, "routes": {address: asdict(route) for address, route in new.items()}})
        before = None if old is None else gate_rules(interface, old)
        gate_rules(interface, new).apply(self._iptables, before)

    def differences(self, interface: str, routes: Mapping[str, Route]) -> list[str]:
        """Read back, and say where the kernel holds something else."""
        problems = gate_rules(interface, routes).differences(command([self._iptables, "-w", "-S"]))
        if routes and QUEUE not in {row["queue"] for row in nfqueue.kernel_queues()}:
            problems.append("the queue of the medium is served by nobody")
        return problems
