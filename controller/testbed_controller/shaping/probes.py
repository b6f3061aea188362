"""Measures links by packets between sockets inside the devices' own namespaces: one clock, no help of agents.

Delay and loss are measured on every link at once, with small packets that are too few to fill any queue. Rates
are measured on one link of each kind (equal in all that was asked of it), one after another where links share a
device, by a short train of full frames (`trains.py`). Links
of one radio cell share its channel, so their packets are spaced as if they were one link.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import socket
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

from testbed.network.impairments import expected_loss, longest_delay
from testbed.network.link import Link, Pair, least_rate
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.shaping import tolerance
from testbed_controller.shaping.medium import Route
from testbed_controller.shaping.plan import FRAME
from testbed_controller.shaping.trains import (
    CONTENT,
    SMALL_FRAME,
    Ends,
    FarEnds,
    Listener,
    Site,
    Train,
    make_train,
    rates,
    receivers,
    seconds,
    sockets,
)

_DELAY_PACKETS = 30
_FEWEST_PACKETS = 10
_PACKETS_PER_SECOND = 2500
"""Packets on all links together: more would make the measurement a load on the host of its own."""
_MOST_SECONDS = 1.0
_BEHIND_SECONDS = 30.0
"""By how much the last packet may be sent later than planned, on a host that cannot keep up."""
_ATTEMPTS = 3
_AGAIN_SECONDS = 30.0
"""No further attempt begins after so long: measuring many slow links of different kinds takes minutes by itself."""
_BETWEEN = 0.1
"""Seconds between two parts of a measurement by several hosts: more than they know each other's clocks by."""


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
    """Turns that the links take that share a channel or an access limit with this one."""
    place: int | None = None
    """Its turn, from 0; None where it shares nothing."""
    late: bool = False
    """Whether the lowest rate is the downlink's: packets meet it after the kernel has noted their arrival."""
    sent: int = 0
    delays: dict[int, float] = field(default_factory=dict)
    rate: float | None = None

    @property
    def gap(self) -> float:
        """Return the shortest time between small packets that leaves the link, or its channel, half idle."""
        return 2 * self.link.transmission_time(SMALL_FRAME) * self.crowd

    @property
    def gate(self) -> float:
        """Return the seconds that a small packet waits at the gate before the delay of the link begins."""
        return 0.0 if self.medium is None else self.link.transmission_time(SMALL_FRAME)

    def measurement(self) -> LinkMeasurement:
        delay = statistics.median(self.delays.values()) if self.delays else None
        if delay is not None:
            delay -= self.gate
        lost = self.sent - len(self.delays)
        return LinkMeasurement(
            *self.pair,
            requested=self.asked,
            limit=self.link.rate,
            rate=self.rate,
            delay=delay,
            loss=lost / self.sent if self.sent else None,
            packets=self.sent,
            problem=tolerance.problem(self.link, self.rate, delay, self.sent, lost, self.gate),
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
    representatives = _one_of_each(links, sites, media)
    wanted, until = dict(links), time.monotonic() + _AGAIN_SECONDS
    for _ in range(_ATTEMPTS):
        tallies = _tallies(wanted, sites, media, representatives)
        with sockets(sites, set(chain.from_iterable(wanted))) as ends:
            _measure(tallies, representatives, media, ends)
        results |= {tally.pair: tally.measurement() for tally in tallies}
        wanted = {pair: link for pair, link in wanted.items() if results[pair].problem}
        if not wanted or time.monotonic() > until:
            break
    return [results[pair] for pair in links]


def _one_of_each(links: Mapping[Pair, Link], sites: Mapping[str, Site], media: Mapping[Pair, Route]) -> set[Pair]:
    """Return the first link of every kind."""
    users = Counter(media[pair].channels for pair in links if pair in media)
    kinds: dict[tuple[Link, Hashable], Pair] = {}
    for pair, link in links.items():
        # A channel that no other link uses makes no kind of its own.
        shared = media[pair] if pair in media and users[media[pair].channels] > 1 else None
        kinds.setdefault((_on_the_way(pair, link, sites, media), shared), pair)
    return {*kinds.values()}


def measure_half(
    links: Mapping[Pair, Link],
    sites: Mapping[str, Site],
    ends: Mapping[str, Ends | FarEnds],
    run: bytes,
    begin: float,
    media: Mapping[Pair, Route],
) -> list[dict[str, Any]]:
    """Do here what is to be done of measuring links between this host and others, which do theirs at the same time.

    ``begin`` is the instant of this host's monotonic clock at which all of them start, ``run`` the same of all. Returns
    for each link that begins or ends here how many packets were ``sent`` from here; the ``delays`` of those that
    arrived here in seconds by their sender's clock and this host's; the ``rate`` in bit/s where it was measured; and
    the lowest rate ``asked`` on its way; and the ``gate``: seconds that each packet waited there, of which only the
    sender's host knows, by ``media``.
    """
    representatives = _one_of_each(links, sites, {})
    tallies = _tallies(links, sites, media, representatives)
    _measure(tallies, representatives, {}, ends, run, begin)
    return [
        {
            "source": tally.pair[0],
            "destination": tally.pair[1],
            "sent": tally.sent,
            "delays": [*tally.delays.values()],
            "rate": tally.rate,
            "asked": tally.link.rate,
            "gate": tally.gate,
        }
        for tally in tallies
    ]


def _measure(
    tallies: Sequence[_Tally],
    representatives: set[Pair],
    media: Mapping[Pair, Route],
    ends: Mapping[str, Ends | FarEnds],
    run: bytes | None = None,
    begin: float | None = None,
) -> None:
    """Measure delays and losses, then rates; where there is an instant to ``begin`` each part as other hosts do."""
    by_pair, due = {tally.pair: tally for tally in tallies}, begin or -math.inf
    time.sleep(max(0.0, due - time.monotonic()))
    due += _measure_delays(tallies, ends, run, begin)
    for together in _trains(tallies, representatives, media, ends):
        time.sleep(max(0.0, due - time.monotonic()))
        for pair, rate in rates(together, run).items():
            by_pair[pair].rate = rate
        due += seconds(together) + _BETWEEN


def _tallies(
    links: Mapping[Pair, Link], sites: Mapping[str, Site], media: Mapping[Pair, Route], representatives: set[Pair]
) -> list[_Tally]:
    """Return what is to be measured of each link."""
    tallies = []
    turns, crowds = _turns(links, sites, media)
    for pair, asked in links.items():
        tally = _Tally(pair, asked, _on_the_way(pair, asked, sites, media), 0)
        tally.late = tally.link.rate is not None and tally.link.rate == sites[pair[1]].downlink
        tally.crowd, tally.place = crowds.get(pair, 1), turns.get(pair)
        tally.medium = media[pair].channels if pair in media else None
        tally.packets = _packets(tally, len(links), pair in representatives)
        tallies.append(tally)
    return tallies


def _turns(
    pairs: Iterable[Pair], sites: Mapping[str, Site], media: Mapping[Pair, Route]
) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Return the turn of each link that shares a rate with others, and how many turns those take.

    Links of the same turn share nothing, so that their packets do not wait for each other.
    """
    shared = {pair: _shared_rates(pair, sites, media) for pair in pairs}
    turns: dict[Pair, int] = {}
    taken: dict[Hashable, set[int]] = defaultdict(set)
    for pair, rates_of_pair in shared.items():
        if rates_of_pair:
            busy = set[int]().union(*(taken[each] for each in rates_of_pair))
            turns[pair] = next(turn for turn in count() if turn not in busy)
            for each in rates_of_pair:
                taken[each].add(turns[pair])
    return turns, {pair: 1 + max(max(taken[each]) for each in shared[pair]) for pair in turns}


def _shared_rates(pair: Pair, sites: Mapping[str, Site], media: Mapping[Pair, Route]) -> set[Hashable]:
    """Return what a link shares with others: an uplink, a downlink, channels."""
    source, destination = pair
    found: set[Hashable] = set(media[pair].channels) if pair in media else set()
    if sites[source].uplink is not None:
        found.add(("uplink", source))
    if sites[destination].downlink is not None:
        found.add(("downlink", destination))
    return found


def _trains(
    tallies: Sequence[_Tally],
    representatives: set[Pair],
    media: Mapping[Pair, Route],
    ends: Mapping[str, Ends | FarEnds],
) -> list[list[Train]]:
    """Return a train for each link whose rate is measured; those in one list share no device and are sent together."""
    trains = {}
    for tally in tallies:
        if tally.link.up and tally.link.rate and tally.pair in representatives:
            trains[tally.pair] = make_train(tally.pair, tally.link, tally.late, ends)
    return [[trains[pair] for pair in trains if pair in together] for together in rounds(list(trains), media)]


def _on_the_way(pair: Pair, link: Link, sites: Mapping[str, Site], media: Mapping[Pair, Route]) -> Link:
    """Return a link with the lowest rate on its way: its own, its channel's, or an access limit of its ends."""
    shared = media[pair].rate if pair in media else None
    return replace(link, rate=least_rate(link.rate, sites[pair[0]].uplink, sites[pair[1]].downlink, shared))


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
    packets = max(_FEWEST_PACKETS, min(_DELAY_PACKETS, fair))
    loss = expected_loss(link)
    if link.up and loss and representative:
        # Thirty packets lost bound the loss to about half of itself.
        packets = max(packets, min(2000, round(30 / loss)))
    if link.rate:
        packets = min(packets, max(_FEWEST_PACKETS, int(_MOST_SECONDS / tally.gap)))
    return packets


def _measure_delays(
    tallies: Sequence[_Tally], ends: Mapping[str, Ends | FarEnds], run: bytes | None, begin: float | None
) -> float:
    """Send every link's small packets, all links interleaved, and note how long each was under way.

    Returns within how many seconds that is over, on each of the hosts that take part from the instant ``begin`` on.
    """
    began = time.monotonic()
    exchange = _DelayExchange(tallies, ends, run or os.urandom(8))
    for index, tally in enumerate(tallies):
        exchange.send(index, tally.packets)  # makes the addresses known; its number is no measurement's
    pause = max(tally.gap for tally in tallies) / 2
    time.sleep(0.01 + pause)
    starts, gaps = _schedule(tallies, began + 0.015 + pause)
    rest = max(longest_delay(tally.link) + tally.gap for tally in tallies) + 0.1
    planned = max(starts[index] + gaps[index] * (tally.packets - 1) for index, tally in enumerate(tallies)) + rest
    # Other hosts measure by the same schedule; by itself a host that falls behind sends later, and loses nothing by it.
    latest = planned if begin is not None else planned + _BEHIND_SECONDS
    exchange.start(starts, gaps)
    exchange.finish(rest, planned, latest)
    return planned - began + _BETWEEN


class _DelayExchange:
    """The small packets of all links: those that are due next, and the arrivals."""

    def __init__(self, tallies: Sequence[_Tally], ends: Mapping[str, Ends | FarEnds], run: bytes) -> None:
        self._tallies = tallies
        self._ends = ends
        self._run = run
        self._coming = [tally for tally in tallies if isinstance(ends[tally.pair[1]], Ends)]
        self._gaps: Sequence[float] = ()
        self._upcoming: list[tuple[float, int, int]] = []
        """A heap of the instant, the link and the number of the packets to send."""

    def send(self, index: int, number: int) -> bool:
        """Send a packet of a link; return whether that is done on this host."""
        source, destination = (self._ends[name] for name in self._tallies[index].pair)
        if isinstance(source, FarEnds):
            return False
        # A packet that a full buffer does not take is lost, as on any host that is too slow.
        source.send(CONTENT.pack(self._run, index, number, time.monotonic()), destination.target)
        return True

    def start(self, starts: Sequence[float], gaps: Sequence[float]) -> None:
        """Schedule the first packet of each link."""
        self._gaps = gaps
        self._upcoming = [(when, index, 0) for index, when in enumerate(starts)]
        heapq.heapify(self._upcoming)

    def finish(self, rest: float, until: float, latest: float) -> None:
        """Send all packets until ``latest``; receive until ``until``, or ``rest`` after the last packet."""
        sockets_here = receivers(self._ends.values())
        with Listener(sockets_here) as listener:
            while (now := time.monotonic()) < (latest if self._upcoming else until):
                if self._send_due(now):
                    until = max(until, min(latest, now + rest))
                elif not self._upcoming and all(len(tally.delays) == tally.packets for tally in self._coming):
                    break
                following = self._upcoming[0][0] if self._upcoming else until
                for receiver in listener.ready(following - time.monotonic()):
                    self._note_arrivals(receiver)
        for receiver in sockets_here:  # what came while this process was kept from the processor is not lost
            self._note_arrivals(receiver)

    def _send_due(self, now: float) -> bool:
        """Send the next packet if it is due and schedule its successor; return whether it was due."""
        if not self._upcoming or self._upcoming[0][0] > now:
            return False
        when, index, number = heapq.heappop(self._upcoming)
        tally = self._tallies[index]
        tally.sent += self.send(index, number)
        if number + 1 < tally.packets:
            # Not two at once after a stall: the second would wait for the first on a slow link.
            heapq.heappush(self._upcoming, (max(when + self._gaps[index], now + tally.gap), index, number + 1))
        return True

    def _note_arrivals(self, receiver: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = receiver.recv(FRAME)
                now = time.monotonic()
                if len(data) != CONTENT.size:
                    continue
                run, index, number, sent = CONTENT.unpack(data)
                if run == self._run and number < self._tallies[index].packets:
                    self._tallies[index].delays.setdefault(number, now - sent)


def _schedule(tallies: Sequence[_Tally], start: float) -> tuple[list[float], list[float]]:
    """Return of each link when its first small packet is due, and the seconds from one to the next."""
    span = max(0.1, sum(tally.packets for tally in tallies) / _PACKETS_PER_SECOND)
    starts, gaps = [], []
    for index, tally in enumerate(tallies):
        gap = max(span / tally.packets, tally.gap)
        among, place = (len(tallies), index) if tally.place is None else (tally.crowd, tally.place)
        starts.append(start + gap * place / among)
        gaps.append(gap)
    return starts, gaps
