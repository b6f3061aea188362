"""Best-effort broadcasts over UDP: a message is split into datagrams and lost with any of them.

The shaped links lose datagrams. The loss of whole messages (`Link.message_loss`) and of frames is decided here, by the
same random draws as in the simulator.
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
"""Run mark, sender's incarnation, broadcast number, chunk number, number of chunks."""
assert _PREFIX.size == CAST_HEADER
_MOST_CHUNKS = 0xFFFF
_MOST_PARTIAL = 32
"""Maximum number of incomplete messages; the oldest are dropped."""
_LOOK_SECONDS = 0.02
"""Polling interval for datagrams queued in the kernel, which usually reports the departure of the last one."""

# linux/net_tstamp.h: the kernel reports the instant at which the interface gets a datagram, without its content.
_SO_TIMESTAMPING = 37
_REPORT = struct.pack("I", 1 << 4 | 1 << 11)
_NOTE = [(socket.SOL_SOCKET, _SO_TIMESTAMPING, struct.pack("I", 1 << 1))]
_STAMP = struct.Struct("@qq")
_IP_PKTINFO = 8
"""The constant of linux/in.h, which Python defines from 3.12 on."""
_PACKET_INFORMATION = struct.Struct("=I4s4s")
"""Interface (0: any), source address, destination address."""

Hears = Callable[[Message, int, int], Message | None]
"""Function from (message, header size in bytes, broadcast number) to the received message, or None if lost."""


def mark(run: str) -> bytes:
    """Return four bytes to distinguish the datagrams of one run from other ones."""
    return hashlib.sha256(b"cast " + run.encode()).digest()[:4]


@dataclass(frozen=True)
class Addresses:
    """The source and destination addresses of broadcasts."""

    listen: Address
    broadcast: Address | None
    """Destination of broadcasts; None disables sending."""
    own: str
    """Source address of this device's broadcasts; 0.0.0.0 leaves the choice to the kernel."""
    sources: Mapping[str, str]
    """Source address of each peer's broadcasts; devices cannot send from another's address, nor impersonate a peer."""


@dataclass
class _Partial:
    start: float
    count: int
    chunks: dict[int, bytes] = field(default_factory=dict)


class Caster:
    """Sender and receiver of broadcasts; a thread of its own receives."""

    def __init__(
        self,
        form: CastForm,
        addresses: Addresses,
        run: str,
        limit: int,
        receive_filter: Hears,
    ) -> None:
        self._form = form
        self._receive_filter = receive_filter
        self._broadcast = addresses.broadcast
        self._sources = addresses.sources
        self._from = _PACKET_INFORMATION.pack(
            0, socket.inet_aton(addresses.own), bytes(4)
        )
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
        """Deliver received broadcasts to the inbox from now on."""
        threading.Thread(
            target=self._listen, args=(inbox,), name="cast", daemon=True
        ).start()

    def close(self) -> None:
        """Stop receiving."""
        self._closed = True
        with contextlib.suppress(
            OSError
        ):  # raises for an unconnected socket, but wakes up its reader
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, whole: bytes, incarnation: int, number: int) -> tuple[int, float]:
        """Transmit once; return the number of bytes and the monotonic instant at which the last datagram left.

        Blocks until then, so an event loop needs a thread for the call. Raises ValueError if the message is too large
        or the deployment has no broadcast address.
        """
        if self._broadcast is None:
            raise ValueError("the deployment names no broadcast address")
        count = -(-len(whole) // CAST_CHUNK)
        if count > _MOST_CHUNKS:
            raise ValueError(
                f"a broadcast of {len(whole)} bytes is too large; at most {_MOST_CHUNKS * CAST_CHUNK} are allowed"
            )
        view = memoryview(whole)
        # Discard the report of an earlier broadcast whose sender did not wait.
        self._read_departure()
        for index in range(count):
            prefix = _PREFIX.pack(self._mark, incarnation, number, index, count)
            chunk = view[index * CAST_CHUNK : (index + 1) * CAST_CHUNK]
            notes = [
                (socket.IPPROTO_IP, _IP_PKTINFO, self._from),
                *(_NOTE if index == count - 1 else ()),
            ]
            self._socket.sendmsg([prefix, chunk], notes, 0, self._broadcast)
        return len(whole), self._wait_until_sent()

    def _wait_until_sent(self) -> float:
        """Wait until all datagrams have left; return the monotonic instant of the last departure."""
        poll = select.poll()
        poll.register(self._socket, 0)
        while not self._closed:
            poll.poll(_LOOK_SECONDS * 1000)
            departure = self._read_departure()
            if departure is not None:
                return departure
            queued = fcntl.ioctl(
                self._socket, termios.TIOCOUTQ, b"\0\0\0\0"
            )  # number of bytes not yet sent
            if not any(queued):
                break  # dropped, or the kernel does not report departures
        return time.monotonic()

    def _read_departure(self) -> float | None:
        """Return the monotonic instant of the latest departure reported by the kernel, or None."""
        departure = None
        with contextlib.suppress(BlockingIOError):
            while True:
                _, notes, _, _ = self._socket.recvmsg(
                    0, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT
                )
                for level, kind, data in notes:
                    if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPING):
                        seconds, nanoseconds = _STAMP.unpack_from(data)
                        ago = time.time() - seconds - nanoseconds * 1e-9
                        # The report uses the wall clock, whose adjustment in between would spoil the difference.
                        departure = time.monotonic() - (ago if 0 <= ago < 1 else 0.0)
        return departure

    def _listen(self, inbox: Inbox) -> None:
        with self._socket:
            while True:
                datagram, source = self._socket.recvfrom(65536)
                if self._closed:
                    return
                self._collect(datagram, source[0], inbox)

    def _collect(self, datagram: bytes, source: str, inbox: Inbox) -> None:
        if len(datagram) < _PREFIX.size:
            return
        run, incarnation, number, index, count = _PREFIX.unpack_from(datagram)
        if (
            run != self._mark
            or index >= count
            or count * CAST_CHUNK > self._limit + CAST_CHUNK
        ):
            return
        # Datagrams of other runs on the same network, or with lengths beyond the limit, are ignored.
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
        self._complete(
            b"".join(partial.chunks[part] for part in range(count)), key, partial, inbox
        )

    def _complete(
        self, whole: bytes, key: tuple[str, int, int], partial: _Partial, inbox: Inbox
    ) -> None:
        source, *numbers = key
        arrived = time.monotonic()
        try:
            read = self._form.decode(whole)
        except WireError:
            return
        if read is None or self._sources.get(read[0].sender) != source:
            return
        message, size, start = (
            self._receive_filter(*read, numbers[1]),
            len(whole),
            partial.start,
        )
        if message is None or not inbox.reserve(size):
            return
        new = False
        try:
            envelope = Envelope(message, *numbers)
            new = inbox.put(
                Arrival(
                    envelope,
                    size,
                    start,
                    arrived - start,
                    time.monotonic() - arrived,
                    cast=True,
                )
            )
        finally:
            if not new:
                inbox.release(size)
