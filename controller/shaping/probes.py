"""Measures links by packets between sockets inside the devices' own namespaces: one clock, no help of agents.

Delay and loss are measured on every link at once, with small packets that are too few to fill any queue. Rates
are measured on one link of each kind (equal in all that was asked of it), one after another where links share a
device, by a short train of full frames; the times of those are the kernel's, as the frames come off the wire.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import statistics
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from controller.shaping import tolerance
from controller.shaping.namespaces import Namespace
from controller.shaping.plan import FRAME, burst, queue_limit
from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement

_HEADERS = 42
"""Bytes of Ethernet, IP and UDP before a datagram's content."""
_CONTENT = struct.Struct("=8sIId")
_SMALL_FRAME = _HEADERS + _CONTENT.size
_DELAY_PACKETS = 30
_FEWEST_PACKETS = 10
_PACKETS_PER_SECOND = 2500
"""Of all links together: more would make the measurement a load on the host of its own."""
_MOST_SECONDS = 1.0
_TRAIN_SECONDS = 0.12
_FEWEST_FRAMES, _MOST_FRAMES = 24, 4000
_ATTEMPTS = 3
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _SO_TIMESTAMPNS, _UDP_SEGMENT = 33, 32, 35, 103
_BUFFER_PER_FRAME = 2304
"""What the kernel charges to a socket for a full frame."""


@dataclass(frozen=True)
class Site:
    """Where one end of a link is."""

    namespace: Namespace
    address: str


@dataclass
class _Tally:
    """What was seen of one link."""

    pair: Pair
    link: Link
    packets: int
    sent: int = 0
    delays: dict[int, float] = field(default_factory=dict)
    rate: float | None = None

    def measurement(self) -> LinkMeasurement:
        delay = statistics.median(self.delays.values()) if self.delays else None
        lost = self.sent - len(self.delays)
        return LinkMeasurement(
            *self.pair,
            requested=self.link,
            rate=self.rate,
            delay=delay,
            loss=lost / self.sent if self.sent else None,
            packets=self.sent,
            problem=tolerance.problem(self.link, self.rate, delay, self.sent, lost),
        )


def measure(links: Mapping[Pair, Link], sites: Mapping[str, Site]) -> list[LinkMeasurement]:
    """Measure these links; what is outside its tolerance is measured again, since a host may stumble once.

    ``sites`` holds every device that the pairs name. The measurements come in the order of ``links``.
    """
    results: dict[Pair, LinkMeasurement] = {}
    representatives = set(_one_of_each(links))
    wanted = dict(links)
    for _ in range(_ATTEMPTS):
        for result in _measure_once(wanted, sites, representatives):
            results[result.source, result.destination] = result
        wanted = {pair: link for pair, link in wanted.items() if results[pair].problem}
        if not wanted:
            break
    return [results[pair] for pair in links]


def _one_of_each(links: Mapping[Pair, Link]) -> list[Pair]:
    """Return the first link of every kind."""
    kinds: dict[Link, Pair] = {}
    for pair, link in links.items():
        kinds.setdefault(link, pair)
    return list(kinds.values())


def _measure_once(
    links: Mapping[Pair, Link], sites: Mapping[str, Site], representatives: set[Pair]
) -> list[LinkMeasurement]:
    tallies = [_Tally(pair, link, _packets(link, len(links), pair in representatives)) for pair, link in links.items()]
    with _sockets(sites, {name for pair in links for name in pair}) as ends:
        _measure_delays(tallies, ends)
        rated = [tally for tally in tallies if tally.link.up and tally.link.rate and tally.pair in representatives]
        for together in rounds([tally.pair for tally in rated]):
            _measure_rates([tally for tally in rated if tally.pair in together], ends)
    return [tally.measurement() for tally in tallies]


def rounds(pairs: Sequence[Pair]) -> list[set[Pair]]:
    """Split links so that those of one round share no device."""
    made: list[tuple[set[Pair], set[str]]] = []
    for pair in pairs:
        for members, busy in made:
            if not busy & set(pair):
                members.add(pair)
                busy.update(pair)
                break
        else:
            made.append(({pair}, set(pair)))
    return [members for members, _ in made]


def _gap(link: Link) -> float:
    """Return the shortest time between small packets that leaves the link half idle."""
    return 2 * link.transmission_time(_SMALL_FRAME)


def _packets(link: Link, links: int, representative: bool) -> int:
    """Return how many small packets a link is given."""
    fair = int(_PACKETS_PER_SECOND * _MOST_SECONDS / links)
    count = max(_FEWEST_PACKETS, min(_DELAY_PACKETS, fair))
    if link.up and link.loss and representative:
        # Thirty packets lost bound the loss to about half of itself.
        count = max(count, min(2000, round(30 / link.loss)))
    if link.rate:
        count = min(count, max(_FEWEST_PACKETS, int(_MOST_SECONDS / _gap(link))))
    return count


@dataclass(frozen=True)
class _Ends:
    sender: socket.socket
    receiver: socket.socket


@contextlib.contextmanager
def _sockets(sites: Mapping[str, Site], names: Iterable[str]) -> Iterator[dict[str, _Ends]]:
    """Open a sending and a receiving socket on a port of their own in each device."""
    with contextlib.ExitStack() as stack:
        ends = {}
        for name in sorted(names):
            site = sites[name]
            ends[name] = site.namespace.run(lambda site=site: _open(site.address))  # type: ignore[misc]
            stack.enter_context(ends[name].sender)
            stack.enter_context(ends[name].receiver)
        yield ends


def _open(address: str) -> _Ends:
    sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for each in (sender, receiver):
        each.bind((address, 0))
        each.setblocking(False)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2 * _MOST_FRAMES * _BUFFER_PER_FRAME)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return _Ends(sender, receiver)


def _measure_delays(tallies: Sequence[_Tally], ends: Mapping[str, _Ends]) -> None:
    """Send every link's small packets, all links interleaved, and note how long each was under way."""
    run = os.urandom(8)

    def send(index: int, number: int) -> None:
        source, destination = tallies[index].pair
        content = _CONTENT.pack(run, index, number, time.monotonic())
        with contextlib.suppress(BlockingIOError):  # then it is lost, as on any host that is too slow
            ends[source].sender.sendto(content, ends[destination].receiver.getsockname())

    for index, tally in enumerate(tallies):
        send(index, tally.packets)  # makes the addresses known; its number is no measurement's
    time.sleep(0.01)
    schedule = _schedule(tallies, time.monotonic() + 0.005)
    until = schedule[-1][0] + max(tally.link.delay for tally in tallies) + 0.1
    upcoming = iter([*schedule, (math.inf, 0, 0)])
    when, index, number = next(upcoming)
    with _Listener([end.receiver for end in ends.values()]) as listener:
        while (now := time.monotonic()) < until:
            if when <= now:
                tallies[index].sent += 1
                send(index, number)
                when, index, number = next(upcoming)
                continue
            if when == math.inf and all(len(tally.delays) == tally.packets for tally in tallies):
                break
            for receiver in listener.ready(min(when, until) - now):
                _note_delays(receiver, run, tallies)


def _schedule(tallies: Sequence[_Tally], start: float) -> list[tuple[float, int, int]]:
    """Return (time, link, number) of every small packet, in the order of time."""
    span = max(0.1, sum(tally.packets for tally in tallies) / _PACKETS_PER_SECOND)
    schedule = []
    for index, tally in enumerate(tallies):
        gap = max(span / tally.packets, _gap(tally.link))
        first = start + gap * index / len(tallies)
        schedule += [(first + gap * number, index, number) for number in range(tally.packets)]
    return sorted(schedule)


def _note_delays(receiver: socket.socket, run: bytes, tallies: Sequence[_Tally]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            data = receiver.recv(FRAME)
            now = time.monotonic()
            if len(data) != _CONTENT.size:
                continue
            stamp, index, number, sent = _CONTENT.unpack(data)
            if stamp == run and number < tallies[index].packets:
                tallies[index].delays[number] = now - sent


class _Listener:
    """Waits for several sockets with microseconds, which epoll alone does not."""

    def __init__(self, receivers: Iterable[socket.socket]) -> None:
        self._epoll = select.epoll()
        self._receivers = {receiver.fileno(): receiver for receiver in receivers}
        for descriptor in self._receivers:
            self._epoll.register(descriptor, select.EPOLLIN)

    def __enter__(self) -> _Listener:
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

    tally: _Tally
    frame: int
    frames: int
    together: int
    """Frames handed to the kernel in one piece: half a bucket at most, so that the pace is kept."""
    sent: int = 0
    stamps: dict[int, float] = field(default_factory=dict)

    def rate(self) -> float | None:
        """Return bit/s on the wire, without what the bucket let through at once; None when too little arrived."""
        assert self.tally.link.rate
        skipped = _unmetered(self.tally.link.rate, self.frame)
        counted = sorted(number for number in self.stamps if number >= skipped)
        if len(counted) < 2 or self.stamps[counted[-1]] <= self.stamps[counted[0]]:
            return None
        first, last = counted[0], counted[-1]
        return (last - first) * self.frame * 8 / (self.stamps[last] - self.stamps[first])


def _unmetered(rate: float, frame: int) -> int:
    """Return how many frames of a train to leave out: what a full bucket lets through at once, twice over."""
    return 2 * burst(rate) // frame + 2


def _train(tally: _Tally) -> _Train:
    rate = tally.link.rate
    assert rate
    frame = int(min(FRAME, max(_SMALL_FRAME, rate / 8 * _MOST_SECONDS / _FEWEST_FRAMES)))
    frames = int(min(_MOST_FRAMES, max(_FEWEST_FRAMES, rate / 8 * _TRAIN_SECONDS / frame)))
    together = max(1, min(40, burst(rate) // frame // 2))
    return _Train(tally, frame, _unmetered(rate, frame) + frames, together)


def _measure_rates(tallies: Sequence[_Tally], ends: Mapping[str, _Ends]) -> None:
    """Send a train over each of these links, which share no device, and note the kernel's times of arrival."""
    run = os.urandom(8)
    trains = [_train(tally) for tally in tallies]
    by_index = dict(enumerate(trains))
    for train in trains:
        # As much as the queue before the link holds may be sent ahead; more would be lost there.
        sender = ends[train.tally.pair[0]].sender
        buffer = int(0.6 * queue_limit(train.tally.link)) * _BUFFER_PER_FRAME
        sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, buffer // 2)
        sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, train.frame - _HEADERS)
    longest = max(train.frames * train.frame * 8 / (train.tally.link.rate or 1) for train in trains)
    until = time.monotonic() + 2 * longest + max(tally.link.delay for tally in tallies) + 0.2
    quiet = max(tally.link.delay for tally in tallies) + 0.1 + 10 * FRAME * 8 / min(t.link.rate or 1 for t in tallies)
    last_heard = time.monotonic()
    with _Listener([ends[tally.pair[1]].receiver for tally in tallies]) as listener:
        while (now := time.monotonic()) < until:
            sending = [index for index, train in by_index.items() if _push(index, train, run, ends)]
            if not sending and all(train.frames - 1 in train.stamps for train in trains):
                break
            if not sending and now > last_heard + quiet:
                break
            for receiver in listener.ready(0.002 if sending else 0.02):
                last_heard = time.monotonic()
                _note_arrivals(receiver, run, by_index)
    for train in trains:
        ends[train.tally.pair[0]].sender.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, 0)
        train.tally.rate = train.rate()


def _push(index: int, train: _Train, run: bytes, ends: Mapping[str, _Ends]) -> bool:
    """Send what the socket takes; say whether frames are left.

    Several frames go to the kernel in one piece, which it cuts up before the wire: frame by frame a host under load
    would measure itself at high rates.
    """
    source, destination = train.tally.pair
    sender, address = ends[source].sender, ends[destination].receiver.getsockname()
    content = train.frame - _HEADERS
    with contextlib.suppress(BlockingIOError):
        while train.sent < train.frames:
            following = range(train.sent, min(train.frames, train.sent + train.together))
            piece = b"".join(_CONTENT.pack(run, index, number, 0.0).ljust(content, b"\0") for number in following)
            sender.sendto(piece, address)
            train.sent = following.stop
    return train.sent < train.frames


def _note_arrivals(receiver: socket.socket, run: bytes, trains: Mapping[int, _Train]) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(256):
            data, ancillary, _, _ = receiver.recvmsg(FRAME, 64)
            if len(data) < _CONTENT.size or not data.startswith(run):
                continue
            _, index, number, _ = _CONTENT.unpack_from(data)
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = struct.unpack_from("=qq", value)
                    trains[index].stamps[number] = seconds + nanoseconds * 1e-9
