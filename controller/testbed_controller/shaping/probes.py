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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from testbed.network.impairments import expected_loss, longest_delay
from testbed.network.link import Link, Pair
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
    rates,
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
        with sockets(sites, {name for pair in wanted for name in pair}) as ends:
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
    for together, late in _trains(tallies, representatives, media):
        time.sleep(max(0.0, due - time.monotonic()))
        for pair, rate in rates(together, late, ends, run).items():
            by_pair[pair].rate = rate
        due += seconds(together, late, ends) + _BETWEEN


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
    tallies: Sequence[_Tally], representatives: set[Pair], media: Mapping[Pair, Route]
) -> Iterator[tuple[dict[Pair, Link], list[Pair]]]:
    """Yield links whose rates are measured together, each of the lowest rate on its way; and the late ones of them."""
    rated = {
        tally.pair: tally for tally in tallies if tally.link.up and tally.link.rate and tally.pair in representatives
    }
    for together in rounds(list(rated), media):
        yield (
            {pair: tally.link for pair, tally in rated.items() if pair in together},
            [pair for pair in rated if pair in together and rated[pair].late],
        )


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
    run = run or os.urandom(8)
    began = time.monotonic()

    def send(index: int, number: int) -> None:
        source, destination = tallies[index].pair
        content = CONTENT.pack(run, index, number, time.monotonic())
        if (sender := ends[source].sender) is not None:
            with contextlib.suppress(BlockingIOError):  # then it is lost, as on any host that is too slow
                sender.sendto(content, ends[destination].target)

    for index, tally in enumerate(tallies):
        send(index, tally.packets)  # makes the addresses known; its number is no measurement's
    time.sleep(0.01 + max(tally.gap for tally in tallies) / 2)
    first = 0.015 + max(tally.gap for tally in tallies) / 2
    starts, gaps = _schedule(tallies, began + first)
    rest = max(longest_delay(tally.link) + tally.gap for tally in tallies) + 0.1
    planned = max(starts[index] + gaps[index] * (tally.packets - 1) for index, tally in enumerate(tallies)) + rest
    # Other hosts measure by the same schedule; by itself a host that falls behind sends later, and loses nothing by it.
    until, latest = planned, planned if begin is not None else planned + _BEHIND_SECONDS
    upcoming = [(when, index, 0) for index, when in enumerate(starts)]
    heapq.heapify(upcoming)
    receivers = [end.receiver for end in ends.values() if end.receiver is not None]
    coming = [tally for tally in tallies if ends[tally.pair[1]].receiver is not None]
    with Listener(receivers) as listener:
        while (now := time.monotonic()) < (latest if upcoming else until):
            if upcoming and upcoming[0][0] <= now:
                when, index, number = heapq.heappop(upcoming)
                tally = tallies[index]
                tally.sent += ends[tally.pair[0]].sender is not None
                send(index, number)
                if number + 1 < tally.packets:
                    # Not two at once after a stall: the second would wait for the first on a slow link.
                    heapq.heappush(upcoming, (max(when + gaps[index], now + tally.gap), index, number + 1))
                until = max(until, min(latest, now + rest))
            elif not upcoming and all(len(tally.delays) == tally.packets for tally in coming):
                break
            following = upcoming[0][0] if upcoming else until
            for receiver in listener.ready(following - time.monotonic()):
                _note_delays(receiver, run, tallies)
    for receiver in receivers:  # what came while this process was kept from the processor is not lost
        _note_delays(receiver, run, tallies)
    return planned - began + _BETWEEN


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


def _note_delays(receiver: socket.socket, run: bytes, tallies: Sequence[_Tally]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            data = receiver.recv(FRAME)
            now = time.monotonic()
            if len(data) != CONTENT.size:
                continue
            stamp, index, number, sent = CONTENT.unpack(data)
            if stamp == run and number < tallies[index].packets:
                tallies[index].delays.setdefault(number, now - sent)
