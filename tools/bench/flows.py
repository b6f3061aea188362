"""Traffic between bare namespaces, and what became of it: the measuring side of the links' conformance."""

from __future__ import annotations

import contextlib
import itertools
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
_SO_NO_CHECK, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _UDP_SEGMENT = 11, 32, 33, 103
_RECEIVE_BUFFER = 256 << 20
_BUFFER_PER_FRAME = 2304
"""What the kernel charges to a socket for a full frame."""
_PORT = 5001
_AT_ONCE = 0.004
"""Seconds of a link's rate that one call sends."""
_MOST_FRAMES = 40
"""In one call: a datagram that the kernel cuts up has at most 64 KiB."""
_WAIT_TO_SEND = 0.0005
"""Seconds between attempts to send where the socket's buffer is full."""


@dataclass
class Flow:
    """Datagrams of one link: when each was sent, and what came of them, in the order of arrival."""

    sent: list[float] = field(default_factory=list)
    arrived: list[tuple[int, float]] = field(default_factory=list)
    """(number, delay in seconds) of those that arrived intact; one that came twice is there twice."""
    damaged: int = 0
    """Those that arrived altered."""

    @property
    def delays(self) -> list[float]:
        """Return the delays of what arrived, first copies only."""
        return list(dict(reversed(self.arrived)).values())

    @property
    def fates(self) -> list[bool]:
        """Return of each datagram whether it was lost, in the order of sending."""
        got = {number for number, _ in self.arrived}
        return [number not in got for number in range(len(self.sent))]

    @property
    def lost(self) -> int:
        """Return how many never arrived intact."""
        return sum(self.fates)

    @property
    def twice(self) -> int:
        """Return how many arrived more than once."""
        return len(self.arrived) - len({number for number, _ in self.arrived})


def flows(
    net: Network,
    pairs: Sequence[Pair],
    count: int,
    gap: float,
    *,
    size: int = 64,
    linger: float = 0.2,
    read_every: int = 1,
) -> dict[Pair, Flow]:
    """Send ``count`` datagrams over each link, ``gap`` seconds apart (links in turn), and wait for the last.

    ``linger`` is the longest that one may be under way. The datagrams bear no checksum, so that damage is seen.
    What has arrived is read after each number, for its delay; where that is of no interest, after ``read_every``.
    """
    run = os.urandom(8)
    made = {pair: Flow() for pair in pairs}
    filler = bytes(range(256)) * 6
    rest = size - _CONTENT.size
    with contextlib.ExitStack() as stack:
        receivers = {pair: stack.enter_context(_bound(net, pair[1])) for pair in pairs}
        senders = {
            name: stack.enter_context(_bound(net, name))
            for name in {pair[0] for pair in pairs}
        }
        for sender in senders.values():
            sender.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
        targets = {pair: receiver.getsockname() for pair, receiver in receivers.items()}
        by_descriptor = {
            receiver.fileno(): pair for pair, receiver in receivers.items()
        }
        epoll = stack.enter_context(contextlib.closing(select.epoll()))
        for descriptor in by_descriptor:
            epoll.register(descriptor, select.EPOLLIN)

        def drain(until: float) -> None:
            while True:
                wait = until - time.monotonic()
                select.select([epoll.fileno()], [], [], max(0.0, wait))
                for descriptor, _ in epoll.poll(0):
                    pair = by_descriptor[descriptor]
                    _take(receivers[pair], made[pair], run, filler[:rest])
                if time.monotonic() >= until:
                    return

        for pair in pairs:
            senders[pair[0]].sendto(b"", targets[pair])  # makes the addresses known
        drain(time.monotonic() + 0.02)
        start = time.monotonic()
        for first in range(0, count, read_every):
            numbers = range(first, min(first + read_every, count))
            for number, (pair, flow) in itertools.product(numbers, made.items()):
                flow.sent.append(
                    _send(
                        senders[pair[0]],
                        targets[pair],
                        (run, number),
                        filler[:rest],
                        drain,
                    )
                )
            drain(start + numbers.stop * gap)
        drain(time.monotonic() + linger)
    return made


def _send(
    sender: socket.socket,
    target: tuple[str, int],
    mark: tuple[bytes, int],
    filler: bytes,
    drain: Callable[[float], None],
) -> float:
    """Send a datagram, once there is room for it; return when."""
    while True:
        now = time.monotonic()
        try:
            sender.sendto(_CONTENT.pack(*mark, now) + filler, target)
        except BlockingIOError:  # the kernel has yet to carry off what was sent before
            drain(now + _WAIT_TO_SEND)
        else:
            return now


def _take(receiver: socket.socket, flow: Flow, run: bytes, filler: bytes) -> None:
    """Note all that a socket has received."""
    with contextlib.suppress(BlockingIOError):
        while True:
            data = receiver.recv(MTU)
            now = time.monotonic()
            if not data:
                continue
            if len(data) == _CONTENT.size + len(filler) and data.endswith(filler):
                stamp, number, sent = _CONTENT.unpack_from(data)
                if (
                    stamp == run
                    and number < len(flow.sent)
                    and sent == flow.sent[number]
                ):
                    flow.arrived.append((number, now - sent))
                    continue
            flow.damaged += 1


def _bound(net: Network, name: str) -> socket.socket:
    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((net.endpoints[name].address, 0))
        return made

    made = net.inside(name, make)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
    return made


@dataclass
class _Received:
    """How much had come in on one link, and when."""

    steps: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes so far)"""

    def add(self, when: float, count: int) -> None:
        self.steps.append((when, (self.steps[-1][1] if self.steps else 0) + count))

    def rate(self, skip: float, until: float) -> float:
        """Return bit/s after the first seconds, up to a time."""
        if not self.steps:
            return 0.0
        later = [
            step for step in self.steps if self.steps[0][0] + skip <= step[0] <= until
        ]
        if len(later) < 2 or later[-1][0] <= later[0][0]:
            return 0.0
        return (later[-1][1] - later[0][1]) * 8 / (later[-1][0] - later[0][0])


def udp_rates(
    net: Network,
    links: Mapping[Pair, Link],
    seconds: float,
    *,
    skip: float,
    frame: int = FRAME,
) -> dict[Pair, float]:
    """Send over all of these links at once, as fast as each takes it; return bit/s on the wire, as programs see it.

    The first ``skip`` seconds do not count: what an idle link may send at once passes then.
    """
    content = bytes(frame - HEADERS)
    with contextlib.ExitStack() as stack:
        senders, receivers = {}, {}
        for pair, link in links.items():
            receivers[pair] = stack.enter_context(_bound(net, pair[1]))
            senders[pair] = sender = stack.enter_context(_bound(net, pair[0]))
            # Less than the queue before the link holds, or it would lose some.
            buffer = int(0.5 * queue_limit(link)) * _BUFFER_PER_FRAME
            sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
            sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, len(content))
            sender.connect(receivers[pair].getsockname())
        pieces = {
            pair: content * _frames_at_once(link, frame) for pair, link in links.items()
        }

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
        quiet = 0.3 + longest + 20 * frame * 8 / slowest
        return _pump(senders, push, receivers, pull, seconds, skip, quiet)


def _frames_at_once(link: Link, frame: int) -> int:
    return max(1, min(_MOST_FRAMES, int((link.rate or 1e9) * _AT_ONCE / 8 / frame)))


def tcp_rates(
    net: Network, pairs: Iterable[Pair], seconds: float, *, skip: float
) -> dict[Pair, float]:
    """Send over one TCP connection per link, all at once; return bit/s of content after the first ``skip`` seconds."""
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

        # What is under way when time is up does not count, and is not waited for.
        return _pump(senders, push, receivers, pull, seconds, skip, 0.0)


def _pump(
    senders: Mapping[Pair, socket.socket],
    push: Callable[[Pair], None],
    receivers: Mapping[Pair, socket.socket],
    pull: Callable[[Pair], int],
    seconds: float,
    skip: float,
    quiet: float,
) -> dict[Pair, float]:
    """Keep the senders busy for so long, in a process of their own, while this one receives until nothing comes.

    In one process the two would wait for each other, and a link that had nothing to send looks like one that is slow.
    """
    received = {pair: _Received() for pair in receivers}
    end = time.monotonic() + seconds

    def send() -> None:
        with _watching(senders, select.EPOLLOUT) as ready:
            while time.monotonic() < end:
                for pair in ready(0.05):
                    with contextlib.suppress(BlockingIOError):
                        push(pair)

    heard = time.monotonic()
    sending = multiprocessing.get_context("fork").Process(target=send)
    sending.start()
    with _watching(receivers, select.EPOLLIN) as ready:
        while (now := time.monotonic()) < max(end, heard + quiet if quiet else 0.0):
            for pair in ready(0.05):
                count = pull(pair)
                heard = now = time.monotonic()
                received[pair].add(now, count)
        sending.join()
    # Once nobody sends any more, a link may be alone with what several shared before.
    return {pair: each.rate(skip, end) for pair, each in received.items()}


@contextlib.contextmanager
def _watching(
    sockets: Mapping[Pair, socket.socket], event: int
) -> Iterator[Callable[[float], list[Pair]]]:
    by_descriptor = {each.fileno(): pair for pair, each in sockets.items()}
    with contextlib.closing(select.epoll()) as epoll:
        for descriptor in by_descriptor:
            epoll.register(descriptor, event)
        yield lambda wait: [
            by_descriptor[descriptor] for descriptor, _ in epoll.poll(wait)
        ]
