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
from testbed.wire.framing import CAST_BUFFER, CAST_CHUNK, CAST_HEADER
from testbed.wire.message import Envelope, Message, WireError
from testbed_agent.receiving import Arrival, Inbox
from testbed_agent.settings import Address

_PREFIX = struct.Struct("<4sQIHH")
"""Run mark, sender's incarnation, broadcast number, chunk number, number of chunks."""
assert _PREFIX.size == CAST_HEADER
_MOST_CHUNKS = 0xFFFF
"""Maximum number of datagrams of a message, whose count has 16 bits."""
_MOST_PARTIAL = 32
"""Maximum number of incomplete messages; the oldest are dropped."""
_LOOK_SECONDS = 0.02
"""Polling interval for datagrams queued in the kernel, which usually reports the departure of the last one."""

# linux/net_tstamp.h: the kernel reports the instant at which the interface gets a datagram, without its content.
_SO_TIMESTAMPING = 37
_TX_SOFTWARE = 1 << 1
"""SOF_TIMESTAMPING_TX_SOFTWARE: take the time as the datagram is handed to the interface."""
_SOFTWARE = 1 << 4
"""SOF_TIMESTAMPING_SOFTWARE: report times taken by the kernel, not by the interface."""
_ONLY_TIME = 1 << 11
"""SOF_TIMESTAMPING_OPT_TSONLY: report the time without the datagram."""
_REPORT = struct.pack("I", _SOFTWARE | _ONLY_TIME)
_NOTE = [(socket.SOL_SOCKET, _SO_TIMESTAMPING, struct.pack("I", _TX_SOFTWARE))]
"""Control message of a datagram whose departure is to be reported."""
_STAMP = struct.Struct("@qq")
"""Seconds and nanoseconds of the wall clock."""
_IP_PKTINFO = 8
"""The constant of linux/in.h, which Python defines from 3.12 on."""
_PACKET_INFORMATION = struct.Struct("=I4s4s")
"""Interface (0: any), source address, destination address."""

ReceiveFilter = Callable[[Message, int, int], Message | None]
"""Function from (message, header size in bytes, broadcast number) to the received message; None for a lost one."""


def run_mark(run: str) -> bytes:
    """Return the four bytes that distinguish the datagrams of a run from those of other runs.

    >>> run_mark("quickstart-0a1b2c3d") == run_mark("quickstart-ffffffff")
    False
    """
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
    """A message of which some datagrams are missing."""

    start: float
    """Monotonic instant of the first datagram."""
    count: int
    """Number of datagrams in all."""
    chunks: dict[int, bytes] = field(default_factory=dict)
    """Received parts by their number."""


class Caster:
    """Sender and receiver of broadcasts; a separate thread receives.

    Example::

        caster = Caster(form, addresses, run, limit, lambda message, header, number: message)
        caster.start(inbox)
        size, left = caster.send(form.encode(message, peers), incarnation, number=0)
    """

    def __init__(
        self,
        form: CastForm,
        addresses: Addresses,
        run: str,
        limit: int,
        receive_filter: ReceiveFilter,
    ) -> None:
        """``limit`` is the maximum size of a received message in bytes."""
        self._form = form
        self._receive_filter = receive_filter
        self._broadcast = addresses.broadcast
        self._sources = addresses.sources
        self._from = _PACKET_INFORMATION.pack(
            0, socket.inet_aton(addresses.own), bytes(4)
        )
        self._mark = run_mark(run)
        self._limit = limit
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _REPORT)
        # A link without a rate delivers a burst faster than the reading thread gets the interpreter's lock.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CAST_BUFFER)
        self._socket.bind(addresses.listen)
        self._partial: OrderedDict[tuple[str, int, int], _Partial] = OrderedDict()
        """Incomplete messages by source address, incarnation and broadcast number, the oldest first."""
        self._closed = False

    def start(self, inbox: Inbox) -> None:
        """Deliver received broadcasts to the inbox from now on."""
        threading.Thread(
            target=self._listen, args=(inbox,), name="cast", daemon=True
        ).start()

    def close(self) -> None:
        """Stop receiving."""
        self._closed = True
        # Closing would not wake up the reading thread. `shutdown` does, though it raises for an unconnected socket.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, whole: bytes, incarnation: int, number: int) -> tuple[int, float]:
        """Transmit once; return the number of bytes and the monotonic instant at which the last datagram left.

        Blocks until then, so an event loop needs a thread for the call. Raises ValueError if the message is too large
        or the deployment has no broadcast address.
        """
        if self._broadcast is None:
            raise ValueError(
                "the deployment has no broadcast address: broadcasts need all devices on one host"
            )
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
            notes = [(socket.IPPROTO_IP, _IP_PKTINFO, self._from)]
            if index == count - 1:
                # Datagrams leave in order, so the departure of the last one is that of the whole message.
                notes += _NOTE
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
            # The number of bytes not yet sent, as a C integer.
            queued = fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0")
            if not any(queued):
                break  # dropped, or the kernel does not report departures
        return time.monotonic()

    def _read_departure(self) -> float | None:
        """Return the monotonic instant of the latest departure reported by the kernel; None without a report."""
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
                # More than any datagram of IPv4 holds.
                datagram, source = self._socket.recvfrom(65536)
                if self._closed:
                    return
                self._collect(datagram, source[0], inbox)

    def _collect(self, datagram: bytes, source: str, inbox: Inbox) -> None:
        if len(datagram) < _PREFIX.size:
            return
        run, incarnation, number, index, count = _PREFIX.unpack_from(datagram)
        if run != self._mark or index >= count:
            return  # of another run on the same network, or malformed
        # Too large for the device: nothing is stored for a message that could never be complete.
        if count * CAST_CHUNK > self._limit + CAST_CHUNK:
            return
        # By address rather than by the sender's name, which only the whole message holds.
        key = (source, incarnation, number)
        partial = self._partial.setdefault(key, _Partial(time.monotonic(), count))
        # Datagrams of one message agree about their number; this one is malformed.
        if partial.count != count:
            return
        partial.chunks[index] = datagram[_PREFIX.size :]
        if len(partial.chunks) < count:
            while len(self._partial) > _MOST_PARTIAL:
                self._partial.popitem(last=False)
            return
        del self._partial[key]
        whole = b"".join(partial.chunks[part] for part in range(count))
        self._complete(whole, key, partial, inbox)

    def _complete(
        self, whole: bytes, key: tuple[str, int, int], partial: _Partial, inbox: Inbox
    ) -> None:
        source, incarnation, number = key
        size = len(whole)
        arrived = time.monotonic()
        try:
            decoded = self._form.decode(whole)
        except WireError:
            return
        if decoded is None:
            return
        sent, header = decoded
        # A device cannot send from another's address, so a foreign name in the message is an impersonation.
        if self._sources.get(sent.sender) != source:
            return
        message = self._receive_filter(sent, header, number)
        if message is None or not inbox.reserve(size):
            return
        new = False
        try:
            arrival = Arrival(
                Envelope(message, incarnation, number),
                size,
                partial.start,
                arrived - partial.start,
                time.monotonic() - arrived,
                cast=True,
            )
            new = inbox.put(arrival)
        finally:
            if not new:
                inbox.release(size)
