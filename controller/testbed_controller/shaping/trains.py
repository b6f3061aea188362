"""Measures rates by trains of full frames, whose times are the kernel's, as the frames come off the wire."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from testbed.network.impairments import longest_delay
from testbed.network.link import Link, Pair
from testbed_controller.shaping.namespaces import Namespace
from testbed_controller.shaping.plan import FRAME, burst, queue_limit

HEADERS = 42
"""Bytes of Ethernet, IP and UDP before a datagram's content."""
CONTENT = struct.Struct("=8sIId")
"""At the beginning of each: which measurement, which link of it, number, and seconds of sending."""
SMALL_FRAME = HEADERS + CONTENT.size
BUFFER_PER_FRAME = 2304
"""What the kernel charges to a socket for a full frame."""
MOST_FRAMES = 4000
"""On their way to one socket."""
SO_TIMESTAMPNS = 35
ETHERNET = 14
"""Bytes before a packet."""
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_SO_RCVBUFFORCE = 33
_TRAIN_SECONDS = 0.12
_MOST_SECONDS = 1.0
"""Seconds of the fewest frames over a slow link, at most: they are smaller there."""
_FEWEST_FRAMES = 24
_AT_ONCE = 64
"""Frames sent to a downlink before arrivals are looked at: they are noticed only then."""
_SO_SNDBUFFORCE, _UDP_SEGMENT = 32, 103


@dataclass(frozen=True)
class Site:
    """Where one end of a link is."""

    namespace: Namespace | None
    """None on another host."""
    address: str
    uplink: float | None = None
    downlink: float | None = None


@dataclass(frozen=True)
class Ends:
    """The ends of the probes on one device."""

    sender: socket.socket
    receiver: socket.socket
    frame: int
    """Bytes of the largest Ethernet frame that the device sends."""

    @property
    def target(self) -> tuple[str, int]:
        """Where the receiver is reached."""
        address: tuple[str, int] = self.receiver.getsockname()
        return address


@dataclass(frozen=True)
class FarEnds:
    """The ends of the probes on a device on another host."""

    target: tuple[str, int]
    frame: int = FRAME
    sender: None = None
    receiver: None = None


@contextlib.contextmanager
def sockets(sites: Mapping[str, Site], names: Iterable[str]) -> Iterator[dict[str, Ends]]:
    """Open a sending and a receiving socket on a port of their own in each device."""
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in sorted(names):
            site = sites[name]
            assert site.namespace is not None
            ends[name] = site.namespace.run(partial(_open, site.address))
            stack.enter_context(ends[name].sender)
            stack.enter_context(ends[name].receiver)
        yield ends


def _open(address: str) -> Ends:
    sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for each in (sender, receiver):
        each.bind((address, 0))
        each.setblocking(False)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2 * MOST_FRAMES * BUFFER_PER_FRAME)
    receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return Ends(sender, receiver, _largest(sender, address))


def _largest(link: socket.socket, address: str) -> int:
    """Return the bytes of the largest frame of the interface with an address: in a VXLAN less than elsewhere."""
    for _, name in socket.if_nameindex():
        request = struct.pack("16s24x", name.encode())
        with contextlib.suppress(OSError):  # it has no address
            if fcntl.ioctl(link, _SIOCGIFADDR, request)[20:24] == socket.inet_aton(address):
                mtu: int = struct.unpack_from("=i", fcntl.ioctl(link, _SIOCGIFMTU, request), 16)[0]
                return min(FRAME, mtu + ETHERNET)
    return FRAME


class Listener:
    """Waits for several sockets with microseconds, which epoll alone does not."""

    def __init__(self, receivers: Iterable[socket.socket]) -> None:
        self._epoll = select.epoll()
        self._receivers = {receiver.fileno(): receiver for receiver in receivers}
        for descriptor in self._receivers:
            self._epoll.register(descriptor, select.EPOLLIN)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()

    def ready(self, seconds: float) -> list[socket.socket]:
        """Wait at most so long; return the sockets that have something."""
        select.select([self._epoll.fileno()], [], [], max(0.0, seconds))
        return [self._receivers[descriptor] for descriptor, _ in self._epoll.poll(0)]


@dataclass
class _Train:
    """Full frames on their way over one link as fast as it takes them."""

    pair: Pair
    link: Link
    """The link with the lowest rate on the way."""
    late: bool
    """Whether that is the downlink's: packets meet it after the kernel has noted their arrival."""
    frame: int
    frames: int
    together: int
    """Frames handed to the kernel in one piece, which the link's rate lets pass at once: one on all but fast links."""
    sent: int = 0
    stamps: dict[int, float] = field(default_factory=dict)

    @property
    def frame_seconds(self) -> float:
        """Return the seconds that a frame takes at the link's rate."""
        return self.link.transmission_time(self.frame)

    def rate(self) -> float | None:
        """Return bit/s on the wire, without what the bucket let through at once; None when too little arrived."""
        assert self.link.rate
        skipped = _unmetered(self.link.rate, self.frame)
        counted = sorted(number for number in self.stamps if number >= skipped)
        if len(counted) < 2 or self.stamps[counted[-1]] <= self.stamps[counted[0]]:
            return None
        if self.late:
            # Frames that were lost never came to the downlink, so arrivals are counted, whatever their numbers.
            spacing = slope_below(sorted(self.stamps[number] for number in counted))
            return self.frame * 8 / spacing if spacing > 0 else None
        if self.link.jitter or self.link.reorder:
            # Of packets that each had a delay of its own, two alone say too little.
            slope = statistics.linear_regression(counted, [self.stamps[number] for number in counted]).slope
            return self.frame * 8 / slope if slope > 0 else None
        first, last = counted[0], counted[-1]
        return (last - first) * self.frame * 8 / (self.stamps[last] - self.stamps[first])


def slope_below(times: Sequence[float]) -> float:
    """Return the seconds from one arrival to the next, given at least two instants at which arrivals were noticed.

    An arrival is noticed late, never early: this process sends meanwhile, and others take the processor. So the true
    arrivals lie on a line below all points, and the edge of the lower convex hull under the middle is that line unless
    half of the arrivals were noticed late.
    """
    hull: list[int] = []
    for index in range(len(times)):
        while len(hull) > 1 and _turns_down(times, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(index)
    middle = (len(times) - 1) / 2
    right = next(place for place, index in enumerate(hull) if index > middle)
    first, last = hull[right - 1], hull[right]
    return (times[last] - times[first]) / (last - first)


def _turns_down(times: Sequence[float], first: int, second: int, third: int) -> bool:
    """Return whether the second point lies on or above the line from the first to the third."""
    rise, run = times[second] - times[first], second - first
    return rise * (third - first) >= (times[third] - times[first]) * run


def _unmetered(rate: float, frame: int) -> int:
    """Return how many frames of a train to leave out: what a full bucket lets through at once, twice over."""
    return 2 * burst(rate) // frame + 2


def _train(pair: Pair, link: Link, late: bool, ends: Mapping[str, Ends | FarEnds]) -> _Train:
    rate = link.rate
    assert rate
    largest = min(ends[name].frame for name in pair)
    frame = int(min(largest, max(SMALL_FRAME, rate / 8 * _MOST_SECONDS / _FEWEST_FRAMES)))
    frames = int(min(MOST_FRAMES, max(_FEWEST_FRAMES, rate / 8 * _TRAIN_SECONDS / frame)))
    together = max(1, min(40, burst(rate) // FRAME // 2))
    return _Train(pair, link, late, frame, _unmetered(rate, frame) + frames, together)


def _push(index: int, train: _Train, run: bytes, ends: Mapping[str, Ends | FarEnds]) -> bool:
    """Send what the socket takes; say whether frames are left.

    Several frames go to the kernel in one piece, which it cuts up before the wire: frame by frame a host under load
    would measure itself at high rates.
    """
    source, destination = train.pair
    sender, address = ends[source].sender, ends[destination].target
    assert sender is not None
    content = train.frame - HEADERS
    most = train.sent + _AT_ONCE if train.late else train.frames
    with contextlib.suppress(BlockingIOError):
        while train.sent < min(train.frames, most):
            following = range(train.sent, min(train.frames, train.sent + train.together))
            piece = b"".join(CONTENT.pack(run, index, number, 0.0).ljust(content, b"\0") for number in following)
            sender.sendto(piece, address)
            train.sent = following.stop
    return train.sent < train.frames


def _note_arrivals(receiver: socket.socket, run: bytes, trains: Mapping[int, _Train]) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(256):
            data, ancillary, _, _ = receiver.recvmsg(FRAME, 64)
            if len(data) < CONTENT.size or not data.startswith(run):
                continue
            _, index, number, _ = CONTENT.unpack_from(data)
            if trains[index].late:
                trains[index].stamps[number] = time.monotonic()
                continue
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                    seconds, nanoseconds = struct.unpack_from("=qq", value)
                    trains[index].stamps[number] = seconds + nanoseconds * 1e-9


def seconds(links: Mapping[Pair, Link], late: Collection[Pair], ends: Mapping[str, Ends | FarEnds]) -> float:
    """Return within which time `rates` is over."""
    trains = [_train(pair, link, pair in late, ends) for pair, link in links.items()]
    longest = max(train.frames * train.frame_seconds for train in trains)
    return 2 * longest + max(longest_delay(link) for link in links.values()) + 0.2 + _rest(trains)


def _rest(trains: Iterable[_Train]) -> float:
    """Return the seconds after which a bucket that the last frame has emptied delays no further packet."""
    return max(train.frame_seconds for train in trains)


def rates(
    links: Mapping[Pair, Link], late: Collection[Pair], ends: Mapping[str, Ends | FarEnds], run: bytes | None = None
) -> dict[Pair, float | None]:
    """Send a train over each of these links, which share no device; return bit/s, None where too little arrived.

    Each link is that of the lowest rate on the way; ``late`` are those of which it is the downlink's. Of a link with an
    end on another host only what is done at the other end is done here; ``run`` is then the same at both.
    """
    run = run or os.urandom(8)
    trains = [_train(pair, link, pair in late, ends) for pair, link in links.items()]
    by_index = dict(enumerate(trains))
    leaving = {index: train for index, train in by_index.items() if ends[train.pair[0]].sender is not None}
    coming = [train for train in trains if ends[train.pair[1]].receiver is not None]
    for train in leaving.values():
        # As much as the queue before the link holds may be sent ahead; more would be lost there.
        sender = ends[train.pair[0]].sender
        assert sender is not None
        buffer = int(0.6 * queue_limit(train.link)) * BUFFER_PER_FRAME
        sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
        sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, train.frame - HEADERS)
    until = time.monotonic() + seconds(links, late, ends)
    quiet = max(longest_delay(link) for link in links.values()) + 0.1
    quiet += 10 * max(train.frame_seconds for train in trains)
    last_heard = time.monotonic() + (0.2 if len(coming) > len(leaving) else 0.0)
    receivers = [found for pair in links if (found := ends[pair[1]].receiver) is not None]
    with Listener(receivers) as listener:
        while (now := time.monotonic()) < until:
            sending = [index for index, train in leaving.items() if _push(index, train, run, ends)]
            if not sending and all(train.frames - 1 in train.stamps for train in coming):
                break
            if not sending and now > last_heard + quiet:
                break
            for receiver in listener.ready((0.0 if late else 0.002) if sending else 0.02):
                last_heard = time.monotonic()
                _note_arrivals(receiver, run, by_index)
    for train in leaving.values():
        sender = ends[train.pair[0]].sender
        assert sender is not None
        sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, 0)
    time.sleep(_rest(trains))
    return {train.pair: train.rate() for train in trains}
