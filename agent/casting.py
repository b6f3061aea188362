"""Best-effort broadcast over UDP: a message in datagrams, lost when one of them is."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import socket
import struct
import termios
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from agent.receiving import Arrival, Inbox
from agent.settings import Address
from testbed.wire import WireError, decode

_PREFIX = struct.Struct("<4s8sQQHH")
"""Magic, mark of the run, sender's incarnation, number of the cast, number of the chunk, number of chunks."""
_MAGIC = b"CAST"
CHUNK = 1500 - 28 - _PREFIX.size
"""Bytes of a message in one datagram: what an Ethernet frame holds beside IP, UDP and our prefix."""
_MOST_CHUNKS = 0xFFFF
_MOST_PARTIAL = 32
"""Messages that may be incomplete at a time; older ones are lost."""


def mark(token: str) -> bytes:
    """Return what tells the run's datagrams from others without telling its token."""
    return hashlib.sha256(b"cast " + token.encode()).digest()[:8]


@dataclass
class _Partial:
    start: float
    count: int
    chunks: dict[int, bytes] = field(default_factory=dict)


class Caster:
    """Sends and receives casts; the receiving side is a thread."""

    def __init__(self, name: str, listen: Address, broadcast: Address | None, token: str, limit: int) -> None:
        self._name = name
        self._broadcast = broadcast
        self._mark = mark(token)
        self._limit = limit
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(listen)
        self._partial: OrderedDict[tuple[str, int, int], _Partial] = OrderedDict()
        self._closed = False

    def start(self, inbox: Inbox) -> None:
        """Deliver what is heard from now on."""
        threading.Thread(target=self._listen, args=(inbox,), name="cast", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):  # it is not connected, but its reader wakes up all the same
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, peers: Collection[str], body: bytes, incarnation: int, number: int) -> int:
        """Transmit once; return the bytes sent when the last datagram has left. Blocks: not for an event loop.

        Raises:
            ValueError: when the message is too large for a cast, or the deployment named no broadcast address.
        """
        if self._broadcast is None:
            raise ValueError("the deployment names no broadcast address")
        audience = json.dumps(sorted(peers)).encode()
        whole = len(audience).to_bytes(4, "little") + audience + body
        count = -(-len(whole) // CHUNK)
        if count > _MOST_CHUNKS:
            raise ValueError(f"a cast of {len(body)} bytes is too large; at most {_MOST_CHUNKS * CHUNK} travel at once")
        view = memoryview(whole)
        for index in range(count):
            prefix = _PREFIX.pack(_MAGIC, self._mark, incarnation, number, index, count)
            self._socket.sendmsg([prefix, view[index * CHUNK : (index + 1) * CHUNK]], [], 0, self._broadcast)
        while not self._closed and _queued(self._socket):
            time.sleep(0.0002)
        return len(whole)

    def _listen(self, inbox: Inbox) -> None:
        with self._socket:
            while True:
                datagram, source = self._socket.recvfrom(65536)
                if self._closed:
                    return
                self._heard(datagram, source[0], inbox)

    def _heard(self, datagram: bytes, source: str, inbox: Inbox) -> None:
        if len(datagram) < _PREFIX.size:
            return
        magic, run, incarnation, number, index, count = _PREFIX.unpack_from(datagram)
        if magic != _MAGIC or run != self._mark or index >= count or count * CHUNK > self._limit + CHUNK:
            return
        key = (source, incarnation, number)
        partial = self._partial.setdefault(key, _Partial(time.monotonic(), count))
        if partial.count != count:
            return
        partial.chunks[index] = datagram[_PREFIX.size :]
        if len(partial.chunks) < count:
            while len(self._partial) > _MOST_PARTIAL:
                self._partial.popitem(last=False)
            return
        del self._partial[key]
        self._complete(bytearray().join(partial.chunks[part] for part in range(count)), partial.start, inbox)

    def _complete(self, whole: bytearray, start: float, inbox: Inbox) -> None:
        there = time.monotonic()
        length = int.from_bytes(whole[:4], "little")
        try:
            peers = json.loads(whole[4 : 4 + length])
            if not isinstance(peers, list) or self._name not in peers:
                return
            envelope = decode(whole[4 + length :])
        except (WireError, ValueError, RecursionError):
            return
        size = len(whole)
        if envelope.message.sender == self._name or not inbox.reserve(size):
            return
        new = False
        try:
            arrival = Arrival(envelope, size, start, there - start, time.monotonic() - there)
            new = inbox.put(arrival, channel="cast")
        except PermissionError:
            return
        finally:
            if not new:
                inbox.release(size)


def _queued(link: socket.socket) -> int:
    """Bytes of this socket that have not left the device."""
    return int(struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
