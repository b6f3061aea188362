"""Best-effort broadcasts over UDP: a message is split into datagrams and lost with any of them.

The shaped links lose datagrams. The loss of whole messages (`Link.message_loss`) and of frames is decided here, by the
same random draws as in the simulator.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import select
import socket
import struct
import termios
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from testbed.wire.cast import CastEncoding
from testbed.wire.framing import CAST_BUFFER, CAST_CHUNK, CAST_HEADER
from testbed.wire.message import Envelope, Message, WireError
from testbed_agent.receiving import Arrival, Inbox
from testbed_agent.settings import Address

_CHUNK_HEAD = struct.Struct("<4sQIHH")
"""Run mark, sender's incarnation, broadcast number, chunk number, number of chunks."""
assert _CHUNK_HEAD.size == CAST_HEADER
_MOST_CHUNKS = 0xFFFF
"""Maximum number of datagrams of a message, whose count has 16 bits."""
_MOST_PARTIAL = 32
"""Maximum number of incomplete messages; the oldest are dropped."""
_POLL_SECONDS = 0.02
"""Interval of checks for datagrams queued in the kernel, in seconds. The checks matter only if the kernel does not
report the departure of the last datagram."""

# linux/net_tstamp.h: the kernel reports the instant at which the interface gets a datagram, without its content.
_SO_TIMESTAMPING = 37
_TX_SOFTWARE = 1 << 1
"""SOF_TIMESTAMPING_TX_SOFTWARE: take the time as the datagram is handed to the interface."""
_REPORT_SOFTWARE = 1 << 4
"""SOF_TIMESTAMPING_SOFTWARE: report times taken by the kernel, not by the interface."""
_ONLY_TIME = 1 << 11
"""SOF_TIMESTAMPING_OPT_TSONLY: report the time without the datagram."""
_REPORT_OPTIONS = struct.pack("I", _REPORT_SOFTWARE | _ONLY_TIME)
_REPORT_REQUEST = [
    (socket.SOL_SOCKET, _SO_TIMESTAMPING, struct.pack("I", _TX_SOFTWARE))
]
"""Control message that requests a report of the datagram's departure."""
_TIME_STAMP = struct.Struct("@qq")
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
    source: str
    """Source address of this device's broadcasts; 0.0.0.0 leaves the choice to the kernel."""
    peer_sources: Mapping[str, str]
    """Source address of each peer's broadcasts; devices cannot send from another's address, nor impersonate a peer."""


@dataclass
class _Partial:
    """A message of which some datagrams are missing."""

    start: float
    """Monotonic instant of the first datagram."""
    count: int
    """Total number of datagrams."""
    chunks: dict[int, bytes] = field(default_factory=dict)
    """Received parts by their number."""


class Caster:
    """Sender and receiver of broadcasts; a separate thread receives.

    Example::

        caster = Caster(encoding, addresses, run, limit, lambda message, header, number: message)
        caster.start(inbox)
        body = encoding.encode(message, peers)
        size, departure = caster.send(body, incarnation, number=0)
    """

    def __init__(
        self,
        encoding: CastEncoding,
        addresses: Addresses,
        run: str,
        limit: int,
        receive_filter: ReceiveFilter,
    ) -> None:
        """``limit`` is the maximum size of a received message in bytes."""
        self._encoding = encoding
        self._receive_filter = receive_filter
        self._broadcast = addresses.broadcast
        self._peer_sources = addresses.peer_sources
        self._source_information = _PACKET_INFORMATION.pack(
            0, socket.inet_aton(addresses.source), bytes(4)
        )
        self._mark = run_mark(run)
        self._limit = limit
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _REPORT_OPTIONS)
        # The buffer must hold a burst, because a link without a rate delivers it before the reading thread gets the
        # interpreter's lock.
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

    def send(self, body: bytes, incarnation: int, number: int) -> tuple[int, float]:
        """Transmit once; return the number of bytes and the monotonic instant at which the last datagram left.

        The call blocks until the last datagram has left, so an event loop needs a thread for it. Raises ValueError if
        the message is too large or the deployment has no broadcast address.
        """
        if self._broadcast is None:
            raise ValueError(
                "the deployment has no broadcast address: broadcasts need all devices on one host"
            )
        count = math.ceil(len(body) / CAST_CHUNK)
        if count > _MOST_CHUNKS:
            raise ValueError(
                f"a broadcast of {len(body)} bytes is too large; at most {_MOST_CHUNKS * CAST_CHUNK} are allowed"
            )
        view = memoryview(body)
        # Discard the report of an earlier broadcast whose sender did not wait.
        self._read_departure()
        for index in range(count):
            prefix = _CHUNK_HEAD.pack(self._mark, incarnation, number, index, count)
            chunk = view[index * CAST_CHUNK : (index + 1) * CAST_CHUNK]
            control_messages = [
                (socket.IPPROTO_IP, _IP_PKTINFO, self._source_information)
            ]
            if index == count - 1:
                # Datagrams leave in order, so the departure of the last one is that of the whole message.
                control_messages += _REPORT_REQUEST
            self._socket.sendmsg([prefix, chunk], control_messages, 0, self._broadcast)
        return len(body), self._wait_until_sent()

    def _wait_until_sent(self) -> float:
        """Wait until all datagrams have left; return the monotonic instant of the last departure."""
        poll = select.poll()
        poll.register(self._socket, 0)
        while not self._closed:
            poll.poll(_POLL_SECONDS * 1000)
            departure = self._read_departure()
            if departure is not None:
                return departure
            # The number of bytes not yet sent, as a C integer.
            queued = fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0\0\0\0")
            if not any(queued):
                break  # the datagram was dropped, or the kernel does not report departures
        return time.monotonic()

    def _read_departure(self) -> float | None:
        """Return the monotonic instant of the latest departure reported by the kernel; None without a report."""
        departure = None
        with contextlib.suppress(BlockingIOError):
            while True:
                _, control_messages, _, _ = self._socket.recvmsg(
                    0, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT
                )
                for level, kind, data in control_messages:
                    if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPING):
                        seconds, nanoseconds = _TIME_STAMP.unpack_from(data)
                        seconds_ago = time.time() - seconds - nanoseconds * 1e-9
                        # The report uses the wall clock. An implausible difference means that the clock was adjusted
                        # in between, and then the departure counts as now.
                        if not 0 <= seconds_ago < 1:
                            seconds_ago = 0.0
                        departure = time.monotonic() - seconds_ago
        return departure

    def _listen(self, inbox: Inbox) -> None:
        with self._socket:
            while True:
                # No datagram of IPv4 is larger.
                datagram, source = self._socket.recvfrom(65536)
                if self._closed:
                    return
                self._add_datagram(datagram, source[0], inbox)

    def _add_datagram(self, datagram: bytes, source: str, inbox: Inbox) -> None:
        if len(datagram) < _CHUNK_HEAD.size:
            return
        run, incarnation, number, index, count = _CHUNK_HEAD.unpack_from(datagram)
        if run != self._mark or index >= count:
            return  # the datagram belongs to another run on the same network, or is malformed
        # Nothing is stored of a message that is too large for the device, since it could never be complete.
        if count * CAST_CHUNK > self._limit + CAST_CHUNK:
            return
        # The key has the sender's address instead of its name, since only the complete message contains the name.
        key = (source, incarnation, number)
        partial = self._partial.setdefault(key, _Partial(time.monotonic(), count))
        # All datagrams of a message have the same count, so a different count shows a malformed datagram.
        if partial.count != count:
            return
        partial.chunks[index] = datagram[_CHUNK_HEAD.size :]
        if len(partial.chunks) < count:
            while len(self._partial) > _MOST_PARTIAL:
                self._partial.popitem(last=False)
            return
        del self._partial[key]
        body = b"".join(partial.chunks[part] for part in range(count))
        self._deliver_message(body, key, partial, inbox)

    def _deliver_message(
        self, body: bytes, key: tuple[str, int, int], partial: _Partial, inbox: Inbox
    ) -> None:
        source, incarnation, number = key
        size = len(body)
        arrived = time.monotonic()
        try:
            decoded = self._encoding.decode(body)
        except WireError:
            return
        if decoded is None:
            return
        complete, header_size = decoded
        # A device cannot send from another's address. A message with the name of another device is an impersonation and
        # is dropped.
        if self._peer_sources.get(complete.sender) != source:
            return
        message = self._receive_filter(complete, header_size, number)
        if message is None or not inbox.reserve(size):
            return
        is_delivered = False
        try:
            arrival = Arrival(
                Envelope(message, incarnation, number),
                size,
                partial.start,
                arrived - partial.start,
                time.monotonic() - arrived,
                cast=True,
            )
            is_delivered = inbox.put(arrival)
        finally:
            if not is_delivered:
                inbox.release(size)
