"""Best-effort broadcast over UDP: a message in datagrams, lost when one of them is.

The links lose datagrams. That a receiver loses a whole message, as radio studies have it (`Link.message_loss`), or some
of its frames, is decided here, by draws that the simulator makes as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import select
import socket
import struct
import termios
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from testbed.wire.cast import CastForm
from testbed.wire.framing import CAST_CHUNK, CAST_HEADER
from testbed.wire.message import Envelope, Message, WireError
from testbed_agent.receiving import Arrival, Inbox
from testbed_agent.settings import Address

_PREFIX = struct.Struct("<4sQIHH")
"""Mark of the run, sender's incarnation, number of the cast, number of the chunk, number of chunks."""
assert _PREFIX.size == CAST_HEADER
_MOST_CHUNKS = 0xFFFF
_MOST_PARTIAL = 32
"""Messages that may be incomplete at a time; older ones are lost."""
_LOOK_SECONDS = 0.02
"""Between looks whether anything still waits in the kernel, which usually says by itself when the last has left."""

# linux/net_tstamp.h: have the kernel note when a datagram is handed to the interface, without giving it back.
_SO_TIMESTAMPING = 37
_REPORT = struct.pack("I", 1 << 4 | 1 << 11)
_NOTE = [(socket.SOL_SOCKET, _SO_TIMESTAMPING, struct.pack("I", 1 << 1))]
_STAMP = struct.Struct("@qq")
_IP_PKTINFO = 8
"""linux/in.h; Python has it from 3.12 on."""
_PACKET_INFORMATION = struct.Struct("=I4s4s")
"""Interface, or 0 for whichever; source; destination."""

Hears = Callable[[Message, int, int], Message | None]
"""What this device hears of a cast, by the bytes of its header and its number; None: nothing."""


def mark(run: str) -> bytes:
    """Return what distinguishes the run's datagrams from others."""
    return hashlib.sha256(b"cast " + run.encode()).digest()[:4]


@dataclass(frozen=True)
class Addresses:
    """Where casts come from and go to."""

    listen: Address
    broadcast: Address | None
    """None: nothing can be cast."""
    own: str
    """What casts of this device come from; 0.0.0.0: as the kernel has it."""
    sources: Mapping[str, str]
    """What those of each peer come from. No device may send from another's address, so none can speak as another."""


@dataclass
class _Partial:
    start: float
    count: int
    chunks: dict[int, bytes] = field(default_factory=dict)


class Caster:
    """Sends and receives casts; the receiving side is a thread."""

    def __init__(self, form: CastForm, addresses: Addresses, run: str, limit: int, hears: Hears) -> None:
        self._form = form
        self._hears = hears
        self._broadcast = addresses.broadcast
        self._sources = addresses.sources
        self._from = _PACKET_INFORMATION.pack(0, socket.inet_aton(addresses.own), bytes(4))
        self._mark = mark(run)
        self._limit = limit
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _REPORT)
        self._socket.bind(addresses.listen)
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

    def send(self, whole: bytes, incarnation: int, number: int) -> tuple[int, float]:
        """Transmit once; return the bytes sent, and the monotonic instant at which the last datagram had left.

        Blocks until then: not for an event loop. Raises ValueError when the message is too large for a cast, or the
        deployment named no broadcast address.
        """
        if self._broadcast is None:
            raise ValueError("the deployment names no broadcast address")
        count = -(-len(whole) // CAST_CHUNK)
        if count > _MOST_CHUNKS:
            raise ValueError(
                f"a cast of {len(whole)} bytes is too large; at most {_MOST_CHUNKS * CAST_CHUNK} travel at once"
            )
        view = memoryview(whole)
        self._departure()  # of an earlier cast that was not waited for
        for index in range(count):
            prefix = _PREFIX.pack(self._mark, incarnation, number, index, count)
            chunk = view[index * CAST_CHUNK : (index + 1) * CAST_CHUNK]
            notes = [(socket.IPPROTO_IP, _IP_PKTINFO, self._from), *(_NOTE if index == count - 1 else ())]
            self._socket.sendmsg([prefix, chunk], notes, 0, self._broadcast)
        return len(whole), self._left()

    def _left(self) -> float:
        """Wait until the datagrams have left; return when the last one did."""
        news = select.poll()
        news.register(self._socket, 0)
        while not self._closed:
            news.poll(_LOOK_SECONDS * 1000)
            left = self._departure()
            if left is not None:
                return left
            queued = fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0")  # bytes that have not left the device
            if not any(queued):
                break  # it was dropped, or the kernel notes nothing
        return time.monotonic()

    def _departure(self) -> float | None:
        """Return the instant that the kernel has noted, if it has noted one."""
        left = None
        with contextlib.suppress(BlockingIOError):
            while True:
                _, notes, _, _ = self._socket.recvmsg(0, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
                for level, kind, data in notes:
                    if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPING):
                        seconds, nanoseconds = _STAMP.unpack_from(data)
                        ago = time.time() - seconds - nanoseconds * 1e-9
                        # A clock that was set in between would make nonsense of the difference.
                        left = time.monotonic() - (ago if 0 <= ago < 1 else 0.0)
        return left

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
        run, incarnation, number, index, count = _PREFIX.unpack_from(datagram)
        if run != self._mark or index >= count or count * CAST_CHUNK > self._limit + CAST_CHUNK:
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
        self._complete(b"".join(partial.chunks[part] for part in range(count)), key, partial, inbox)

    def _complete(self, whole: bytes, key: tuple[str, int, int], partial: _Partial, inbox: Inbox) -> None:
        source, *numbers = key
        there = time.monotonic()
        try:
            read = self._form.decode(whole)
        except WireError:
            return
        if read is None or self._sources.get(read[0].sender) != source:
            return
        message, size, start = self._hears(*read, numbers[1]), len(whole), partial.start
        if message is None or not inbox.reserve(size):
            return
        new = False
        try:
            envelope = Envelope(message, *numbers)
            new = inbox.put(Arrival(envelope, size, start, there - start, time.monotonic() - there, cast=True))
        finally:
            if not new:
                inbox.release(size)
