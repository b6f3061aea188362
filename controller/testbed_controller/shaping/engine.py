"""The process of the delay line: it holds queued packets until they are due, and loses, alters and repeats some.

The process owns one netfilter socket for each device and answers the server's requests on a local socket (`helper.py`
has the server's end). `impairments.py` decides about packets; this module executes the decisions in time.
"""

from __future__ import annotations

import heapq
import math
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

from testbed.network import impairments
from testbed.network.link import Link
from testbed.wire.framing import ETHERNET_HEADER
from testbed_controller.shaping import nfqueue
from testbed_controller.shaping.helper import LatenessHistogram, serve_request
from testbed_controller.shaping.medium import Bottleneck

_MOST_READ = 64
"""Maximum number of packets read from one device before due packets are released."""
_PATIENCE = 2e-3
"""Maximum time to let arrivals gather, in seconds; the kernel has recorded the arrival of each."""
_EARLY = 60e-6
"""Maximum earliness of a packet released with another one, in seconds: one wake-up serves several."""
_IP_HEADER = 20
"""Bytes of an IPv4 header without options."""
_LOOPBACK_FRAME = bytes(12) + b"\x08\x00"
_SO_TIMESTAMPNS = 35
"""Constant of asm-generic/socket.h, which Python's `socket` lacks."""

_Entry = tuple[float, bytearray | bytes, int, bytes | None]
"""Due instant; identity of the packet in a verdict, with a suffix for a second copy; bytes on the wire if needed;
content if it differs from the kernel's."""
_COPY = b"+"


class _DelayQueue:
    """The packets in transit over one link: a line."""

    def __init__(self, queue: int, link: Link, seed: str) -> None:
        self.queue = queue
        self.accept = nfqueue.make_verdict_prefix(queue, nfqueue.ACCEPT)
        self.accept_all = nfqueue.make_verdict_prefix(queue, nfqueue.ACCEPT, batch=True)
        self.drop = nfqueue.make_verdict_prefix(queue, nfqueue.DROP)
        self.heap: list[_Entry] = []
        self.latest = 0.0
        self.ordered = True
        """Whether all packets leave in order, once and unaltered."""
        self.next_check = math.inf
        """Instant at which the loop will check this line."""
        self.passed = 0
        self.dropped = 0
        self.duplicated = 0
        self.corrupted = 0
        self.alter(link, seed)

    def alter(self, link: Link, seed: str) -> None:
        """Change the link for future packets; packets in transit keep their due time."""
        self.constant = link.delay
        # Each impairment draws from a sequence of its own, so that switching one on leaves the others' draws alone.
        self.delay = impairments.delay_process(link, f"{seed} delay")
        self.lost = impairments.loss_process(link, f"{seed} loss")
        self.duplicates = impairments.bernoulli_process(
            link.duplicate, f"{seed} duplicate"
        )
        self.corrupts = impairments.bernoulli_process(link.corrupt, f"{seed} corrupt")
        self.random = Random(f"{seed} bit")


class _Port:
    """A device: the netfilter socket of its namespace, a line per sender, and a downlink if its rate is limited."""

    def __init__(self, opened: socket.socket, injector: socket.socket) -> None:
        opened.setblocking(False)
        injector.setblocking(False)
        self.socket = opened
        self.injector = injector
        """A packet socket on the namespace's loopback, which delivers duplicates and altered copies."""
        self.lines: dict[int, _DelayQueue] = {}
        self.downlink: (
            Bottleneck[tuple[_DelayQueue, bytearray | bytes, bytes | None]] | None
        ) = None
        """Never removed, since packets may wait in it; without a rate, all packets pass."""
        self.downlink_next_check = math.inf
        self.verdicts: list[bytes | bytearray] = []
        self.overflows = 0
        self.refused = 0


class Loop:
    """The event loop: waits for packets, due instants, and the server, without busy waiting."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._ports: dict[str, _Port] = {}
        self._by_descriptor: dict[int, _Port] = {}
        self._due: list[tuple[float, int, _Port, _DelayQueue | None]] = []
        """Instants to check a line, or (None) a port's downlink; void if that has another instant by now."""
        self._ties = 0
        # Room for a packet of 64 KiB with its attributes.
        self._buffer = bytearray(1 << 17)
        self._arrivals = nfqueue.TimestampReader()
        self._lateness = LatenessHistogram()
        self._patience = 0.0
        # Any socket with time stamps makes the kernel record every packet's arrival, so that the wait for this
        # process does not delay a packet.
        self._stamps = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._stamps.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def run(self) -> None:
        """Run until the server disconnects."""
        look_again = 0.0
        while True:
            self._wait(look_again)
            self._release_due()
            if time.monotonic() < look_again:
                continue
            emptied = True
            for descriptor, _ in self._epoll.poll(0):
                if descriptor == self._control.fileno():
                    if not serve_request(self._control, self._execute_request, 2):
                        return
                elif descriptor in self._by_descriptor:
                    emptied &= self._read(self._by_descriptor[descriptor])
                    self._release_due()
            look_again = time.monotonic() + self._patience if emptied else 0.0

    def _wait(self, look_again: float) -> None:
        """Wait until a packet is due; arrivals end the wait only from the monotonic instant ``look_again`` on."""
        now = time.monotonic()
        due = self._due[0][0] if self._due else math.inf
        if now < look_again:
            time.sleep(max(0.0, min(due, look_again) - now))
            return
        # select has a resolution of microseconds, epoll only of milliseconds.
        timeout = None if due == math.inf else max(0.0, due - now)
        select.select([self._epoll.fileno()], [], [], timeout)

    # Packets in

    def _read(self, port: _Port) -> bool:
        """Read the arrived packets of a device; return whether all were read."""
        # Local names, since this loop runs for every packet.
        buffer = self._buffer
        receive = port.socket.recv_into
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
                port.overflows += 1  # ENOBUFS: the kernel has dropped packets that it could not announce
                continue
            kind = buffer[4] | buffer[5] << 8
            if kind == nfqueue.PACKET:
                self._handle_packet(port, buffer, length, now, wall)
            elif kind == nfqueue.NLMSG_ERROR:
                port.refused += 1
        self._send_verdicts(port)
        return emptied

    def _handle_packet(
        self, port: _Port, buffer: bytearray, length: int, now: float, wall: float
    ) -> None:
        line = port.lines[nfqueue.packet_queue(buffer)]
        identity = nfqueue.packet_identity(buffer)
        stamp = self._arrivals.read(buffer, length)
        arrived = now
        # An adjustment of the clock between the two readings would spoil the difference.
        if stamp is not None and -1.0 < stamp - wall - now < 1e-3:
            arrived = stamp - wall
        if line.duplicates or line.corrupts or port.downlink:
            packet = nfqueue.packet_content(buffer, length)
            self._arrive_with_content(port, line, identity, packet, arrived)
        elif line.lost is not None and line.lost():
            line.dropped += 1
            port.verdicts += (line.drop, identity)
        else:
            self._hold_packet(port, line, arrived, (identity, 0, None))

    def _arrive_with_content(
        self,
        port: _Port,
        line: _DelayQueue,
        identity: bytearray,
        packet: bytes,
        arrived: float,
    ) -> None:
        # Both copies meet loss, corruption and delay for themselves (docs/fidelity.md).
        is_doubled = line.duplicates is not None and bool(packet) and line.duplicates()
        self._arrive_once(port, line, identity, packet, arrived, is_copy=False)
        if is_doubled:
            line.duplicated += 1
            self._arrive_once(port, line, identity, packet, arrived, is_copy=True)

    def _arrive_once(
        self,
        port: _Port,
        line: _DelayQueue,
        identity: bytearray,
        packet: bytes,
        arrived: float,
        *,
        is_copy: bool,
    ) -> None:
        """Lose, corrupt or hold a packet, or its second copy, which the kernel does not know."""
        content = packet if is_copy else None
        is_lost = line.lost is not None and line.lost()
        corrupts = line.corrupts if packet else None
        if not is_lost and corrupts is not None and corrupts():
            line.corrupted += 1
            content = impairments.corrupt_packet(packet, line.random)
            is_lost = content is None
        if not is_lost:
            # The total length of the IP header, bytes 2 and 3.
            size = ETHERNET_HEADER + (packet[2] << 8 | packet[3]) if packet else 0
            held_identity = identity + _COPY if is_copy else identity
            self._hold_packet(port, line, arrived, (held_identity, size, content))
        elif not is_copy:
            line.dropped += 1
            port.verdicts += (line.drop, identity)

    def _hold_packet(
        self,
        port: _Port,
        line: _DelayQueue,
        arrived: float,
        entry: tuple[bytearray | bytes, int, bytes | None],
    ) -> None:
        """Store a packet, or a copy, until the end of the delay."""
        due = arrived + (line.constant if line.delay is None else line.delay())
        # One batched verdict releases all packets up to an identity, which needs their order of arrival.
        if due < line.latest or entry[2] is not None:
            line.ordered = False
        if due > line.latest:
            line.latest = due
        heapq.heappush(line.heap, (due, *entry))
        if due < line.next_check:
            line.next_check = due
            self._note_check(port, line, due)

    def _note_check(self, port: _Port, line: _DelayQueue | None, when: float) -> None:
        """Note when to check a line or a downlink; an older note about the same one becomes void."""
        self._ties += 1
        heapq.heappush(self._due, (when, self._ties, port, line))

    # Packets out

    def _release_due(self) -> None:
        """Release all due packets."""
        touched: set[_Port] = set()
        while self._due:
            now = time.monotonic()
            until = now + _EARLY
            due, _, port, line = self._due[0]
            if due > until:
                break
            heapq.heappop(self._due)
            if line is None:
                if due == port.downlink_next_check:
                    port.downlink_next_check = math.inf
                    count = self._serve_downlink(port, until)
                    self._lateness.add(max(0.0, now - due), count)
                    touched.add(port)
                continue
            if due != line.next_check:
                continue
            count = self._pop_due(port, line, until)
            self._lateness.add(max(0.0, now - due), count)
            line.passed += count
            touched.add(port)
            if port.downlink is not None:
                self._serve_downlink(port, until)
            if line.heap:
                line.next_check = line.heap[0][0]
                self._note_check(port, line, line.next_check)
            else:
                line.next_check = math.inf
                line.ordered = True
        for port in touched:
            self._send_verdicts(port)

    def _pop_due(self, port: _Port, line: _DelayQueue, until: float) -> int:
        """Move due packets from a line to the device or the downlink; return the number."""
        heap = line.heap
        count = 0
        identity: bytearray | bytes | None = None
        while heap and heap[0][0] <= until:
            due, identity, size, content = heapq.heappop(heap)
            count += 1
            if port.downlink is not None:
                item = (line, identity, content)
                if not port.downlink.enter(line.queue, due, size, item):
                    line.dropped += 1
                    # The kernel holds no second copy that it could drop.
                    if len(identity) == nfqueue.IDENTITY_SIZE:
                        port.verdicts += (line.drop, identity)
            elif not line.ordered:
                self._deliver_packet(port, line, identity, content)
        if identity is not None and port.downlink is None and line.ordered:
            port.verdicts += (line.accept_all, identity)
            self._send_verdicts(port)
        return count

    def _serve_downlink(self, port: _Port, until: float) -> int:
        """Release the packets past a downlink; return the number."""
        assert port.downlink is not None
        count = 0
        while port.downlink.due <= until:
            self._deliver_packet(port, *port.downlink.leave())
            count += 1
        due = port.downlink.due
        if due < port.downlink_next_check:
            port.downlink_next_check = due
            self._note_check(port, None, due)
        return count

    def _deliver_packet(
        self,
        port: _Port,
        line: _DelayQueue,
        identity: bytearray | bytes,
        content: bytes | None,
    ) -> None:
        if content is None:
            port.verdicts += (line.accept, identity)
        elif len(identity) == nfqueue.IDENTITY_SIZE:
            # Earlier packets first: a verdict with content goes to the kernel by itself.
            self._send_verdicts(port)
            verdict = nfqueue.make_altered_verdict(line.queue, identity, content)
            self._send_messages(port, verdict)
        else:
            try:
                port.injector.send(_LOOPBACK_FRAME + content)
            except OSError:
                port.refused += 1

    def _send_verdicts(self, port: _Port) -> None:
        """Send the kernel the decisions about a device's packets."""
        while port.verdicts:
            # 128 verdicts of two parts, which the socket's buffer always has room for.
            batch = port.verdicts[:256]
            port.verdicts = port.verdicts[256:]
            self._send_messages(port, b"".join(batch))

    @staticmethod
    def _send_messages(port: _Port, messages: bytes) -> None:
        try:
            port.socket.send(messages)
        except OSError:
            port.refused += 1

    # Requests

    def _execute_request(
        self, request: dict[str, Any], descriptors: list[int]
    ) -> dict[str, Any] | None:
        match request["do"]:
            case "open":
                opened = [
                    socket.socket(fileno=descriptor) for descriptor in descriptors
                ]
                self._open_port(request["device"], *opened)
            case "close":
                self._close_port(request["device"])
            case "set":
                self._configure_queues(self._ports[request["device"]], request)
            case "statistics":
                return self._get_statistics()
            case "reset":
                self._lateness = LatenessHistogram()
        return None

    def _open_port(
        self, device: str, opened: socket.socket, injector: socket.socket
    ) -> None:
        self._close_port(device)
        port = _Port(opened, injector)
        self._ports[device] = port
        self._by_descriptor[opened.fileno()] = port
        self._epoll.register(opened.fileno(), select.EPOLLIN)

    def _close_port(self, device: str) -> None:
        port = self._ports.pop(device, None)
        if port is None:
            return
        self._epoll.unregister(port.socket.fileno())
        del self._by_descriptor[port.socket.fileno()]
        self._due = [entry for entry in self._due if entry[2] is not port]
        heapq.heapify(self._due)
        port.socket.close()
        port.injector.close()

    def _configure_queues(self, port: _Port, request: Mapping[str, Any]) -> None:
        rate, limit = request["downlink"] or (math.inf, sys.maxsize)
        if port.downlink is not None:
            port.downlink.alter(time.monotonic(), rate, limit)
        elif rate < math.inf:
            port.downlink = Bottleneck(rate, limit)
        for impairment in request["impairments"]:
            self._configure_queue(port, impairment)
        self._set_patience()
        if port.downlink is not None:
            # A higher rate may have made waiting packets due.
            self._serve_downlink(port, time.monotonic())
            self._send_verdicts(port)

    def _configure_queue(self, port: _Port, impairment: Mapping[str, Any]) -> None:
        def arrived(length: int) -> None:
            # Packets of other queues arrive between the request to the kernel and its answer, on the same socket.
            now = time.monotonic()
            self._handle_packet(port, self._buffer, length, now, time.time() - now)

        queue = impairment["queue"]
        link = Link.from_json(impairment["link"])
        seed = impairment["seed"]
        # Copying content costs processor time for each packet, so the kernel is asked for as little as possible.
        content = 0
        if link.duplicate or link.corrupt:
            content = nfqueue.WHOLE
        elif port.downlink:
            # The header has the size of the packet, which the downlink charges.
            content = _IP_HEADER
        if queue in port.lines:
            port.lines[queue].alter(link, seed)
        else:
            port.lines[queue] = _DelayQueue(queue, link, seed)
            binding = partial(nfqueue.make_bind_message, queue)
            nfqueue.configure_socket(port.socket, binding, self._buffer, arrived)
        limit = impairment["limit"]
        limits = partial(nfqueue.make_configure_message, queue, limit, content)
        nfqueue.configure_socket(port.socket, limits, self._buffer, arrived)

    def _set_patience(self) -> None:
        # Waiting a quarter of the shortest delay leaves time to release every packet when due.
        shortest = math.inf
        for port in self._ports.values():
            for line in port.lines.values():
                shortest = min(shortest, line.constant)
        self._patience = min(_PATIENCE, shortest / 4) if shortest < math.inf else 0.0

    def _get_statistics(self) -> dict[str, Any]:
        devices = {}
        for device, port in self._ports.items():
            lines = {}
            for queue, line in port.lines.items():
                lines[str(queue)] = {
                    "passed": line.passed,
                    "dropped": line.dropped,
                    "duplicated": line.duplicated,
                    "corrupted": line.corrupted,
                    "under_way": len(line.heap),
                }
            devices[device] = {
                "overflows": port.overflows,
                "refused": port.refused,
                "downlink_drops": port.downlink.dropped if port.downlink else 0,
                "lines": lines,
            }
        usage = os.times()
        return {
            "lateness": self._lateness.summary(),
            "processor_seconds": usage.user + usage.system,
            "devices": devices,
        }
