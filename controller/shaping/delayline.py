"""The delay line: a process of its own that holds queued packets until they are due, and loses some.

It is apart from the server so that no request ever makes a packet late. The server hands it netfilter sockets of
the devices' network namespaces, and what to do with each queue, over a local socket (`DelayLine`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import heapq
import json
import math
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from controller.shaping import nfqueue
from testbed.errors import HostError

_MOST_READ = 64
"""Packets read from one device before those that are due are let go."""
_PATIENCE = 0.5e-3
"""Seconds at most for which arrivals are left to gather, since the kernel has noted when each came."""
_EARLY = 60e-6
"""Seconds by which a packet may leave early along with another: one waking then serves several."""
_MESSAGE = 1 << 17
_SO_TIMESTAMPNS = 35
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True)
class Impairment:
    """What one queue does to its packets."""

    queue: int
    limit: int
    delay: float
    loss: float
    seed: int


class Lateness:
    """How much later than due packets were let go, in bins of 10 us up to 10 ms."""

    BIN = 1e-5
    BINS = 1000

    def __init__(self) -> None:
        self._counts = [0] * (self.BINS + 1)
        self._worst = 0.0

    def add(self, seconds: float, packets: int) -> None:
        """Note that so many packets were so late."""
        index = int(seconds / self.BIN)
        self._counts[index if index < self.BINS else self.BINS] += packets
        if seconds > self._worst:
            self._worst = seconds

    def percentile(self, fraction: float) -> float:
        """Return the lateness in seconds that so many packets stayed below (the worst, beyond the last bin)."""
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
            "p50": self.percentile(0.5),
            "p99": self.percentile(0.99),
            "p999": self.percentile(0.999),
            "max": self._worst,
        }


class _Line:
    """One queue: the packets on their way over one link."""

    __slots__ = (
        "accept",
        "accept_all",
        "delay",
        "drop",
        "dropped",
        "heap",
        "latest",
        "listed",
        "loss",
        "next",
        "ordered",
        "passed",
    )

    def __init__(self, impairment: Impairment) -> None:
        queue = impairment.queue
        self.accept = nfqueue.verdict_prefix(queue, nfqueue.ACCEPT)
        self.accept_all = nfqueue.verdict_prefix(queue, nfqueue.ACCEPT, batch=True)
        self.drop = nfqueue.verdict_prefix(queue, nfqueue.DROP)
        self.heap: list[tuple[float, bytearray]] = []
        self.latest = 0.0
        self.ordered = True
        """Whether the packets here leave in the order in which they came."""
        self.listed = math.inf
        """When the loop has noted to look at this line."""
        self.passed = 0
        self.dropped = 0
        self.alter(impairment)

    def alter(self, impairment: Impairment) -> None:
        """Treat packets that arrive from now on so; those under way keep the time that they were given."""
        self.delay = impairment.delay
        self.loss = impairment.loss
        self.next = random.Random(impairment.seed).random


class _Port:
    """A device: the netfilter socket of its namespace, and its lines."""

    def __init__(self, opened: socket.socket) -> None:
        opened.setblocking(False)
        self.socket = opened
        self.lines: dict[int, _Line] = {}
        self.verdicts: list[bytes | bytearray] = []
        self.overflows = 0
        self.refused = 0


class _Loop:
    """Waits for packets, for their time to come, and for the server; never busy."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._ports: dict[str, _Port] = {}
        self._by_descriptor: dict[int, _Port] = {}
        self._due: list[tuple[float, int, _Port, _Line]] = []
        self._ties = 0
        self._buffer = bytearray(4096)
        self._arrivals = nfqueue.Stamps()
        self._lateness = Lateness()
        self._sequence = 0
        self._patience = 0.0
        # Any socket that asks for timestamps makes the kernel note every packet's arrival, so that a packet that
        # waits for this process is not late because of it.
        self._stamps = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._stamps.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def run(self) -> None:
        """Go on until the server is gone."""
        look_again = 0.0
        while True:
            now = time.monotonic()
            due = self._due[0][0] if self._due else math.inf
            if now < look_again:
                time.sleep(max(0.0, min(due, look_again) - now))
            else:
                # select waits with microseconds, epoll only with milliseconds.
                wait = None if due == math.inf else max(0.0, due - now)
                select.select([self._epoll.fileno()], [], [], wait)
            self._release()
            if time.monotonic() < look_again:
                continue
            emptied = True
            for descriptor, _ in self._epoll.poll(0):
                if descriptor == self._control.fileno():
                    if not self._obey():
                        return
                elif descriptor in self._by_descriptor:
                    emptied &= self._read(self._by_descriptor[descriptor])
                    self._release()
            look_again = time.monotonic() + self._patience if emptied else 0.0

    def _read(self, port: _Port) -> bool:
        """Take what has arrived for a device; say whether that was all."""
        buffer, receive = self._buffer, port.socket.recv_into
        now = time.monotonic()
        wall = time.time() - now
        emptied = False
        for _ in range(_MOST_READ):
            try:
                length = receive(buffer)
            except BlockingIOError:
                emptied = True
                break
            except OSError:
                port.overflows += 1  # ENOBUFS: the kernel has lost packets that it could not announce
                continue
            kind = buffer[4] | buffer[5] << 8
            if kind == nfqueue.PACKET:
                self._arrive(port, buffer, length, now, wall)
            elif kind == nfqueue.NLMSG_ERROR:
                port.refused += 1
        self._send(port)
        return emptied

    def _arrive(self, port: _Port, buffer: bytearray, length: int, now: float, wall: float) -> None:
        line = port.lines[nfqueue.packet_queue(buffer)]
        identity = nfqueue.packet_identity(buffer)
        if line.loss and line.next() < line.loss:
            line.dropped += 1
            port.verdicts += (line.drop, identity)
            return
        stamp = self._arrivals.read(buffer, length)
        arrived = now
        # A clock that was set between the two readings would make nonsense of the difference.
        if stamp is not None and -1.0 < stamp - wall - now < 1e-3:
            arrived = stamp - wall
        due = arrived + line.delay
        if due < line.latest:
            line.ordered = False
        else:
            line.latest = due
        heapq.heappush(line.heap, (due, identity))
        if due < line.listed:
            self._list(port, line)

    def _list(self, port: _Port, line: _Line) -> None:
        """Note when the line's next packet is due; an older note about the same line is void from now on."""
        line.listed = line.heap[0][0]
        self._ties += 1
        heapq.heappush(self._due, (line.listed, self._ties, port, line))

    def _release(self) -> None:
        """Let everything go whose time has come."""
        touched: set[_Port] = set()
        while self._due:
            now = time.monotonic()
            ripe = now + _EARLY
            due, _, port, line = self._due[0]
            if due > ripe:
                break
            heapq.heappop(self._due)
            if due != line.listed:
                continue
            heap = line.heap
            count = 0
            identity: bytearray | None = None
            while heap and heap[0][0] <= ripe:
                _, identity = heapq.heappop(heap)
                count += 1
                if not line.ordered:
                    port.verdicts += (line.accept, identity)
            if identity is not None:
                self._lateness.add(max(0.0, now - due), count)
                line.passed += count
                touched.add(port)
                if line.ordered:
                    port.verdicts += (line.accept_all, identity)
                    self._send(port)
            if heap:
                self._list(port, line)
            else:
                line.listed, line.ordered = math.inf, True
        for port in touched:
            self._send(port)

    def _send(self, port: _Port) -> None:
        """Tell the kernel what was decided for a device's packets."""
        while port.verdicts:
            some, port.verdicts = port.verdicts[:256], port.verdicts[256:]
            try:
                port.socket.send(b"".join(some))
            except OSError:
                port.refused += 1

    def _obey(self) -> bool:
        """Carry out one request of the server; False when it is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE, 1)
        if not data:
            return False
        request = json.loads(data)
        answer: dict[str, Any] = {}
        try:
            match request["do"]:
                case "open":
                    self._open(request["device"], socket.socket(fileno=descriptors[0]))
                case "close":
                    self._close(request["device"])
                case "set":
                    self._set(request["device"], [Impairment(**each) for each in request["impairments"]])
                case "statistics":
                    answer = self._statistics()
                case "reset":
                    self._lateness = Lateness()
        except OSError as error:
            answer = {"error": str(error)}
        self._control.send(json.dumps(answer).encode())
        return True

    def _open(self, device: str, opened: socket.socket) -> None:
        self._close(device)
        port = _Port(opened)
        self._ports[device] = port
        self._by_descriptor[opened.fileno()] = port
        self._epoll.register(opened.fileno(), select.EPOLLIN)

    def _close(self, device: str) -> None:
        port = self._ports.pop(device, None)
        if port is None:
            return
        self._epoll.unregister(port.socket.fileno())
        del self._by_descriptor[port.socket.fileno()]
        self._due = [entry for entry in self._due if entry[2] is not port]
        heapq.heapify(self._due)
        port.socket.close()

    def _set(self, device: str, impairments: list[Impairment]) -> None:
        port = self._ports[device]
        for impairment in impairments:
            queue = impairment.queue
            if queue in port.lines:
                port.lines[queue].alter(impairment)
                messages = [nfqueue.set_limit(queue, impairment.limit, self._sequence + 1)]
            else:
                port.lines[queue] = _Line(impairment)
                messages = nfqueue.bind(queue, impairment.limit, self._sequence + 1)
            for message in messages:
                self._sequence += 1
                self._acknowledged(port, message, self._sequence)
        shortest = min((line.delay for each in self._ports.values() for line in each.lines.values()), default=0.0)
        self._patience = min(_PATIENCE, shortest / 4)

    def _acknowledged(self, port: _Port, message: bytes, sequence: int) -> None:
        """Send one configuration message and wait until the kernel has agreed; packets meanwhile are not missed."""
        port.socket.send(message)
        patience = time.monotonic() + 2.0
        while time.monotonic() < patience:
            select.select([port.socket], [], [], 0.1)
            with contextlib.suppress(BlockingIOError):
                while True:
                    length = port.socket.recv_into(self._buffer)
                    kind = nfqueue.message_type(self._buffer)
                    if kind == nfqueue.PACKET:
                        now = time.monotonic()
                        self._arrive(port, self._buffer, length, now, time.time() - now)
                    elif kind == nfqueue.NLMSG_ERROR:
                        answered, error = nfqueue.acknowledgement(self._buffer)
                        if answered == sequence:
                            if error:
                                raise OSError(error, f"the kernel refuses a netfilter queue: {os.strerror(error)}")
                            return
        raise OSError("the kernel did not answer the request for a netfilter queue")

    def _statistics(self) -> dict[str, Any]:
        usage = os.times()
        return {
            "lateness": self._lateness.summary(),
            "processor_seconds": usage.user + usage.system,
            "devices": {
                device: {
                    "overflows": port.overflows,
                    "refused": port.refused,
                    "lines": {
                        str(queue): {"passed": line.passed, "dropped": line.dropped, "under_way": len(line.heap)}
                        for queue, line in port.lines.items()
                    },
                }
                for device, port in self._ports.items()
            },
        }


def _prioritise() -> str:
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


def main(descriptor: int) -> None:
    """Run the delay line on a control socket that was inherited."""
    control = socket.socket(fileno=descriptor)
    control.send(json.dumps({"priority": _prioritise()}).encode())
    # Nothing here makes cycles, and a collection in the wrong moment would make packets late.
    gc.disable()
    _Loop(control).run()


class DelayLine:
    """The server's end: starts the process and tells it what to do. Safe to use from several threads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE)
        self._control = ours
        self._control.settimeout(10)
        self._lock = threading.Lock()
        code = f"from controller.shaping.delayline import main; main({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.priority = str(self._answer()["priority"])

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(_MESSAGE)
        except OSError as error:
            raise HostError(f"the delay line does not answer: {error}") from error
        if not data:
            raise HostError(f"the delay line has ended with status {self._process.wait()}; see the shaper's log")
        answer: dict[str, Any] = json.loads(data)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer

    def _ask(self, request: dict[str, Any], descriptor: int | None = None) -> dict[str, Any]:
        data = json.dumps(request).encode()
        with self._lock:
            try:
                if descriptor is None:
                    self._control.send(data)
                else:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
                    self._control.sendmsg([data], [rights])
            except OSError as error:
                raise HostError(f"the delay line has ended: {error}; see the shaper's log") from error
            return self._answer()

    def open(self, device: str, netfilter: socket.socket) -> None:
        """Hand over a device's netfilter socket; the caller's copy is closed."""
        with netfilter:
            self._ask({"do": "open", "device": device}, netfilter.fileno())

    def close(self, device: str) -> None:
        """Forget a device; the kernel drops what is still queued for it."""
        self._ask({"do": "close", "device": device})

    def set(self, device: str, impairments: list[Impairment]) -> None:
        """Say what becomes of the packets of these queues from now on; raises HostError if the kernel refuses."""
        self._ask({"do": "set", "device": device, "impairments": [asdict(each) for each in impairments]})

    def statistics(self) -> dict[str, Any]:
        """Return lateness percentiles, processor time, and per device and queue what passed and was dropped."""
        return self._ask({"do": "statistics"})

    def reset(self) -> None:
        """Start the lateness figures anew."""
        self._ask({"do": "reset"})

    def alive(self) -> bool:
        """Say whether the process still runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        self._control.close()
        self._process.wait(5)
