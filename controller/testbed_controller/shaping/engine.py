"""The process of the delay line: it holds arriving packets until their delay has passed, and drops, alters and
duplicates some of them.

The kernel announces each packet that arrives at a device on the device's netfilter socket, in a numbered queue for each
link, and holds the packet until this process answers with a verdict: accept, drop, or accept with other content. The
packets in transit over one link are a line. Behind its line, a packet passes the downlink of the device, if its rate is
limited.

`impairments.py` decides about packets; this module executes the decisions in time. The server's requests arrive on a
local socket (`helper.py` has the server's end).
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
"""Maximum number of packets read from one device before the packets in transit are checked again."""
_MAX_GATHER_SECONDS = 2e-3
"""Maximum pause between two reads, in seconds, so that one read finds several packets. The pause does not lengthen
delays, since the kernel records the arrival of each packet."""
_EARLY_SECONDS = 60e-6
"""Maximum time by which a packet may be released too early, in seconds, so that one wake-up releases several."""
_IP_HEADER = 20
"""Bytes of an IPv4 header without options."""
_LOOPBACK_HEADER = bytes(12) + b"\x08\x00"
"""Ethernet header of a frame on the loopback: two addresses of zeros, and the type of IPv4."""
_SO_TIMESTAMPNS = 35
"""Constant of asm-generic/socket.h, which Python's `socket` lacks."""

_HeldPacket = tuple[float, bytearray | bytes, int, bytes | None]
"""A packet in transit: (due, identity, size, content).

``due`` is the instant at which its delay ends; ``identity`` names the packet in a verdict, with `_COPY_SUFFIX` for the
second copy of a duplicated packet; ``size`` is in bytes on the wire, 0 if unknown; ``content`` is None if it is the
kernel's."""
_COPY_SUFFIX = b"+"
"""Makes the identity of a second copy longer than a kernel's identity: the kernel does not know this copy."""


class _Line:
    """The packets in transit over one link, with the impairments of the link."""

    def __init__(self, queue: int, link: Link, seed: str) -> None:
        self.queue = queue
        """Number of the link's netfilter queue."""
        # A verdict is one of these prefixes, followed by the identity of a packet.
        self.accept_prefix = nfqueue.make_verdict_prefix(queue, nfqueue.ACCEPT)
        self.accept_all_prefix = nfqueue.make_verdict_prefix(
            queue, nfqueue.ACCEPT, batch=True
        )
        self.drop_prefix = nfqueue.make_verdict_prefix(queue, nfqueue.DROP)
        self.packets: list[_HeldPacket] = []
        """Heap, so that the first packet is the next to leave."""
        self.latest_due = 0.0
        self.is_ordered = True
        """Whether all packets leave in order, once and unaltered."""
        self.next_check = math.inf
        """Instant at which the loop will release due packets of this line."""
        # Numbers of packets, for the statistics.
        self.passed = 0
        self.dropped = 0
        self.duplicated = 0
        self.corrupted = 0
        self.alter(link, seed)

    def alter(self, link: Link, seed: str) -> None:
        """Change the link for future packets; packets in transit keep their due time."""
        self.constant_delay = link.delay
        """Delay in seconds, if `draw_delay` is None."""
        # Each impairment has its own random sequence, so that enabling one does not change the draws of the others.
        self.draw_delay = impairments.delay_process(link, f"{seed} delay")
        self.draw_loss = impairments.loss_process(link, f"{seed} loss")
        self.draw_duplicate = impairments.bernoulli_process(
            link.duplicate, f"{seed} duplicate"
        )
        self.draw_corrupt = impairments.bernoulli_process(
            link.corrupt, f"{seed} corrupt"
        )
        self.bit_random = Random(f"{seed} bit")


class _Device:
    """The netfilter socket of a device's namespace, a line per sender, and a downlink if its rate is limited."""

    def __init__(self, netfilter: socket.socket, injector: socket.socket) -> None:
        netfilter.setblocking(False)
        injector.setblocking(False)
        self.socket = netfilter
        self.injector = injector
        """A packet socket on the namespace's loopback, which delivers duplicates and altered copies."""
        self.lines: dict[int, _Line] = {}
        """Lines by the number of their netfilter queue."""
        self.downlink: (
            Bottleneck[tuple[_Line, bytearray | bytes, bytes | None]] | None
        ) = None
        """Never removed, since packets may wait in it; when the limit is lifted, its rate becomes infinite."""
        self.downlink_next_check = math.inf
        self.verdicts: list[bytes | bytearray] = []
        """Unsent verdicts: prefix, identity, prefix, identity, and so on."""
        self.overflows = 0
        """Number of times that the kernel dropped packets because the socket's buffer was full."""
        self.refused = 0
        """Number of verdicts and copies that the kernel refused."""


class Loop:
    """The event loop: waits for packets, due instants, and the server, without busy waiting."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._devices: dict[str, _Device] = {}
        self._by_descriptor: dict[int, _Device] = {}
        self._checks: list[tuple[float, int, _Device, _Line | None]] = []
        """Heap of (instant, entry number, device, line): when to check a line for due packets, or, without a line, the
        downlink of the device.

        An entry is ignored if the next check of its line or downlink has another instant by now."""
        self._entry_count = 0
        """Number of entries so far; a unique number in each entry, because devices and lines cannot be compared."""
        # Room for a packet of 64 KiB with its attributes.
        self._buffer = bytearray(1 << 17)
        self._stamp_reader = nfqueue.TimestampReader()
        self._lateness = LatenessHistogram()
        self._gather_seconds = 0.0
        # Never read: while any socket with time stamps is open, the kernel records the arrival of every packet. Delays
        # count from the arrival, so the time until this process reads a packet does not add to them.
        self._stamp_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._stamp_socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

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
                    were_all_read &= self._read_packets(self._by_descriptor[descriptor])
                    self._release_due()
            # Further packets may gather only if no packet is left to read.
            read_from = 0.0
            if were_all_read:
                read_from = time.monotonic() + self._gather_seconds

    def _wait(self, read_from: float) -> None:
        """Wait until a packet is due; arrivals end the wait only from the monotonic instant ``read_from`` on."""
        now = time.monotonic()
        due = self._checks[0][0] if self._checks else math.inf
        if now < read_from:
            time.sleep(max(0.0, min(due, read_from) - now))
            return
        # select has a resolution of microseconds, epoll only of milliseconds.
        timeout = None if due == math.inf else max(0.0, due - now)
        select.select([self._epoll.fileno()], [], [], timeout)

    # Arriving packets

    def _read_packets(self, device: _Device) -> bool:
        """Read the arrived packets of a device; return whether all were read."""
        # Local names are faster than attributes, and this loop runs for every packet.
        buffer = self._buffer
        receive = device.socket.recv_into
        now = time.monotonic()
        clock_offset = time.time() - now
        were_all_read = False
        for _ in range(_MOST_READ):
            try:
                length = receive(buffer)
            except BlockingIOError:
                were_all_read = True
                break
            except OSError:
                device.overflows += 1  # ENOBUFS: the kernel has dropped packets that it could not announce
                continue
            kind = nfqueue.message_type(buffer)
            if kind == nfqueue.PACKET:
                self._admit_packet(device, buffer, length, now, clock_offset)
            elif kind == nfqueue.NLMSG_ERROR:
                device.refused += 1
        self._send_verdicts(device)
        return were_all_read

    def _admit_packet(
        self,
        device: _Device,
        buffer: bytearray,
        length: int,
        now: float,
        clock_offset: float,
    ) -> None:
        """Drop or hold the packet of a message read at the monotonic instant ``now``.

        ``clock_offset`` is the wall clock's time minus the monotonic clock's, in seconds.
        """
        line = device.lines[nfqueue.packet_queue(buffer)]
        identity = nfqueue.packet_identity(buffer)
        stamp = self._stamp_reader.read(buffer, length)
        arrived = now
        if stamp is not None:
            stamped = stamp - clock_offset
            # A time stamp more than a second old or in the future means that the wall clock was adjusted meanwhile.
            if -1.0 < stamped - now < 1e-3:
                arrived = stamped
        if line.draw_duplicate or line.draw_corrupt or device.downlink:
            packet = nfqueue.packet_content(buffer, length)
            self._admit_copies(device, line, identity, packet, arrived)
        elif line.draw_loss is not None and line.draw_loss():
            line.dropped += 1
            device.verdicts += (line.drop_prefix, identity)
        else:
            self._hold_packet(device, line, arrived, identity, size=0, content=None)

    def _admit_copies(
        self,
        device: _Device,
        line: _Line,
        identity: bytearray,
        packet: bytes,
        arrived: float,
    ) -> None:
        """Drop or hold a packet whose content is known, and perhaps a duplicate."""
        # Loss, corruption and delay are drawn for each copy separately (docs/fidelity.md).
        is_duplicated = (
            line.draw_duplicate is not None and bool(packet) and line.draw_duplicate()
        )
        self._admit_copy(device, line, identity, packet, arrived, is_copy=False)
        if is_duplicated:
            line.duplicated += 1
            self._admit_copy(device, line, identity, packet, arrived, is_copy=True)

    def _admit_copy(
        self,
        device: _Device,
        line: _Line,
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
        draw_corrupt = line.draw_corrupt if packet else None
        if not is_lost and draw_corrupt is not None and draw_corrupt():
            line.corrupted += 1
            content = impairments.corrupt_packet(packet, line.bit_random)
            # Without a new content, the receiver would reject the packet.
            is_lost = content is None
        if not is_lost:
            # The total length of the IP header, bytes 2 and 3.
            size = ETHERNET_HEADER + (packet[2] << 8 | packet[3]) if packet else 0
            held_identity = identity + _COPY_SUFFIX if is_copy else identity
            self._hold_packet(device, line, arrived, held_identity, size, content)
        elif not is_copy:
            line.dropped += 1
            device.verdicts += (line.drop_prefix, identity)

    def _hold_packet(
        self,
        device: _Device,
        line: _Line,
        arrived: float,
        identity: bytearray | bytes,
        size: int,
        content: bytes | None,
    ) -> None:
        """Store a packet, or a copy, until the end of the delay."""
        delay = line.constant_delay if line.draw_delay is None else line.draw_delay()
        due = arrived + delay
        # A batched verdict releases all packets up to an identity, so packets must leave unaltered and in the order of
        # arrival.
        if due < line.latest_due or content is not None:
            line.is_ordered = False
        if due > line.latest_due:
            line.latest_due = due
        heapq.heappush(line.packets, (due, identity, size, content))
        if due < line.next_check:
            line.next_check = due
            self._schedule_check(device, line, due)

    def _schedule_check(self, device: _Device, line: _Line | None, when: float) -> None:
        """Schedule the next check of a line, or of the downlink if ``line`` is None."""
        self._entry_count += 1
        heapq.heappush(self._checks, (when, self._entry_count, device, line))

    # Leaving packets

    def _release_due(self) -> None:
        """Release the due packets of all lines and downlinks."""
        served_devices: set[_Device] = set()
        while self._checks:
            now = time.monotonic()
            until = now + _EARLY_SECONDS
            due, _, device, line = self._checks[0]
            if due > until:
                break
            heapq.heappop(self._checks)
            if line is None:
                if due == device.downlink_next_check:
                    device.downlink_next_check = math.inf
                    count = self._serve_downlink(device, until)
                    self._lateness.add(max(0.0, now - due), count)
                    served_devices.add(device)
                continue
            if due != line.next_check:
                continue
            count = self._pop_due(device, line, until)
            self._lateness.add(max(0.0, now - due), count)
            line.passed += count
            served_devices.add(device)
            if device.downlink is not None:
                self._serve_downlink(device, until)
            if line.packets:
                line.next_check = line.packets[0][0]
                self._schedule_check(device, line, line.next_check)
            else:
                line.next_check = math.inf
                line.is_ordered = True
        for device in served_devices:
            self._send_verdicts(device)

    def _pop_due(self, device: _Device, line: _Line, until: float) -> int:
        """Move the packets due until an instant from a line to the device or the downlink; return their number."""
        packets = line.packets
        count = 0
        identity: bytearray | bytes | None = None
        while packets and packets[0][0] <= until:
            due, identity, size, content = heapq.heappop(packets)
            count += 1
            if device.downlink is not None:
                item = (line, identity, content)
                if not device.downlink.enter(line.queue, due, size, item):
                    line.dropped += 1
                    # The kernel holds no second copy that it could drop.
                    if len(identity) == nfqueue.IDENTITY_SIZE:
                        device.verdicts += (line.drop_prefix, identity)
            elif not line.is_ordered:
                self._deliver_packet(device, line, identity, content)
        # In an ordered line, one verdict releases all packets up to the last one popped.
        if identity is not None and device.downlink is None and line.is_ordered:
            device.verdicts += (line.accept_all_prefix, identity)
            self._send_verdicts(device)
        return count

    def _serve_downlink(self, device: _Device, until: float) -> int:
        """Release the packets passing the downlink until an instant; return their number."""
        assert device.downlink is not None
        count = 0
        while device.downlink.next_departure <= until:
            self._deliver_packet(device, *device.downlink.leave())
            count += 1
        due = device.downlink.next_departure
        if due < device.downlink_next_check:
            device.downlink_next_check = due
            self._schedule_check(device, None, due)
        return count

    def _deliver_packet(
        self,
        device: _Device,
        line: _Line,
        identity: bytearray | bytes,
        content: bytes | None,
    ) -> None:
        if content is None:
            device.verdicts += (line.accept_prefix, identity)
        elif len(identity) == nfqueue.IDENTITY_SIZE:
            # A verdict with content is sent separately, so the verdicts of earlier packets must be sent before.
            self._send_verdicts(device)
            verdict = nfqueue.make_altered_verdict(line.queue, identity, content)
            self._send_messages(device, verdict)
        else:
            try:
                device.injector.send(_LOOPBACK_HEADER + content)
            except OSError:
                device.refused += 1

    def _send_verdicts(self, device: _Device) -> None:
        """Send the kernel the decisions about a device's packets."""
        while device.verdicts:
            # Each verdict has two parts, so these are 128 verdicts, for which the socket's buffer always has room.
            batch = device.verdicts[:256]
            device.verdicts = device.verdicts[256:]
            self._send_messages(device, b"".join(batch))

    @staticmethod
    def _send_messages(device: _Device, messages: bytes) -> None:
        try:
            device.socket.send(messages)
        except OSError:
            device.refused += 1

    # Requests

    def _execute_request(
        self, request: dict[str, Any], descriptors: list[int]
    ) -> dict[str, Any] | None:
        match request["do"]:
            case "open":
                sockets = [
                    socket.socket(fileno=descriptor) for descriptor in descriptors
                ]
                self._open_device(request["device"], *sockets)
            case "close":
                self._close_device(request["device"])
            case "set":
                self._configure_queues(self._devices[request["device"]], request)
            case "statistics":
                return self._get_statistics()
            case "reset":
                self._lateness = LatenessHistogram()
        return None

    def _open_device(
        self, name: str, netfilter: socket.socket, injector: socket.socket
    ) -> None:
        self._close_device(name)
        device = _Device(netfilter, injector)
        self._devices[name] = device
        self._by_descriptor[netfilter.fileno()] = device
        self._epoll.register(netfilter.fileno(), select.EPOLLIN)

    def _close_device(self, name: str) -> None:
        device = self._devices.pop(name, None)
        if device is None:
            return
        self._epoll.unregister(device.socket.fileno())
        del self._by_descriptor[device.socket.fileno()]
        self._checks = [entry for entry in self._checks if entry[2] is not device]
        heapq.heapify(self._checks)
        device.socket.close()
        device.injector.close()

    def _configure_queues(self, device: _Device, request: Mapping[str, Any]) -> None:
        rate, limit = request["downlink"] or (math.inf, sys.maxsize)
        if device.downlink is not None:
            device.downlink.alter(time.monotonic(), rate, limit)
        elif rate < math.inf:
            device.downlink = Bottleneck(rate, limit)
        for impairment in request["impairments"]:
            self._configure_queue(device, impairment)
        self._set_gather_seconds()
        if device.downlink is not None:
            # At a higher rate, waiting packets may be due already.
            self._serve_downlink(device, time.monotonic())
            self._send_verdicts(device)

    def _configure_queue(self, device: _Device, impairment: Mapping[str, Any]) -> None:
        def admit(length: int) -> None:
            # Packets of other queues may precede the kernel's answer, which arrives on the same socket.
            now = time.monotonic()
            self._admit_packet(device, self._buffer, length, now, time.time() - now)

        queue = impairment["queue"]
        link = Link.from_json(impairment["link"])
        seed = impairment["seed"]
        # Copying content costs processor time for each packet, so the kernel is asked for as few bytes as possible.
        content_bytes = 0
        if link.duplicate or link.corrupt:
            content_bytes = nfqueue.WHOLE
        elif device.downlink:
            # The header has the size of the packet, which the downlink charges.
            content_bytes = _IP_HEADER
        if queue in device.lines:
            device.lines[queue].alter(link, seed)
        else:
            device.lines[queue] = _Line(queue, link, seed)
            binding = partial(nfqueue.make_bind_message, queue)
            nfqueue.configure_socket(device.socket, binding, self._buffer, admit)
        limit = impairment["limit"]
        limits = partial(nfqueue.make_configure_message, queue, limit, content_bytes)
        nfqueue.configure_socket(device.socket, limits, self._buffer, admit)

    def _set_gather_seconds(self) -> None:
        # Packets gather for at most a quarter of the shortest delay, so each is read before it is due.
        shortest = math.inf
        for device in self._devices.values():
            for line in device.lines.values():
                shortest = min(shortest, line.constant_delay)
        self._gather_seconds = (
            min(_MAX_GATHER_SECONDS, shortest / 4) if shortest < math.inf else 0.0
        )

    def _get_statistics(self) -> dict[str, Any]:
        devices = {}
        for name, device in self._devices.items():
            lines = {}
            for queue, line in device.lines.items():
                lines[str(queue)] = {
                    "passed": line.passed,
                    "dropped": line.dropped,
                    "duplicated": line.duplicated,
                    "corrupted": line.corrupted,
                    "under_way": len(line.packets),
                }
            devices[name] = {
                "overflows": device.overflows,
                "refused": device.refused,
                "downlink_drops": device.downlink.dropped if device.downlink else 0,
                "lines": lines,
            }
        usage = os.times()
        return {
            "lateness": self._lateness.summary(),
            "processor_seconds": usage.user + usage.system,
            "devices": devices,
        }
