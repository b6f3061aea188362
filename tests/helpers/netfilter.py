"""The kernel's end of a netfilter queue: packets that a test queues, and the verdicts on them."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from testbed_controller.shaping import nfqueue

HEADER = 16
CONFIG = 3 << 8 | 2
PAYLOAD = 10
OVER_IP = struct.Struct(">BBHHHBBH4s4s")


def make_datagram(source: str, target: str, size: int) -> bytes:
    """Return an IP packet of this many bytes."""
    addresses = socket.inet_aton(source), socket.inet_aton(target)
    return OVER_IP.pack(0x45, 0, size, 0, 0, 64, 17, 0, *addresses) + bytes(
        size - OVER_IP.size
    )


class Verdict(NamedTuple):
    """What was decided about a packet, and when."""

    time: float
    number: int
    accepted: bool
    batch: bool
    """Whether it holds for all packets up to this one."""
    content: bytes
    """What the packet is to be instead; empty where it stays what it is."""


class FakeQueue:
    """Stands for the kernel: agrees to every configuration, and writes down verdicts."""

    def __init__(self) -> None:
        self._own, self.socket = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self.verdicts: list[Verdict] = []
        threading.Thread(target=self._answer, daemon=True).start()

    def put(self, queue: int, number: int, packet: bytes) -> None:
        """Let a packet arrive; its header's attribute comes first, as the kernel has it."""
        header = struct.pack(">IHB", number, 0x0800, 1)
        attributes = struct.pack("=HH", 11, 1) + header + b"\0"
        attributes += struct.pack("=HH", 4 + len(packet), PAYLOAD) + packet
        body = struct.pack(">BBH", 0, 0, queue) + attributes
        self._own.send(
            struct.pack("=IHHII", HEADER + len(body), nfqueue.PACKET, 0, 0, 0) + body
        )

    def wait_for_verdicts(self, count: int) -> list[Verdict]:
        """Return the verdicts, once there are so many."""
        until = time.monotonic() + 10
        while len(self.verdicts) < count:
            assert time.monotonic() < until, (
                f"{len(self.verdicts)} of {count} verdicts came"
            )
            time.sleep(0.001)
        return self.verdicts

    def _received(self) -> bytes:
        try:
            return self._own.recv(1 << 20)
        except ConnectionResetError:  # closed with packets unread
            return b""

    def _answer(self) -> None:
        while data := self._received():
            now, at = time.monotonic(), 0
            while at < len(data):
                length, kind, _, sequence, _ = struct.unpack_from("=IHHII", data, at)
                if kind == CONFIG:
                    answer = struct.pack("=iIHHII", 0, length, kind, 0, sequence, 0)
                    self._own.send(
                        struct.pack(
                            "=IHHII", HEADER + len(answer), nfqueue.NLMSG_ERROR, 0, 0, 0
                        )
                        + answer
                    )
                else:
                    self.verdicts.append(_verdict(now, kind, data[at : at + length]))
                at += length


def _verdict(now: float, kind: int, message: bytes) -> Verdict:
    accepted, number = struct.unpack_from(">II", message, HEADER + 8)
    return Verdict(
        now,
        number,
        accepted == nfqueue.ACCEPT,
        kind != (3 << 8 | 1),
        message[HEADER + 4 + 12 + 4 :],
    )


class LoopServer:
    """The server's end of one of the shaper's processes, whose loop runs in a thread here."""

    def __init__(self, loop: Callable[[socket.socket], Any]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=loop(theirs).run, daemon=True)
        self._thread.start()

    def ask(self, *opened: socket.socket, **request: Any) -> dict[str, Any]:
        """Make a request, with sockets that are the loop's from then on."""
        descriptors = [each.fileno() for each in opened]
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        for each in opened:
            each.close()
        answer: dict[str, Any] = json.loads(self._control.recv(1 << 20))
        return answer

    def stop(self) -> None:
        """Go away; the loop ends then."""
        self._control.close()
        self._thread.join(5)
        assert not self._thread.is_alive()
