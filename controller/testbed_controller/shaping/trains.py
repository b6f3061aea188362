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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """The sockets for measurements on one device of this host."""

    sender: socket.socket
    receiver: socket.socket
    frame: int
    """Bytes of the largest Ethernet frame that the device sends."""

    @property
    def target(self) -> tuple[str, int]:
        """Return the address of the receiver."""
        address: tuple[str, int] = self.receiver.getsockname()
        return address

    def send(self, content: bytes, target: tuple[str, int]) -> bool:
        """Send a datagram; return False if the socket's buffer is full."""
        try:
            self.sender.sendto(content, target)
        except BlockingIOError:
            return False
        return True


@dataclass(frozen=True)
class FarEnds:
    """The address of the receiver on a device of another host."""

    target: tuple[str, int]
    frame: int = FRAME


def receivers(ends: Iterable[Ends | FarEnds]) -> list[socket.socket]:
    """Return the receiving sockets on this host."""
    return [each.receiver for each in ends if isinstance(each, Ends)]


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
class Train:
    """Full frames on their way over one link, sent as fast as the link takes them.

    Several frames go to the kernel in one piece, which it cuts up before the wire: frame by frame a host under load
    would measure itself at high rates.
    """

    pair: Pair
    link: Link
    """The link with the lowest rate on the way."""
    late: bool
    """Whether that is the downlink's: packets meet it after the kernel has noted their arrival."""
    source: Ends | FarEnds
    destination: Ends | FarEnds
    frame: int
    frames: int
    together: int
    """Frames handed to the kernel in one piece, which the link's rate lets pass at once: one on all but fast links."""
    sent: int = 0
    stamps: dict[int, float] = field(default_factory=dict)
    """Seconds of arrival by the frame's number."""

    @property
    def frame_seconds(self) -> float:
        """Return the seconds that a frame takes at the link's rate."""
        return self.link.transmission_time(self.frame)

    @property
    def seconds(self) -> float:
        """Return the seconds within which all frames that are not lost have arrived."""
        return (2 * self.frames + 1) * self.frame_seconds + longest_delay(self.link) + 0.2

    @property
    def quiet(self) -> float:
        """Return the seconds without an arrival after which no further frame arrives."""
        return longest_delay(self.link) + 0.1 + 10 * self.frame_seconds

    @property
    def done(self) -> bool:
        """Return whether the last frame has arrived, or arrives at another host."""
        return isinstance(self.destination, FarEnds) or self.frames - 1 in self.stamps

    def open(self) -> None:
        """Prepare the sending socket, if it is on this host."""
        if isinstance(self.source, Ends):
            # As much as the queue before the link holds may be sent ahead; more would be lost there.
            buffer = int(0.6 * queue_limit(self.link)) * BUFFER_PER_FRAME
            self.source.sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
            self.source.sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, self.frame - HEADERS)

    def close(self) -> None:
        """Let the sending socket send single datagrams again."""
        if isinstance(self.source, Ends):
            self.source.sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, 0)

    def send(self, run: bytes, index: int) -> bool:
        """Send as many frames as the socket takes; return whether frames are left to send from this host."""
        if isinstance(self.source, FarEnds):
            return False
        size = self.frame - HEADERS
        most = min(self.frames, self.sent + _AT_ONCE) if self.late else self.frames
        while self.sent < most:
            following = range(self.sent, min(self.frames, self.sent + self.together))
            piece = b"".join(CONTENT.pack(run, index, number, 0.0).ljust(size, b"\0") for number in following)
            if not self.source.send(piece, self.destination.target):
                break
            self.sent = following.stop
        return self.sent < self.frames

    def receive(self, number: int, kernel_stamp: float) -> None:
        """Note the arrival of a frame."""
        self.stamps[number] = time.monotonic() if self.late else kernel_stamp

    def rate(self) -> float | None:
        """Return bit/s on the wire, without the frames that the bucket let through at once; None if too few arrived."""
        assert self.link.rate
        skipped = _unmetered(self.link.rate, self.frame)
        counted = sorted(number for number in self.stamps if number >= skipped)
        if len(counted) < 2:
            return None
        spacing = self._spacing(counted, [self.stamps[number] for number in counted])
        return self.frame * 8 / spacing if spacing > 0 else None

    def _spacing(self, numbers: Sequence[int], times: Sequence[float]) -> float:
        """Return the seconds between two frames."""
        if self.late:
            # Frames that were lost never came to the downlink, so arrivals are counted, whatever their numbers.
            return slope_below(sorted(times))
        if self.link.jitter or self.link.reorder:
            # Of packets that each had a delay of its own, two alone say too little.
            return statistics.linear_regression(numbers, times).slope
        return (times[-1] - times[0]) / (numbers[-1] - numbers[0])


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


def make_train(pair: Pair, link: Link, late: bool, ends: Mapping[str, Ends | FarEnds]) -> Train:
    """Return a train for a link; its frames are small on a slow link, so that it ends in time."""
    rate = link.rate
    assert rate
    source, destination = ends[pair[0]], ends[pair[1]]
    largest = min(source.frame, destination.frame)
    frame = int(min(largest, max(SMALL_FRAME, rate / 8 * _MOST_SECONDS / _FEWEST_FRAMES)))
    frames = int(min(MOST_FRAMES, max(_FEWEST_FRAMES, rate / 8 * _TRAIN_SECONDS / frame)))
    together = max(1, min(40, burst(rate) // FRAME // 2))
    return Train(pair, link, late, source, destination, frame, _unmetered(rate, frame) + frames, together)


def seconds(trains: Iterable[Train]) -> float:
    """Return the seconds within which trains that are sent together have arrived."""
    return max(train.seconds for train in trains)


def rates(trains: Sequence[Train], run: bytes | None = None) -> dict[Pair, float | None]:
    """Send these trains, whose links share no device; return bit/s by link, None where too few frames arrived.

    A train from or to another host is sent or received there; ``run`` is then the same on both hosts.
    """
    for train in trains:
        train.open()
    _exchange(trains, run or os.urandom(8))
    for train in trains:
        train.close()
    # A bucket that the last frame has emptied delays no further packet after this.
    time.sleep(max(train.frame_seconds for train in trains))
    return {train.pair: train.rate() for train in trains}


def _exchange(trains: Sequence[Train], run: bytes) -> None:
    """Send and receive until all frames have arrived, or none arrives any more."""
    deadline = time.monotonic() + seconds(trains)
    quiet = max(train.quiet for train in trains)
    last_heard = time.monotonic() + 0.2  # another host may begin a little later
    with Listener(receivers(train.destination for train in trains)) as listener:
        while (now := time.monotonic()) < deadline:
            pause = _send(trains, run)
            if pause is None and (now > last_heard + quiet or all(train.done for train in trains)):
                break
            for receiver in listener.ready(0.02 if pause is None else pause):
                last_heard = time.monotonic()
                _note_arrivals(receiver, run, trains)


def _send(trains: Sequence[Train], run: bytes) -> float | None:
    """Send as much of each train as its socket takes; return for how many seconds to listen, None if all is sent."""
    left = [train.send(run, index) for index, train in enumerate(trains)]
    if not any(left):
        return None
    return 0.0 if any(train.late for train in trains) else 0.002


def _note_arrivals(receiver: socket.socket, run: bytes, trains: Sequence[Train]) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(256):
            data, ancillary, _, _ = receiver.recvmsg(FRAME, 64)
            if len(data) >= CONTENT.size and data.startswith(run):
                _, index, number, _ = CONTENT.unpack_from(data)
                trains[index].receive(number, _kernel_stamp(ancillary))


def _kernel_stamp(ancillary: Iterable[tuple[int, int, bytes]]) -> float:
    """Return the seconds at which the kernel received a packet."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            whole, nanoseconds = struct.unpack_from("=qq", value)
            return float(whole + nanoseconds * 1e-9)
    raise ValueError("the kernel gave no time stamp")
