"""A fake netfilter queue: a test queues packets and reads the verdicts that the shaper sends."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from testbed_controller.shaping import nfqueue

# Message types and sizes of linux/netlink.h and linux/netfilter/nfnetlink_queue.h; subsystem 3 is NFQUEUE.
NETLINK_HEADER = struct.Struct("=IHHII")
HEADER = NETLINK_HEADER.size
CONFIG = 3 << 8 | 2
VERDICT = 3 << 8 | 1
PACKET_HEADER = 1
PAYLOAD = 10
IP_HEADER = struct.Struct(">BBHHHBBH4s4s")


def make_datagram(source: str, target: str, size: int) -> bytes:
    """Return an IP packet of ``size`` bytes, header included, with a payload of zeros."""
    addresses = socket.inet_aton(source), socket.inet_aton(target)
    # Version 4 with a header of 5 words, time to live 64, protocol 17 (UDP).
    header = IP_HEADER.pack(0x45, 0, size, 0, 0, 64, 17, 0, *addresses)
    return header + bytes(size - IP_HEADER.size)


class Verdict(NamedTuple):
    """A verdict on a packet."""

    time: float
    number: int
    accepted: bool
    batch: bool
    """Whether the verdict applies to all packets up to this number."""
    content: bytes
    """The packet's new content; empty if it is unchanged."""


class FakeQueue:
    """Stands for the kernel: acknowledges every configuration and records verdicts."""

    def __init__(self) -> None:
        self._own, self.socket = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self.verdicts: list[Verdict] = []
        threading.Thread(target=self._answer, daemon=True).start()

    def put(self, queue: int, number: int, packet: bytes) -> None:
        """Queue a packet for the shaper, with the attributes in the kernel's order."""
        # The attribute has 11 bytes: 4 of header, and 7 for number, protocol (IPv4) and hook. A byte pads it to 12.
        attributes = struct.pack("=HH", 11, PACKET_HEADER)
        attributes += struct.pack(">IHB", number, 0x0800, 1) + b"\0"
        attributes += struct.pack("=HH", 4 + len(packet), PAYLOAD) + packet
        body = struct.pack(">BBH", 0, 0, queue) + attributes
        length = HEADER + len(body)
        self._own.send(NETLINK_HEADER.pack(length, nfqueue.PACKET, 0, 0, 0) + body)

    def wait_for_verdicts(self, count: int) -> list[Verdict]:
        """Wait for at least ``count`` verdicts, and return all."""
        deadline = time.monotonic() + 10
        while len(self.verdicts) < count:
            assert time.monotonic() < deadline, f"{len(self.verdicts)} of {count}"
            time.sleep(0.001)
        return self.verdicts

    def _received(self) -> bytes:
        try:
            return self._own.recv(1 << 20)
        except ConnectionResetError:  # the shaper closed its end with unread packets
            return b""

    def _answer(self) -> None:
        # One read may return several messages, one after the other.
        while data := self._received():
            now, offset = time.monotonic(), 0
            while offset < len(data):
                length, kind, _, sequence, _ = NETLINK_HEADER.unpack_from(data, offset)
                if kind == CONFIG:
                    self._acknowledge(length, kind, sequence)
                else:
                    message = data[offset : offset + length]
                    self.verdicts.append(_parse_verdict(now, kind, message))
                offset += length

    def _acknowledge(self, length: int, kind: int, sequence: int) -> None:
        # An error message with code 0 and the header of the request is an acknowledgement.
        answer = struct.pack("=iIHHII", 0, length, kind, 0, sequence, 0)
        size = HEADER + len(answer)
        header = NETLINK_HEADER.pack(size, nfqueue.NLMSG_ERROR, 0, 0, 0)
        self._own.send(header + answer)


def _parse_verdict(now: float, kind: int, message: bytes) -> Verdict:
    # The verdict follows the netlink header, 4 bytes of family, version and queue, and 4 bytes of attribute header.
    verdict, number = struct.unpack_from(">II", message, HEADER + 8)
    # A new content is an attribute of its own, 4 bytes of header after the 12 bytes of the verdict's attribute.
    content = message[HEADER + 4 + 12 + 4 :]
    is_accepted, is_batch = verdict == nfqueue.ACCEPT, kind != VERDICT
    return Verdict(now, number, is_accepted, is_batch, content)


class LoopServer:
    """The server's end of a process of the shaper, whose loop runs in a thread of the test."""

    def __init__(self, loop: Callable[[socket.socket], Any]) -> None:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, loop_end = pair
        self._thread = threading.Thread(target=loop(loop_end).run, daemon=True)
        self._thread.start()

    def ask(self, *sockets: socket.socket, **request: Any) -> dict[str, Any]:
        """Send a request and return the response; the loop takes over the sockets."""
        descriptors = [passed.fileno() for passed in sockets]
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        for passed in sockets:
            passed.close()
        answer: dict[str, Any] = json.loads(self._control.recv(1 << 20))
        return answer

    def stop(self) -> None:
        """Close the connection, and check that the loop ends."""
        self._control.close()
        self._thread.join(5)
        assert not self._thread.is_alive()
