"""The process of the gate: it holds packets that leave a device until their transmission on the medium ends.

Rules in each device's namespace put these packets into a netfilter queue, and the kernel holds each packet until this
process sends a verdict: accept or drop. `Media` computes the times of transmissions; this module executes them. The
server's requests arrive on a local socket (`helper.py` has the server's end).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import Counter
from functools import partial
from typing import Any

from testbed.wire.framing import ETHERNET_HEADER
from testbed_controller.shaping import nfqueue
from testbed_controller.shaping.helper import LatenessHistogram, serve_request
from testbed_controller.shaping.medium import QUEUE, Media, Route

MOST_WAITING = 5000
"""Maximum number of packets in the netfilter queue of one device, more than its socket buffers can contain."""
_IP_HEADER = 20
"""Bytes of an IPv4 header without options."""
_MOST_READ = 64
"""Maximum number of packets read before due packets are released."""
_EARLY_SECONDS = 60e-6
"""Time by which a packet is released before the end of its transmission, in seconds: about the time that the kernel
needs to continue with the packet."""


class Loop:
    """The event loop: waits for packets, ends of transmissions, and the server."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._sockets: dict[str, socket.socket] = {}
        self._device_by_descriptor: dict[int, str] = {}
        self._media: Media[bytearray] = Media()
        """Transmissions, each with the identity of its packet as the item."""
        self._lateness = LatenessHistogram()
        # Only the IP header of a packet is requested.
        self._buffer = bytearray(4096)
        # A verdict is one of these prefixes, followed by the identity of a packet.
        self._accept_prefix = nfqueue.make_verdict_prefix(QUEUE, nfqueue.ACCEPT)
        self._drop_prefix = nfqueue.make_verdict_prefix(QUEUE, nfqueue.DROP)
        self._dropped: Counter[str] = Counter()
        """Number of packets dropped because too many were waiting, by device."""
        self._passed = 0
        """Number of released packets."""
        self._refused = 0
        """Number of verdicts that the kernel refused."""
        self._overflows = 0
        """Number of times that the kernel dropped packets because a socket's buffer was full."""

    def run(self) -> None:
        """Run until the server disconnects."""
        while True:
            wait = self._media.next_end - _EARLY_SECONDS - time.monotonic()
            timeout = None if wait == float("inf") else max(0.0, wait)
            # select has a resolution of microseconds, epoll only of milliseconds.
            select.select([self._epoll.fileno()], [], [], timeout)
            woken = time.monotonic()
            self._release_finished()
            for descriptor, _ in self._epoll.poll(0):
                if descriptor == self._control.fileno():
                    if not serve_request(self._control, self._execute_request, 1):
                        return
                elif descriptor in self._device_by_descriptor:
                    self._read_packets(self._device_by_descriptor[descriptor], woken)
                self._release_finished()

    def _release_finished(self) -> None:
        """Accept the packets whose transmissions have ended."""
        now = time.monotonic()
        for transmission in self._media.pop_finished(now + _EARLY_SECONDS):
            self._lateness.add(max(0.0, now - transmission.end), 1)
            self._passed += 1
            verdict = self._accept_prefix + transmission.item
            self._send_verdict(str(transmission.station), verdict)

    def _send_verdict(self, device: str, verdict: bytes) -> None:
        try:
            self._sockets[device].send(verdict)
        except OSError:
            self._refused += 1

    def _read_packets(self, device: str, woken: float) -> None:
        """Read packets sent by a device; the monotonic instant ``woken`` is taken for the arrival of all.

        The kernel reports times only for packets that a device receives (nfnetlink_queue.c: hooks up to FORWARD).
        """
        netfilter = self._sockets[device]
        for _ in range(_MOST_READ):
            try:
                length = netfilter.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:
                self._overflows += 1  # ENOBUFS: the kernel has dropped packets that it could not announce
                continue
            kind = nfqueue.message_type(self._buffer)
            if kind == nfqueue.PACKET:
                self._offer_packet(device, length, woken)
            elif kind == nfqueue.NLMSG_ERROR:
                self._refused += 1

    def _offer_packet(self, device: str, length: int, now: float) -> None:
        """Queue the packet of the message in the buffer for its medium, or drop the packet."""
        packet = nfqueue.packet_content(self._buffer, length)
        # Offsets in the IPv4 header: total length at byte 2, destination at byte 16.
        size = struct.unpack_from(">H", packet, 2)[0] + ETHERNET_HEADER
        address = socket.inet_ntoa(packet[16:20])
        identity = nfqueue.packet_identity(self._buffer)
        if not self._media.offer(device, address, now, size, identity):
            self._dropped[device] += 1
            self._send_verdict(device, self._drop_prefix + identity)

    def _execute_request(
        self, request: dict[str, Any], descriptors: list[int]
    ) -> dict[str, Any] | None:
        match request["do"]:
            case "open":
                self._open_device(
                    request["device"], socket.socket(fileno=descriptors[0])
                )
            case "close":
                self._close_device(request["device"])
            case "set":
                routes = {}
                for address, fields in request["routes"].items():
                    # JSON has lists, but channels are compared as tuples.
                    channels = tuple(fields["channels"])
                    routes[address] = Route(channels, fields["rate"], fields["limit"])
                self._media.set_routes(request["device"], routes, time.monotonic())
            case "statistics":
                return self._get_statistics()
            case "reset":
                self._lateness = LatenessHistogram()
        return None

    def _open_device(self, device: str, netfilter: socket.socket) -> None:
        self._close_device(device)
        netfilter.setblocking(False)
        self._sockets[device] = netfilter
        self._device_by_descriptor[netfilter.fileno()] = device
        self._epoll.register(netfilter.fileno(), select.EPOLLIN)
        binding = partial(nfqueue.make_bind_message, QUEUE)
        limits = partial(
            nfqueue.make_configure_message, QUEUE, MOST_WAITING, _IP_HEADER
        )
        nfqueue.configure_socket(netfilter, binding, self._buffer)
        nfqueue.configure_socket(netfilter, limits, self._buffer)

    def _close_device(self, device: str) -> None:
        netfilter = self._sockets.pop(device, None)
        if netfilter is None:
            return
        self._media.forget(device, time.monotonic())
        self._epoll.unregister(netfilter.fileno())
        del self._device_by_descriptor[netfilter.fileno()]
        netfilter.close()

    def _get_statistics(self) -> dict[str, Any]:
        usage = os.times()
        waiting = {}
        for device in self._sockets:
            waiting[device] = self._media.waiting(device)
        return {
            "lateness": self._lateness.summary(),
            "processor_seconds": usage.user + usage.system,
            "passed": self._passed,
            "dropped": dict(self._dropped),
            "refused": self._refused,
            "overflows": self._overflows,
            "waiting": waiting,
        }
