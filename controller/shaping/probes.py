"""Measures links by packets between sockets inside the devices' own namespaces: one clock, no help of agents.

Delay and loss are measured on every link at once, with small packets that are too few to fill any queue. Rates
are measured on one link of each kind (equal in all that was asked of it), one after another where links share a
device, by a short train of full frames; the times of those are the kernel's, as the frames come off the wire. Links
of one radio cell share its channel, so their packets are spaced as if they were one link.
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
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controller.shaping import tolerance
from controller.shaping.medium import Route
from controller.shaping.namespaces import Namespace
from controller.shaping.plan import FRAME, burst, queue_limit
from testbed.network.impairments import expected_loss, longest_delay
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
    uplink: float | None = None
    downlink: float | None = None


@dataclass
class _Tally:
    """What was seen of one link."""

    pair: Pair
    asked: Link
    link: Link
    """The same, of the lowest rate on the way."""
    packets: int
    medium: Hashable = None
    """The channel on which a packet spends its transmission time before the delay of the link begins."""
    crowd: int = 1
    """Links measured on the same channel, or behind the same access limit."""
    place: int = 0
    """Among those."""
    late: bool = False
    """Whether the lowest rate is the downlink's: packets meet it after the kernel has noted their arrival."""
    sent: int = 0
    delays: dict[int, float] = field(default_factory=dict)
    rate: float | None = None

    @property
    def gap(self) -> float:
        """Return the shortest time between small packets that leaves the link, or its channel, half idle."""
        return 2 * self.link.transmission_time(_SMALL_FRAME) * self.crowd

    def measurement(self) -> LinkMeasurement:
        delay = statistics.median(self.delays.values()) if self.delays else None
        if delay is not None and self.medium is not None:
            delay -= self.link.transmission_time(_SMALL_FRAME)
        lost = self.sent - len(self.delays)
        return LinkMeasurement(
            *self.pair,
            requested=self.asked,
            rate=self.rate,
            delay=delay,
            loss=lost / self.sent if self.sent else None,
            packets=self.sent,
            problem=tolerance.problem(self.link, self.rate, delay, self.sent, lost),
        )


def measure(
    links: Mapping[Pair, Link], sites: Mapping[str, Site], media: Mapping[Pair, Route] | None = None
) -> list[LinkMeasurement]:
    """Measure these links; what is outside its tolerance is measured again, since a host may stumble once.

    ``sites`` holds every device that the pairs name, ``media`` the channel and rate of each link that shares one. The
    measurements come in the order of ``links``.
    """
    results: dict[Pair, LinkMeasurement] = {}
    media = media or {}
    representatives = set(
        _one_of_each({pair: _on_the_way(pair, each, sites, media) for pair, each in links.items()}, media)
    )
    wanted = dict(links)
    for _ in range(_ATTEMPTS):
        for result in _measure_once(wanted, sites, media, representatives):
            results[result.source, result.destination] = result
        wanted = {pair: link for pair, link in wanted.items() if results[pair].problem}
        if not wanted:
            break
    return [results[pair] for pair in links]


def _one_of_each(links: Mapping[Pair, Link], media: Mapping[Pair, Route]) -> list[Pair]:
    """Return the first link of every kind."""
    kinds: dict[tuple[Link, Hashable], Pair] = {}
    for pair, link in links.items():
        kinds.setdefault((link, media.get(pair)), pair)
    return list(kinds.values())


def _measure_once(
    links: Mapping[Pair, Link], sites: Mapping[str, Site], media: Mapping[Pair, Route], representatives: set[Pair]
) -> list[LinkMeasurement]:
    tallies = []
    crowds = Counter(media[pair].channels for pair in links if pair in media)
    places: Counter[Hashable] = Counter()
    for pair, asked in links.items():
        tally = _Tally(pair, asked, _on_the_way(pair, asked, sites, media), 0)
        out = sum(other[0] == pair[0] for other in links) if sites[pair[0]].uplink else 1
        into = sum(other[1] == pair[1] for other in links) if sites[pair[1]].downlink else 1
        tally.crowd = max(out, into)
        tally.late = tally.link.rate is not None and tally.link.rate == sites[pair[1]].downlink
        if pair in media:
            tally.medium = media[pair].channels
            tally.crowd, tally.place = max(tally.crowd, crowds[tally.medium]), places[tally.medium]
            places[tally.medium] += 1
        tally.packets = _packets(tally, len(links), pair in representatives)
        tallies.append(tally)
    with _sockets(sites, {name for pair in links for name in pair}) as ends:
        _measure_delays(tallies, ends)
        rated = [tally for tally in tallies if tally.link.up and tally.link.rate and tally.pair in representatives]
        for together in rounds([tally.pair for tally in rated], media):
            _measure_rates([tally for tally in rated if tally.pair in together], ends)
    return [tally.measurement() for tally in tallies]


def _on_the_way(pair: Pair, link: Link, sites: Mapping[str, Site], media: Mapping[Pair, Route]) -> Link:
    """Return a link with the lowest rate on its way: its own, its channel's, or an access limit of its ends."""
    shared = media[pair].rate if pair in media else None
    limits = (link.rate, sites[pair[0]].uplink, sites[pair[1]].downlink, shared)
    return replace(link, rate=min((rate for rate in limits if rate is not None), default=None))


def rounds(pairs: Sequence[Pair], media: Mapping[Pair, Route] | None = None) -> list[set[Pair]]:
    """Split links so that those of one round share no device and no channel."""
    made: list[tuple[set[Pair], set[Hashable]]] = []
    for pair in pairs:
        takes: set[Hashable] = {*pair}
        if media and pair in media:
            takes.add(media[pair].channels)
        for members, busy in made:
            if not busy & takes:
                members.add(pair)
                busy.update(takes)
                break
        else:
            made.append(({pair}, takes))
    return [members for members, _ in made]


def _packets(tally: _Tally, links: int, representative: bool) -> int:
    """Return how many small packets a link is given."""
    link = tally.link
    fair = int(_PACKETS_PER_SECOND * _MOST_SECONDS / links)
    count = max(_FEWEST_PACKETS, min(_DELAY_PACKETS, fair))
    loss = expected_loss(link)
    if link.up and loss and representative:
        # Thirty packets lost bound the loss to about half of itself.
        count = max(count, min(2000, round(30 / loss)))
    if link.rate:
        count = min(count, max(_FEWEST_PACKETS, int(_MOST_SECONDS / tally.gap)))
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
    time.sleep(0.01 + max(tally.gap for tally in tallies) / 2)
    schedule = _schedule(tallies, time.monotonic() + 0.005)
    until = schedule[-1][0] + max(longest_delay(tally.link) for tally in tallies) + 0.1
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
        gap = max(span / tally.packets, tally.gap)
        among, place = (len(tallies), index) if tally.medium is None else (tally.crowd, tally.place)
        first = start + gap * place / among
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
                tallies[index].delays.setdefault(number, now - sent)


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
        if self.tally.late:
            # What was lost on its way never came to the downlink.
            times = sorted(self.stamps[number] for number in counted)
            return (len(times) - 1) * self.frame * 8 / (times[-1] - times[0])
        if self.tally.link.jitter or self.tally.link.reorder:
            # Of packets that each had a delay of its own, two alone say too little.
            slope = statistics.linear_regression(counted, [self.stamps[number] for number in counted]).slope
            return self.frame * 8 / slope if slope > 0 else None
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
    until = time.monotonic() + 2 * longest + max(longest_delay(tally.link) for tally in tallies) + 0.2
    quiet = max(longest_delay(tally.link) for tally in tallies) + 0.1
    quiet += 10 * FRAME * 8 / min(tally.link.rate or 1 for tally in tallies)
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
            if trains[index].tally.late:
                trains[index].stamps[number] = time.monotonic()
                continue
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = struct.unpack_from("=qq", value)
                    trains[index].stamps[number] = seconds + nanoseconds * 1e-9
