"""Rate measurement by trains of full frames, with the kernel's arrival times."""

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
"""Size of the Ethernet, IP and UDP headers in bytes."""
CONTENT = struct.Struct("=8sIId")
"""Content of each datagram: measurement, link index, number, and sending time in seconds."""
SMALL_FRAME = HEADERS + CONTENT.size
"""Size in bytes of a frame without padding."""
BUFFER_PER_FRAME = 2304
"""Kernel memory charged to a socket for a full frame, in bytes: the packet with its descriptor (``truesize``)."""
MOST_FRAMES = 4000
"""Maximum number of frames in transit to one socket."""
SO_TIMESTAMPNS = 35
"""Constant of asm-generic/socket.h, which Python's `socket` lacks."""
ETHERNET = 14
"""Size of the Ethernet header in bytes."""
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
"""Constants of linux/sockios.h."""
_SO_RCVBUFFORCE = 33
"""Constant of asm-generic/socket.h: sets a receive buffer above the host's limit, net.core.rmem_max."""
_TRAIN_SECONDS = 0.12
"""Duration of a train on a fast link, in seconds."""
_MOST_SECONDS = 1.0
"""Maximum duration of the smallest train over a slow link, in seconds; its frames are smaller."""
_FEWEST_FRAMES = 24
"""Minimum number of frames of a train."""
_AT_ONCE = 64
"""Number of frames sent to a downlink between two checks for arrivals, which have no earlier time stamp."""
_SO_SNDBUFFORCE, _UDP_SEGMENT = 32, 103
"""Constants of asm-generic/socket.h and linux/udp.h: a send buffer above the limit, and the size of the datagrams into
which the kernel divides a piece."""


@dataclass(frozen=True)
class Site:
    """The location of one end of a link."""

    namespace: Namespace | None
    """Namespace of the device; None on another host."""
    address: str
    uplink: float | None = None
    downlink: float | None = None


@dataclass(frozen=True)
class Ends:
    """The measurement sockets of one device on this host."""

    sender: socket.socket
    receiver: socket.socket
    frame: int
    """Size of the device's largest Ethernet frame in bytes."""

    @property
    def target(self) -> tuple[str, int]:
        """Address of the receiver."""
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
    """The receiver's address of a device on another host."""

    target: tuple[str, int]
    frame: int = FRAME


def receiving_sockets(ends: Iterable[Ends | FarEnds]) -> list[socket.socket]:
    """Return the receiving sockets of the devices on this host."""
    receivers = []
    for device_ends in ends:
        if isinstance(device_ends, Ends):
            receivers.append(device_ends.receiver)
    return receivers


@contextlib.contextmanager
def open_sockets(
    sites: Mapping[str, Site], names: Iterable[str]
) -> Iterator[dict[str, Ends]]:
    """Open a sending and a receiving socket in each device."""
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in sorted(names):
            site = sites[name]
            assert site.namespace is not None
            ends[name] = site.namespace.run(partial(_open_ends, site.address))
            stack.enter_context(ends[name].sender)
            stack.enter_context(ends[name].receiver)
        yield ends


def _open_ends(address: str) -> Ends:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for endpoint in (sender, receiver):
        endpoint.bind((address, 0))
        endpoint.setblocking(False)
    # The whole train must fit, should this process not run for a while.
    buffer = 2 * MOST_FRAMES * BUFFER_PER_FRAME
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer)
    receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return Ends(sender, receiver, _largest_frame(sender, address))


def _largest_frame(link: socket.socket, address: str) -> int:
    """Return the size in bytes of the largest frame of the interface with an address: smaller in a VXLAN."""
    wanted = socket.inet_aton(address)
    for _, name in socket.if_nameindex():
        # struct ifreq: a name of 16 bytes, then the address (in a sockaddr, from byte 20) or the MTU.
        request = struct.pack("16s24x", name.encode())
        with contextlib.suppress(OSError):  # the interface has no address
            if fcntl.ioctl(link, _SIOCGIFADDR, request)[20:24] != wanted:
                continue
            answer = fcntl.ioctl(link, _SIOCGIFMTU, request)
            mtu: int = struct.unpack_from("=i", answer, 16)[0]
            return min(FRAME, mtu + ETHERNET)
    return FRAME


class Listener:
    """A wait for several sockets with a resolution of microseconds, which epoll alone lacks."""

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
        """Wait at most ``seconds``; return the sockets with received data."""
        # The descriptor of epoll is readable once one of its sockets is.
        select.select([self._epoll.fileno()], [], [], max(0.0, seconds))
        return [self._receivers[descriptor] for descriptor, _ in self._epoll.poll(0)]


@dataclass
class Train:
    """Full frames sent over one link at the link's full rate.

    Several frames go to the kernel in one piece, which splits it before the wire: sending frame by frame, a loaded host
    would measure itself at high rates.
    """

    pair: Pair
    link: Link
    """The link with the lowest rate on the way."""
    is_bound_by_downlink: bool
    """Whether the downlink has the lowest rate: it delays packets after the kernel has recorded their arrival."""
    source: Ends | FarEnds
    destination: Ends | FarEnds
    frame: int
    frames: int
    together: int
    """Number of frames per piece, which the link's bucket releases at once: one, except on fast links."""
    sent: int = 0
    stamps: dict[int, float] = field(default_factory=dict)
    """Arrival times in seconds by frame number."""

    @property
    def frame_seconds(self) -> float:
        """Transmission time of a frame at the link's rate, in seconds."""
        return self.link.transmission_time(self.frame)

    @property
    def seconds(self) -> float:
        """Time until all frames have arrived, in seconds."""
        return (
            (2 * self.frames + 1) * self.frame_seconds + longest_delay(self.link) + 0.2
        )

    @property
    def quiet(self) -> float:
        """Silence after which no further frame will arrive, in seconds."""
        return longest_delay(self.link) + 0.1 + 10 * self.frame_seconds

    @property
    def done(self) -> bool:
        """Whether the last frame has arrived, or arrives at another host."""
        return isinstance(self.destination, FarEnds) or self.frames - 1 in self.stamps

    def open(self) -> None:
        """Configure the sending socket; does nothing for a sender on another host."""
        if isinstance(self.source, Ends):
            sender = self.source.sender
            # Limit the data sent ahead to the queue of the link, which would drop more. The kernel doubles the value.
            buffer = int(0.6 * queue_limit(self.link)) * BUFFER_PER_FRAME
            sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
            sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, self.frame - HEADERS)

    def close(self) -> None:
        """Restore the sending socket for single datagrams."""
        if isinstance(self.source, Ends):
            self.source.sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, 0)

    def send(self, run: bytes, index: int) -> bool:
        """Send as many frames as the socket accepts; return whether frames remain for a sender on this host."""
        if isinstance(self.source, FarEnds):
            return False
        size = self.frame - HEADERS
        last_frame = self.frames
        if self.is_bound_by_downlink:
            last_frame = min(self.frames, self.sent + _AT_ONCE)
        while self.sent < last_frame:
            end = min(self.frames, self.sent + self.together)
            piece = b""
            for number in range(self.sent, end):
                piece += CONTENT.pack(run, index, number, 0.0).ljust(size, b"\0")
            # The socket is full until the link has carried some of its frames.
            if not self.source.send(piece, self.destination.target):
                break
            self.sent = end
        return self.sent < self.frames

    def receive(self, number: int, kernel_stamp: float) -> None:
        """Record the arrival of a frame."""
        now = time.monotonic()
        self.stamps[number] = now if self.is_bound_by_downlink else kernel_stamp

    def rate(self) -> float | None:
        """Return the rate on the wire in bit/s, without the initial burst; None if too few frames arrived."""
        assert self.link.rate
        skipped = _burst_frames(self.link.rate, self.frame)
        numbers = []
        times = []
        for number, stamp in sorted(self.stamps.items()):
            if number >= skipped:
                numbers.append(number)
                times.append(stamp)
        if len(numbers) < 2:
            return None
        spacing = self._spacing(numbers, times)
        return self.frame * 8 / spacing if spacing > 0 else None

    def _spacing(self, numbers: Sequence[int], times: Sequence[float]) -> float:
        """Return the time between two frames in seconds."""
        if self.is_bound_by_downlink:
            # Lost frames never reached the downlink, so arrivals count regardless of their numbers.
            return slope_below(sorted(times))
        if self.link.jitter or self.link.reorder:
            # With individual delays, two packets alone are too inaccurate.
            return statistics.linear_regression(numbers, times).slope
        return (times[-1] - times[0]) / (numbers[-1] - numbers[0])


def slope_below(times: Sequence[float]) -> float:
    """Return the time from one arrival to the next in seconds, given at least two recorded arrivals.

    An arrival may be recorded late, never early, because this process also sends and may lose the processor. The true
    arrivals are on a line below all points. The edge of the lower convex hull under the middle is that line unless half
    of the arrivals were recorded late.

    >>> slope_below([0.0, 1.0, 2.7, 3.0, 4.5, 5.0])
    1.0
    """
    hull: list[int] = []
    for index in range(len(times)):
        while len(hull) > 1 and _turns_down(times, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(index)
    middle = (len(times) - 1) / 2
    right = 0
    while hull[right] <= middle:
        right += 1
    first = hull[right - 1]
    last = hull[right]
    return (times[last] - times[first]) / (last - first)


def _turns_down(times: Sequence[float], first: int, second: int, third: int) -> bool:
    """Return whether the second point is on or above the line from the first to the third."""
    # Slopes compared without a division.
    rise = times[second] - times[first]
    run = second - first
    return rise * (third - first) >= (times[third] - times[first]) * run


def _burst_frames(rate: float, frame: int) -> int:
    """Return the number of initial frames to ignore: twice the content of a full bucket."""
    return 2 * burst(rate) // frame + 2


def make_train(
    pair: Pair,
    link: Link,
    ends: Mapping[str, Ends | FarEnds],
    *,
    is_bound_by_downlink: bool,
) -> Train:
    """Return a train for a link; a slow link gets small frames, for a bounded duration."""
    rate = link.rate
    assert rate
    source = ends[pair[0]]
    destination = ends[pair[1]]
    largest = min(source.frame, destination.frame)
    # The size in bytes at which the fewest frames of a train take the longest permitted time.
    affordable = rate / 8 * _MOST_SECONDS / _FEWEST_FRAMES
    frame = int(min(largest, max(SMALL_FRAME, affordable)))
    frames = rate / 8 * _TRAIN_SECONDS / frame
    frames = int(min(MOST_FRAMES, max(_FEWEST_FRAMES, frames)))
    frames += _burst_frames(rate, frame)
    # At most half of the bucket, which releases them at once; 40 full frames are below the 64 KiB of one datagram.
    together = max(1, min(40, burst(rate) // FRAME // 2))
    return Train(
        pair,
        link,
        is_bound_by_downlink,
        source,
        destination,
        frame,
        frames,
        together,
    )


def longest_seconds(trains: Iterable[Train]) -> float:
    """Return the duration of concurrent trains, in seconds."""
    return max(train.seconds for train in trains)


def measure_rates(
    trains: Sequence[Train], run: bytes | None = None
) -> dict[Pair, float | None]:
    """Send trains whose links share no device; return the rate of each link in bit/s, None with too few arrivals.

    Another host sends or receives the remote end of a train; ``run`` is then common to both hosts.
    """
    for train in trains:
        train.open()
    _run_trains(trains, run or os.urandom(8))
    for train in trains:
        train.close()
    # Wait until the bucket emptied by the last frame no longer delays other packets.
    time.sleep(max(train.frame_seconds for train in trains))
    return {train.pair: train.rate() for train in trains}


def _run_trains(trains: Sequence[Train], run: bytes) -> None:
    """Send and receive until all frames have arrived, or no more arrive."""
    deadline = time.monotonic() + longest_seconds(trains)
    quiet = max(train.quiet for train in trains)
    last_heard = time.monotonic() + 0.2  # another host may begin slightly later
    receivers = receiving_sockets(train.destination for train in trains)
    with Listener(receivers) as listener:
        while True:
            now = time.monotonic()
            if now >= deadline:
                break
            pause = _send_pieces(trains, run)
            if pause is None:
                if now > last_heard + quiet or all(train.done for train in trains):
                    break
                pause = 0.02
            for receiver in listener.ready(pause):
                last_heard = time.monotonic()
                _note_arrivals(receiver, run, trains)


def _send_pieces(trains: Sequence[Train], run: bytes) -> float | None:
    """Send a piece of each train; return the time to listen in seconds, None when all is sent."""
    # Every train sends, so this is no generator that ends at the first train with frames left.
    has_left = [train.send(run, index) for index, train in enumerate(trains)]
    if not any(has_left):
        return None
    # Arrivals over a downlink are stamped here, so this process must not sleep.
    if any(train.is_bound_by_downlink for train in trains):
        return 0.0
    return 0.002


def _note_arrivals(
    receiver: socket.socket, run: bytes, trains: Sequence[Train]
) -> None:
    with contextlib.suppress(BlockingIOError):
        # At most so many before the trains send again.
        for _ in range(256):
            data, ancillary, _, _ = receiver.recvmsg(FRAME, 64)
            # Other datagrams, and late frames of an earlier measurement, are ignored.
            if len(data) >= CONTENT.size and data.startswith(run):
                _, index, number, _ = CONTENT.unpack_from(data)
                trains[index].receive(number, _kernel_stamp(ancillary))


def _kernel_stamp(ancillary: Iterable[tuple[int, int, bytes]]) -> float:
    """Return the kernel's arrival time of a packet in seconds."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            whole, nanoseconds = struct.unpack_from("=qq", value)
            return float(whole + nanoseconds * 1e-9)
    raise ValueError("the kernel provided no time stamp")
