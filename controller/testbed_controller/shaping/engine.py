"""The process of the delay line: it holds arriving packets until their delay has passed, and drops, alters and
duplicates some of them.

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

_READ_BATCH = 64
"""Maximum number of packets read from one device before due packets are released."""
_MAX_GATHER_SECONDS = 2e-3
"""Maximum pause between two reads, in seconds, in which packets gather; the kernel records the arrival of each."""
_EARLY_SECONDS = 60e-6
"""Maximum time by which a packet may be released too early, in seconds, so that one wake-up releases several."""
_IP_HEADER = 20
"""Bytes of an IPv4 header without options."""
_LOOPBACK_FRAME = bytes(12) + b"\x08\x00"
_SO_TIMESTAMPNS = 35
"""Constant of asm-generic/socket.h, which Python's `socket` lacks."""

_HeldPacket = tuple[float, bytearray | bytes, int, bytes | None]
"""A packet that is held.

The values are the instant at which it is due; its identity in a verdict, with `_COPY_SUFFIX` appended for the second
copy; the bytes on the wire if the downlink charges them, else 0; and the content if it differs from the kernel's."""
_COPY_SUFFIX = b"+"


class _DelayQueue:
    """A line: the packets in transit over one link, with the impairments of the link."""

    def __init__(self, queue: int, link: Link, seed: str) -> None:
        self.queue = queue
        self.accept = nfqueue.make_verdict_prefix(queue, nfqueue.ACCEPT)
        self.accept_all = nfqueue.make_verdict_prefix(queue, nfqueue.ACCEPT, batch=True)
        self.drop = nfqueue.make_verdict_prefix(queue, nfqueue.DROP)
        self.heap: list[_HeldPacket] = []
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
        # Each impairment has its own random sequence, so that enabling one does not change the draws of the others.
        self.delay = impairments.delay_process(link, f"{seed} delay")
        self.draw_loss = impairments.loss_process(link, f"{seed} loss")
        self.duplicates = impairments.bernoulli_process(
            link.duplicate, f"{seed} duplicate"
        )
        self.corrupts = impairments.bernoulli_process(link.corrupt, f"{seed} corrupt")
        self.random = Random(f"{seed} bit")


class _Port:
    """A device: the netfilter socket of its namespace, a line per sender, and a downlink if its rate is limited."""

    def __init__(self, netfilter: socket.socket, injector: socket.socket) -> None:
        netfilter.setblocking(False)
        injector.setblocking(False)
        self.socket = netfilter
        self.injector = injector
        """A packet socket on the namespace's loopback, which delivers duplicates and altered copies."""
        self.lines: dict[int, _DelayQueue] = {}
        self.downlink: (
            Bottleneck[tuple[_DelayQueue, bytearray | bytes, bytes | None]] | None
        ) = None
        """The limited rate; never removed, since packets may wait in it. Without a rate, all packets pass."""
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
        """Heap of (instant, entry number, port, line) of checks; without a line, the port's downlink is checked.

        An entry is ignored if the next check of its line or downlink has another instant by now."""
        self._entry_count = 0
        """Number of entries so far; a unique number in each entry, because ports and lines cannot be compared."""
        # Room for a packet of 64 KiB with its attributes.
        self._buffer = bytearray(1 << 17)
        self._arrivals = nfqueue.TimestampReader()
        self._lateness = LatenessHistogram()
        self._gather_seconds = 0.0
        # While any socket with time stamps is open, the kernel records the arrival of every packet. Delays count from
        # there, so the time until this process reads a packet does not add to them.
        self._stamps = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._stamps.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def run(self) -> None:
        """Run until the server disconnects."""
        read_from = 0.0
        while True:
            self._wait(read_from)
            self._release_due()
            if time.monotonic() < read_from:
                continue
            were_all_read = True
            for descriptor, _ in self._epoll.poll(0):
                if descriptor == self._control.fileno():
                    if not serve_request(self._control, self._execute_request, 2):
                        return
                elif descriptor in self._by_descriptor:
                    were_all_read &= self._read(self._by_descriptor[descriptor])
                    self._release_due()
            # Further packets may gather only if no packet is left to read.
            read_from = 0.0
            if were_all_read:
                read_from = time.monotonic() + self._gather_seconds

    def _wait(self, read_from: float) -> None:
        """Wait until a packet is due; arrivals end the wait only from the monotonic instant ``read_from`` on."""
        now = time.monotonic()
        due = self._due[0][0] if self._due else math.inf
        if now < read_from:
            time.sleep(max(0.0, min(due, read_from) - now))
            return
        # select has a resolution of microseconds, epoll only of milliseconds.
        timeout = None if due == math.inf else max(0.0, due - now)
        select.select([self._epoll.fileno()], [], [], timeout)

    # Arriving packets

    def _read(self, port: _Port) -> bool:
        """Read the arrived packets of a device; return whether all were read."""
        # Local names, since this loop runs for every packet.
        buffer = self._buffer
        receive = port.socket.recv_into
        now = time.monotonic()
        wall = time.time() - now
        were_all_read = False
        for _ in range(_READ_BATCH):
            try:
                length = receive(buffer)
            except BlockingIOError:
                were_all_read = True
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
        return were_all_read

    def _handle_packet(
        self, port: _Port, buffer: bytearray, length: int, now: float, wall: float
    ) -> None:
        line = port.lines[nfqueue.packet_queue(buffer)]
        identity = nfqueue.packet_identity(buffer)
        stamp = self._arrivals.read(buffer, length)
        arrived = now
        # The kernel's time stamp is ignored if it differs by too much, because the wall clock was adjusted meanwhile.
        if stamp is not None and -1.0 < stamp - wall - now < 1e-3:
            arrived = stamp - wall
        if line.duplicates or line.corrupts or port.downlink:
            packet = nfqueue.packet_content(buffer, length)
            self._arrive_with_content(port, line, identity, packet, arrived)
        elif line.draw_loss is not None and line.draw_loss():
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
        # Loss, corruption and delay are drawn for each copy separately (docs/fidelity.md).
        is_duplicated = (
            line.duplicates is not None and bool(packet) and line.duplicates()
        )
        self._arrive_once(port, line, identity, packet, arrived, is_copy=False)
        if is_duplicated:
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
        """Drop, corrupt or hold a packet or its second copy.

        Only the first copy needs a verdict if it is dropped, since the kernel does not know the second.
        """
        content = packet if is_copy else None
        is_lost = line.draw_loss is not None and line.draw_loss()
        corrupts = line.corrupts if packet else None
        if not is_lost and corrupts is not None and corrupts():
            line.corrupted += 1
            content = impairments.corrupt_packet(packet, line.random)
            is_lost = content is None
        if not is_lost:
            # The total length of the IP header, bytes 2 and 3.
            size = ETHERNET_HEADER + (packet[2] << 8 | packet[3]) if packet else 0
            held_identity = identity + _COPY_SUFFIX if is_copy else identity
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
        # A batched verdict releases all packets up to an identity, so packets must leave unaltered and in the order of
        # arrival.
        if due < line.latest or entry[2] is not None:
            line.ordered = False
        if due > line.latest:
            line.latest = due
        heapq.heappush(line.heap, (due, *entry))
        if due < line.next_check:
            line.next_check = due
            self._schedule_check(port, line, due)

    def _schedule_check(
        self, port: _Port, line: _DelayQueue | None, when: float
    ) -> None:
        """Schedule the next check of a line or a downlink, which replaces its earlier one."""
        self._entry_count += 1
        heapq.heappush(self._due, (when, self._entry_count, port, line))

    # Leaving packets

    def _release_due(self) -> None:
        """Release all due packets."""
        served_ports: set[_Port] = set()
        while self._due:
            now = time.monotonic()
            until = now + _EARLY_SECONDS
            due, _, port, line = self._due[0]
            if due > until:
                break
            heapq.heappop(self._due)
            if line is None:
                if due == port.downlink_next_check:
                    port.downlink_next_check = math.inf
                    count = self._serve_downlink(port, until)
                    self._lateness.add(max(0.0, now - due), count)
                    served_ports.add(port)
                continue
            if due != line.next_check:
                continue
            count = self._pop_due(port, line, until)
            self._lateness.add(max(0.0, now - due), count)
            line.passed += count
            served_ports.add(port)
            if port.downlink is not None:
                self._serve_downlink(port, until)
            if line.heap:
                line.next_check = line.heap[0][0]
                self._schedule_check(port, line, line.next_check)
            else:
                line.next_check = math.inf
                line.ordered = True
        for port in served_ports:
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
            self._schedule_check(port, None, due)
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
            # A verdict with content is sent separately, so the verdicts of earlier packets must be sent before.
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
            # Each verdict has two parts, so a batch has 128 verdicts, for which the socket's buffer always has room.
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
                sockets = [
                    socket.socket(fileno=descriptor) for descriptor in descriptors
                ]
                self._open_port(request["device"], *sockets)
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
        self, device: str, netfilter: socket.socket, injector: socket.socket
    ) -> None:
        self._close_port(device)
        port = _Port(netfilter, injector)
        self._ports[device] = port
        self._by_descriptor[netfilter.fileno()] = port
        self._epoll.register(netfilter.fileno(), select.EPOLLIN)

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
        self._set_gather_seconds()
        if port.downlink is not None:
            # At a higher rate, waiting packets may be due already.
            self._serve_downlink(port, time.monotonic())
            self._send_verdicts(port)

    def _configure_queue(self, port: _Port, impairment: Mapping[str, Any]) -> None:
        def arrived(length: int) -> None:
            # The kernel's answer arrives on the socket of the packets, and packets of other queues may precede it.
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

    def _set_gather_seconds(self) -> None:
        # Packets gather for at most a quarter of the shortest delay, so each is read before it is due.
        shortest = math.inf
        for port in self._ports.values():
            for line in port.lines.values():
                shortest = min(shortest, line.constant)
        self._gather_seconds = (
            min(_MAX_GATHER_SECONDS, shortest / 4) if shortest < math.inf else 0.0
        )

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
