"""Rate measurement by packet trains: many frames sent over a link without pauses between them.

At the receiver, the frames of a train arrive at the rate of the link. The kernel records their arrival times.
"""

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
from testbed.wire.framing import ETHERNET_HEADER
from testbed_controller.shaping.namespaces import Namespace
from testbed_controller.shaping.plan import FRAME, burst, queue_limit

HEADERS = 42
"""Size of the Ethernet, IP and UDP headers in bytes."""
CONTENT = struct.Struct("=8sIId")
"""Content of each datagram: identifier of the measurement (8 bytes), link index, packet number, and sending time on the
monotonic clock in seconds."""
SMALL_FRAME = HEADERS + CONTENT.size
"""Size in bytes of a frame without padding."""
BUFFER_PER_FRAME = 2304
"""Kernel memory charged to a socket for a full frame, in bytes: the packet with its descriptor (``truesize``)."""
MOST_FRAMES = 4000
"""Maximum number of frames in transit to one socket."""
SO_TIMESTAMPNS = 35
"""Constant of asm-generic/socket.h, which Python's `socket` lacks."""
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
"""Constants of linux/sockios.h."""
_SO_RCVBUFFORCE = 33
"""Constant of asm-generic/socket.h: sets a receive buffer above the host's limit, net.core.rmem_max."""
_TRAIN_SECONDS = 0.12
"""Duration of a train on a fast link, in seconds."""
_MOST_SECONDS = 1.0
"""Maximum duration of a train over a slow link, in seconds; for this, the frames of the train are smaller."""
_FEWEST_FRAMES = 24
"""Minimum number of frames of a train, beside those that a full bucket releases."""
_AT_ONCE = 64
"""Number of frames sent to a downlink between two checks for arrivals, whose time stamp is the time of the check."""
_SO_SNDBUFFORCE, _UDP_SEGMENT = 32, 103
"""Constants of asm-generic/socket.h and linux/udp.h: set a send buffer above the host's limit, and the size of the
datagrams into which the kernel divides a large one."""


@dataclass(frozen=True)
class ProbedDevice:
    """A device at one end of a measured link."""

    namespace: Namespace | None
    """Network namespace of the device; None on another host."""
    address: str
    uplink: float | None = None
    """Limit of all sent data in bit/s; None is unlimited."""
    downlink: float | None = None
    """Limit of all received data in bit/s; None is unlimited."""


@dataclass(frozen=True)
class ProbeSockets:
    """The measurement sockets of one device on this host."""

    sender: socket.socket
    receiver: socket.socket
    largest_frame: int
    """Size of the device's largest Ethernet frame in bytes."""

    @property
    def target(self) -> tuple[str, int]:
        """Address and port of the receiver."""
        address: tuple[str, int] = self.receiver.getsockname()
        return address

    def send(self, content: bytes, target: tuple[str, int]) -> bool:
        """Send a datagram to the receiver of another device; return False if the socket's buffer is full."""
        try:
            self.sender.sendto(content, target)
        except BlockingIOError:
            return False
        return True


@dataclass(frozen=True)
class RemoteReceiver:
    """The address of the receiving socket of a device on another host."""

    target: tuple[str, int]
    largest_frame: int = FRAME


def receiving_sockets(
    ends: Iterable[ProbeSockets | RemoteReceiver],
) -> list[socket.socket]:
    """Return the receiving sockets of the devices on this host."""
    receivers = []
    for end in ends:
        if isinstance(end, ProbeSockets):
            receivers.append(end.receiver)
    return receivers


@contextlib.contextmanager
def open_sockets(
    devices: Mapping[str, ProbedDevice], names: Iterable[str]
) -> Iterator[dict[str, ProbeSockets]]:
    """Open a sending and a receiving socket in the namespace of each named device; they are closed at the end."""
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in sorted(names):
            device = devices[name]
            assert device.namespace is not None
            ends[name] = device.namespace.run(partial(_open_pair, device.address))
            stack.enter_context(ends[name].sender)
            stack.enter_context(ends[name].receiver)
        yield ends


def _open_pair(address: str) -> ProbeSockets:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for endpoint in (sender, receiver):
        endpoint.bind((address, 0))
        endpoint.setblocking(False)
    # The whole train must fit, should this process not run for a while.
    buffer = 2 * MOST_FRAMES * BUFFER_PER_FRAME
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer)
    receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return ProbeSockets(sender, receiver, _largest_frame(sender, address))


def _largest_frame(control: socket.socket, address: str) -> int:
    """Return the size in bytes of the largest frame of the interface with an address: smaller in a VXLAN.

    ``control`` is any socket in the namespace of the interface.
    """
    wanted = socket.inet_aton(address)
    for _, name in socket.if_nameindex():
        # struct ifreq: a name of 16 bytes, then the address (in a sockaddr, from byte 20) or the MTU.
        request = struct.pack("16s24x", name.encode())
        with contextlib.suppress(OSError):  # the interface has no address
            if fcntl.ioctl(control, _SIOCGIFADDR, request)[20:24] != wanted:
                continue
            answer = fcntl.ioctl(control, _SIOCGIFMTU, request)
            mtu: int = struct.unpack_from("=i", answer, 16)[0]
            return min(FRAME, mtu + ETHERNET_HEADER)
    return FRAME


class Listener:
    """A wait for data on several sockets with a resolution of microseconds, which epoll alone lacks."""

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
    """The frames sent over one link without pauses, and their arrivals.

    A piece is several frames passed to the kernel in one call, which divides them before the wire. If each frame took a
    call of its own, the processor of a loaded host would limit high rates.
    """

    pair: Pair
    link: Link
    """The link with the lowest rate on the way."""
    is_bound_by_downlink: bool
    """Whether the downlink has the lowest rate: it delays packets after the kernel has recorded their arrival."""
    source: ProbeSockets | RemoteReceiver
    destination: ProbeSockets | RemoteReceiver
    frame_bytes: int
    frame_count: int
    frames_per_piece: int
    """One, except on fast links. HTB releases a piece at once, from the bucket of the link (`plan.burst`)."""
    sent_count: int = 0
    """Number of frames sent so far."""
    arrivals: dict[int, float] = field(default_factory=dict)
    """Arrival times in seconds by frame number."""

    @property
    def frame_seconds(self) -> float:
        """Transmission time of a frame at the link's rate, in seconds."""
        return self.link.transmission_time(self.frame_bytes)

    @property
    def seconds(self) -> float:
        """Maximum time until all frames have arrived, in seconds: twice the transmission time, and a margin."""
        return (
            (2 * self.frame_count + 1) * self.frame_seconds
            + longest_delay(self.link)
            + 0.2
        )

    @property
    def quiet_seconds(self) -> float:
        """Silence after which no further frame will arrive, in seconds."""
        return longest_delay(self.link) + 0.1 + 10 * self.frame_seconds

    @property
    def is_complete(self) -> bool:
        """Whether the last frame has arrived; also True if the receiver is on another host."""
        return (
            isinstance(self.destination, RemoteReceiver)
            or self.frame_count - 1 in self.arrivals
        )

    def open(self) -> None:
        """Configure the sending socket; does nothing for a sender on another host."""
        if isinstance(self.source, ProbeSockets):
            sender = self.source.sender
            # Limit the data sent ahead to the queue of the link, which would drop more. The kernel doubles the value.
            buffer = int(0.6 * queue_limit(self.link)) * BUFFER_PER_FRAME
            sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
            sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, self.frame_bytes - HEADERS)

    def close(self) -> None:
        """Restore the sending socket for single datagrams."""
        if isinstance(self.source, ProbeSockets):
            self.source.sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, 0)

    def send(self, measurement_id: bytes, index: int) -> bool:
        """Send as many frames as the socket accepts; return whether frames remain for a sender on this host."""
        if isinstance(self.source, RemoteReceiver):
            return False
        size = self.frame_bytes - HEADERS
        stop = self.frame_count
        if self.is_bound_by_downlink:
            stop = min(self.frame_count, self.sent_count + _AT_ONCE)
        while self.sent_count < stop:
            end = min(self.frame_count, self.sent_count + self.frames_per_piece)
            piece = b""
            for number in range(self.sent_count, end):
                # The sending time is unused: a rate needs only the times of arrival.
                content = CONTENT.pack(measurement_id, index, number, 0.0)
                piece += content.ljust(size, b"\0")
            # The socket is full until the link has carried some of its frames.
            if not self.source.send(piece, self.destination.target):
                break
            self.sent_count = end
        return self.sent_count < self.frame_count

    def record_arrival(self, number: int, kernel_stamp: float) -> None:
        """Record the arrival time of a frame."""
        now = time.monotonic()
        self.arrivals[number] = now if self.is_bound_by_downlink else kernel_stamp

    def rate(self) -> float | None:
        """Return the rate on the wire in bit/s, without the initial burst; None if too few frames arrived."""
        assert self.link.rate
        skipped = _burst_frames(self.link.rate, self.frame_bytes)
        numbers = []
        times = []
        for number, stamp in sorted(self.arrivals.items()):
            if number >= skipped:
                numbers.append(number)
                times.append(stamp)
        if len(numbers) < 2:
            return None
        spacing = self._spacing(numbers, times)
        return self.frame_bytes * 8 / spacing if spacing > 0 else None

    def _spacing(self, numbers: Sequence[int], times: Sequence[float]) -> float:
        """Return the time between two frames in seconds."""
        if self.is_bound_by_downlink:
            # Lost frames never reached the downlink, so arrivals count regardless of their numbers.
            return slope_below(sorted(times))
        if self.link.jitter or self.link.reorder:
            # Packets have individual delays, so the first and the last one alone would be too inaccurate.
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
    """Return the number of initial frames to ignore in a rate: twice as many as a full bucket releases at once."""
    return 2 * burst(rate) // frame + 2


def make_train(
    pair: Pair,
    link: Link,
    ends: Mapping[str, ProbeSockets | RemoteReceiver],
    *,
    is_bound_by_downlink: bool,
) -> Train:
    """Return a train for a link; a slow link gets small frames, for a bounded duration."""
    rate = link.rate
    assert rate
    source = ends[pair[0]]
    destination = ends[pair[1]]
    largest = min(source.largest_frame, destination.largest_frame)
    # The size in bytes at which the fewest frames of a train take the longest permitted time.
    affordable = rate / 8 * _MOST_SECONDS / _FEWEST_FRAMES
    frame = int(min(largest, max(SMALL_FRAME, affordable)))
    wanted_frames = rate / 8 * _TRAIN_SECONDS / frame
    frame_count = int(min(MOST_FRAMES, max(_FEWEST_FRAMES, wanted_frames)))
    frame_count += _burst_frames(rate, frame)
    # At most half of the bucket, which releases them at once; 40 full frames are below the 64 KiB of one datagram.
    frames_per_piece = max(1, min(40, burst(rate) // FRAME // 2))
    return Train(
        pair,
        link,
        is_bound_by_downlink=is_bound_by_downlink,
        source=source,
        destination=destination,
        frame_bytes=frame,
        frame_count=frame_count,
        frames_per_piece=frames_per_piece,
    )


def longest_seconds(trains: Iterable[Train]) -> float:
    """Return the duration of concurrent trains, in seconds."""
    return max(train.seconds for train in trains)


def measure_rates(
    trains: Sequence[Train], measurement_id: bytes | None = None
) -> dict[Pair, float | None]:
    """Send trains whose links share no device; return the rate of each link in bit/s, None with too few arrivals.

    If one end of a train is on another host, both hosts call this function with the same ``measurement_id`` of 8 bytes.
    """
    for train in trains:
        train.open()
    _exchange_frames(trains, measurement_id or os.urandom(8))
    for train in trains:
        train.close()
    # Wait until the bucket emptied by the last frame no longer delays other packets.
    time.sleep(max(train.frame_seconds for train in trains))
    return {train.pair: train.rate() for train in trains}


def _exchange_frames(trains: Sequence[Train], measurement_id: bytes) -> None:
    """Send and receive until all frames have arrived, or no further frames arrive."""
    deadline = time.monotonic() + longest_seconds(trains)
    quiet_seconds = max(train.quiet_seconds for train in trains)
    last_heard = time.monotonic() + 0.2  # another host may begin slightly later
    receivers = receiving_sockets(train.destination for train in trains)
    with Listener(receivers) as listener:
        while True:
            now = time.monotonic()
            if now >= deadline:
                break
            pause = _send_pieces(trains, measurement_id)
            if pause is None:
                has_all = all(train.is_complete for train in trains)
                if has_all or now > last_heard + quiet_seconds:
                    break
                pause = 0.02
            for receiver in listener.ready(pause):
                last_heard = time.monotonic()
                _note_arrivals(receiver, measurement_id, trains)


def _send_pieces(trains: Sequence[Train], measurement_id: bytes) -> float | None:
    """Send frames of each train; return the time to listen in seconds, None after the last frame of all trains."""
    has_unsent_frames = False
    for index, train in enumerate(trains):
        has_unsent_frames |= train.send(measurement_id, index)
    if not has_unsent_frames:
        return None
    # Arrivals over a downlink are stamped here, so this process must not sleep.
    if any(train.is_bound_by_downlink for train in trains):
        return 0.0
    return 0.002


def _note_arrivals(
    receiver: socket.socket, measurement_id: bytes, trains: Sequence[Train]
) -> None:
    with contextlib.suppress(BlockingIOError):
        # A limited number, so that the trains send again soon.
        for _ in range(256):
            data, ancillary, _, _ = receiver.recvmsg(FRAME, 64)
            # Other datagrams, and late frames of an earlier measurement, are ignored.
            if len(data) >= CONTENT.size and data.startswith(measurement_id):
                _, index, number, _ = CONTENT.unpack_from(data)
                trains[index].record_arrival(number, _kernel_stamp(ancillary))


def _kernel_stamp(ancillary: Iterable[tuple[int, int, bytes]]) -> float:
    """Return the kernel's arrival time of a packet in seconds."""
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            whole, nanoseconds = struct.unpack_from("=qq", value)
            return float(whole + nanoseconds * 1e-9)
    raise ValueError("the kernel provided no time stamp")
