"""Traffic between bare namespaces with measured delays, losses and rates, for tests of the links' conformance."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from testbed.network.link import Link, Pair
from testbed.wire.framing import MTU, SEGMENT
from testbed_controller.shaping.plan import FRAME, queue_limit
from tools.bench.bare import Network

HEADERS = 42
"""Bytes of Ethernet, IP and UDP before a datagram's content."""
_CONTENT = struct.Struct("=8sId")
# Constants of asm-generic/socket.h and linux/udp.h, which Python's `socket` lacks.
_SO_NO_CHECK, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _UDP_SEGMENT = 11, 32, 33, 103
_RECEIVE_BUFFER = 256 << 20
"""Size of a receiver's buffer in bytes, beyond any measured flow, so that no datagram is lost here."""
_BUFFER_PER_FRAME = 2304
"""Bytes that the kernel charges to a socket's buffer for a full frame."""
_PORT = 5001
_AT_ONCE = 0.004
"""Amount of data per call of `send`, in seconds at the rate of the link."""
_MOST_FRAMES = 40
"""Maximum number of frames per call: the kernel segments at most 64 KiB."""
_WAIT_TO_SEND = 0.0005
"""Seconds between attempts to send while the socket's buffer is full."""


@dataclass
class Flow:
    """Datagrams of one link, with the times of sending and the arrivals.

    >>> flow = Flow(sent=[0.0, 0.1, 0.2], arrived=[(0, 0.01), (2, 0.01), (2, 0.02)])
    >>> flow.lost, flow.duplicates, flow.delays
    (1, 1, [0.01, 0.01])
    """

    sent: list[float] = field(default_factory=list)
    arrived: list[tuple[int, float]] = field(default_factory=list)
    """(number, delay in seconds) of intact arrivals, in the order of arrival; duplicates have two entries."""
    damaged: int = 0
    """Number of altered arrivals."""

    @property
    def delays(self) -> list[float]:
        """Delays of the arrivals in seconds, without duplicates."""
        # A dict keeps the last entry of a number: reversed, the first copy.
        return list(dict(reversed(self.arrived)).values())

    @property
    def fates(self) -> list[bool]:
        """Whether each datagram was lost, in the order of sending."""
        received = {number for number, _ in self.arrived}
        return [number not in received for number in range(len(self.sent))]

    @property
    def lost(self) -> int:
        """Number of datagrams without an intact arrival."""
        return sum(self.fates)

    @property
    def duplicates(self) -> int:
        """Number of duplicates."""
        return len(self.arrived) - len({number for number, _ in self.arrived})


def measure_flows(
    net: Network,
    pairs: Sequence[Pair],
    count: int,
    gap: float,
    *,
    size: int = 64,
    linger: float = 0.2,
    read_every: int = 1,
) -> dict[Pair, Flow]:
    """Send ``count`` datagrams over each link, ``gap`` seconds apart (links in turn), and return the measured flows.

    ``linger`` is the time to wait for the last datagram. The datagrams have no checksum, so that altered ones arrive.
    Arrivals are read after every ``read_every`` numbers; delays are accurate only for 1, the default.
    """
    # The mark tells the datagrams of this measurement from late ones of an earlier measurement.
    run = os.urandom(8)
    measured = {pair: Flow() for pair in pairs}
    # All values of a byte, so that any altered bit is noticed.
    filler = (bytes(range(256)) * 6)[: size - _CONTENT.size]
    with contextlib.ExitStack() as stack:
        senders = _open_senders(net, pairs, stack)
        receivers = {}
        targets = {}
        by_descriptor = {}
        epoll = stack.enter_context(contextlib.closing(select.epoll()))
        for pair in pairs:
            receiver = stack.enter_context(_bound_socket(net, pair[1]))
            receivers[pair] = receiver
            targets[pair] = receiver.getsockname()
            by_descriptor[receiver.fileno()] = pair
            epoll.register(receiver.fileno(), select.EPOLLIN)

        def drain(until: float) -> None:
            while True:
                wait = until - time.monotonic()
                # The time-out of epoll is in milliseconds, which is too coarse.
                select.select([epoll.fileno()], [], [], max(0.0, wait))
                for descriptor, _ in epoll.poll(0):
                    pair = by_descriptor[descriptor]
                    _receive_all(receivers[pair], measured[pair], run, filler)
                if time.monotonic() >= until:
                    return

        # Empty datagrams resolve the addresses of all peers before the measurement.
        for pair in pairs:
            senders[pair[0]].sendto(b"", targets[pair])
        drain(time.monotonic() + 0.02)
        start = time.monotonic()
        for first in range(0, count, read_every):
            numbers = range(first, min(first + read_every, count))
            for number in numbers:
                mark = (run, number)
                for pair, flow in measured.items():
                    sender = senders[pair[0]]
                    sent = _send_datagram(sender, targets[pair], mark, filler, drain)
                    flow.sent.append(sent)
            drain(start + numbers.stop * gap)
        drain(time.monotonic() + linger)
    return measured


def _open_senders(
    net: Network, pairs: Sequence[Pair], stack: contextlib.ExitStack
) -> dict[str, socket.socket]:
    """Return a socket for each sending device, whose datagrams have no checksum."""
    senders: dict[str, socket.socket] = {}
    for source, _ in pairs:
        if source not in senders:
            sender = stack.enter_context(_bound_socket(net, source))
            sender.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
            senders[source] = sender
    return senders


def _send_datagram(
    sender: socket.socket,
    target: tuple[str, int],
    mark: tuple[bytes, int],
    filler: bytes,
    drain: Callable[[float], None],
) -> float:
    """Send a datagram, as soon as the socket's buffer has room, and return the time of sending."""
    while True:
        now = time.monotonic()
        try:
            sender.sendto(_CONTENT.pack(*mark, now) + filler, target)
        except BlockingIOError:
            # The kernel still holds earlier datagrams in the buffer.
            drain(now + _WAIT_TO_SEND)
        else:
            return now


def _receive_all(
    receiver: socket.socket, flow: Flow, run: bytes, filler: bytes
) -> None:
    """Record all datagrams in a socket's buffer."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data = receiver.recv(MTU)
            now = time.monotonic()
            # An empty datagram only resolves addresses.
            if not data:
                continue
            number = _intact_number(data, flow, run, filler)
            if number is None:
                flow.damaged += 1
            else:
                flow.arrived.append((number, now - flow.sent[number]))


def _intact_number(data: bytes, flow: Flow, run: bytes, filler: bytes) -> int | None:
    """Return the number of an intact datagram; None for an altered one."""
    if len(data) != _CONTENT.size + len(filler) or not data.endswith(filler):
        return None
    stamp, number, sent = _CONTENT.unpack_from(data)
    if stamp != run or number >= len(flow.sent) or sent != flow.sent[number]:
        return None
    return int(number)


def _bound_socket(net: Network, name: str) -> socket.socket:
    """Return a non-blocking UDP socket in the namespace of a device."""

    def bind() -> socket.socket:
        inside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        inside.bind((net.endpoints[name].address, 0))
        return inside

    bound = net.inside(name, bind)
    bound.setblocking(False)
    bound.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
    return bound


@dataclass
class _Received:
    """Cumulative bytes received on one link over time."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes so far)"""

    def add(self, when: float, count: int) -> None:
        before = self.steps[-1][1] if self.steps else 0
        self.steps.append((when, before + count))

    def rate(self, skip: float, until: float) -> float:
        """Return the mean rate in bit/s, from ``skip`` seconds after the first arrival to the time ``until``."""
        if not self.steps:
            return 0.0
        since = self.steps[0][0] + skip
        counted = [step for step in self.steps if since <= step[0] <= until]
        if len(counted) < 2:
            return 0.0
        first_time, first_bytes = counted[0]
        last_time, last_bytes = counted[-1]
        seconds = last_time - first_time
        if seconds <= 0:
            return 0.0
        return (last_bytes - first_bytes) * 8 / seconds


def udp_rates(
    net: Network,
    links: Mapping[Pair, Link],
    seconds: float,
    *,
    skip: float,
    frame: int = FRAME,
) -> dict[Pair, float]:
    """Send datagrams over all links at once, as fast as possible; return the received rates in bit/s on the wire.

    The first ``skip`` seconds do not count, in which an idle link passes its burst.
    """
    content = bytes(frame - HEADERS)
    with contextlib.ExitStack() as stack:
        senders, receivers = {}, {}
        for pair, link in links.items():
            receivers[pair] = stack.enter_context(_bound_socket(net, pair[1]))
            senders[pair] = sender = stack.enter_context(_bound_socket(net, pair[0]))
            # Below the length of the queue before the link, which would drop the excess.
            buffer = int(0.5 * queue_limit(link)) * _BUFFER_PER_FRAME
            # The kernel doubles the value.
            sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
            sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, len(content))
            sender.connect(receivers[pair].getsockname())
        pieces = {}
        for pair, link in links.items():
            pieces[pair] = content * _frames_at_once(link, frame)

        def push(pair: Pair) -> None:
            while True:
                senders[pair].send(pieces[pair])

        def pull(pair: Pair) -> int:
            count = 0
            with contextlib.suppress(BlockingIOError):
                while count < 64:
                    receivers[pair].recv_into(buffer_in)
                    count += 1
            return count * frame

        buffer_in = bytearray(MTU)
        longest = max(link.delay for link in links.values())
        slowest = min(link.rate or math.inf for link in links.values())
        # Silence in seconds after which no datagram is under way: the delay and twenty frames, with a margin.
        quiet = 0.3 + longest + 20 * frame * 8 / slowest
        return _transfer(senders, push, receivers, pull, seconds, skip, quiet)


def _frames_at_once(link: Link, frame: int) -> int:
    return max(1, min(_MOST_FRAMES, int((link.rate or 1e9) * _AT_ONCE / 8 / frame)))


def tcp_rates(
    net: Network, pairs: Iterable[Pair], seconds: float, *, skip: float
) -> dict[Pair, float]:
    """Send over one TCP connection per link, all at once; return the rates of content in bit/s.

    The first ``skip`` seconds of each connection do not count.
    """
    with contextlib.ExitStack() as stack:
        senders: dict[Pair, socket.socket] = {}
        receivers: dict[Pair, socket.socket] = {}
        for index, pair in enumerate(pairs):
            address = (net.endpoints[pair[1]].address, _PORT + index)
            listen = partial(socket.create_server, address)
            server = stack.enter_context(net.inside(pair[1], listen))
            connect = partial(socket.create_connection, address, 30)
            client = net.inside(pair[0], connect)
            senders[pair] = stack.enter_context(client)
            receivers[pair] = stack.enter_context(server.accept()[0])
        # Blocked in one connection, the process would leave the others idle.
        for each in (*senders.values(), *receivers.values()):
            each.setblocking(False)
        content = bytes(180 * SEGMENT)
        buffer = bytearray(1 << 20)

        def push(pair: Pair) -> None:
            while True:
                senders[pair].send(content)

        def pull(pair: Pair) -> int:
            with contextlib.suppress(BlockingIOError):
                return receivers[pair].recv_into(buffer)
            return 0

        # Data in transit at the end does not count, so there is no time to wait for it.
        return _transfer(senders, push, receivers, pull, seconds, skip, 0.0)


def _transfer(
    senders: Mapping[Pair, socket.socket],
    push: Callable[[Pair], None],
    receivers: Mapping[Pair, socket.socket],
    pull: Callable[[Pair], int],
    seconds: float,
    skip: float,
    quiet: float,
) -> dict[Pair, float]:
    """Send for ``seconds`` in a child process; receive in this process until ``quiet`` seconds pass without data.

    A single process would delay sending while it receives, and a link without data to send looks like a slow link.
    """
    received = {pair: _Received() for pair in receivers}
    end = time.monotonic() + seconds

    def send() -> None:
        with _watch_sockets(senders, select.EPOLLOUT) as wait_for_ready:
            while time.monotonic() < end:
                for pair in wait_for_ready(0.05):
                    with contextlib.suppress(BlockingIOError):
                        push(pair)

    last_arrival = time.monotonic()
    sender = multiprocessing.get_context("fork").Process(target=send)
    sender.start()
    with _watch_sockets(receivers, select.EPOLLIN) as wait_for_ready:
        while time.monotonic() < max(end, last_arrival + quiet if quiet else 0.0):
            for pair in wait_for_ready(0.05):
                count = pull(pair)
                last_arrival = time.monotonic()
                received[pair].add(last_arrival, count)
        sender.join()
    # Only up to the end of sending: afterwards, a link may use capacity that several links shared before.
    return {pair: each.rate(skip, end) for pair, each in received.items()}


@contextlib.contextmanager
def _watch_sockets(
    sockets: Mapping[Pair, socket.socket], event: int
) -> Iterator[Callable[[float], list[Pair]]]:
    """Yield a function that waits some seconds for an event, and returns the links whose sockets have the event."""
    by_descriptor = {}
    with contextlib.closing(select.epoll()) as epoll:
        for pair, each in sockets.items():
            by_descriptor[each.fileno()] = pair
            epoll.register(each.fileno(), event)

        def wait_for_ready(seconds: float) -> list[Pair]:
            return [by_descriptor[descriptor] for descriptor, _ in epoll.poll(seconds)]

        yield wait_for_ready
