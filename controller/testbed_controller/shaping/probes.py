"""Link measurement by packets between sockets in the devices' namespaces: a single clock, and no help from agents.

Delay and loss are measured on all links at once, with small packets that are too few to fill a queue. Rates are
measured on one link of each kind (all with equal properties), by a short train of full frames (`trains.py`); links that
share a device are measured one after another. The links of a radio cell share its channel, so their packets are spaced
as if they were one link.
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
from itertools import chain
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
    longest_seconds,
    make_train,
    measure_rates,
    open_sockets,
    receiving_sockets,
)

_DELAY_PACKETS = 30
"""Maximum number of packets for the delay of a link without loss."""
_FEWEST_PACKETS = 10
"""Minimum number of packets for a link, however many links share the packet rate."""
_PACKETS_PER_SECOND = 2500
"""Maximum packet rate over all links: more would load the host noticeably."""
_MOST_SECONDS = 1.0
"""Maximum duration of a part of the measurement, in seconds."""
_BEHIND_SECONDS = 30.0
"""Maximum delay of the schedule on an overloaded host, in seconds."""
_ATTEMPTS = 3
"""Number of measurements of a link before its last result stands."""
_AGAIN_SECONDS = 30.0
"""Time after which no further attempt begins, in seconds: many slow links of different kinds take minutes."""
_BETWEEN = 0.1
"""Pause between two parts of a measurement by several hosts, in seconds, above the uncertainty of their clocks."""


@dataclass
class _Tally:
    """The observations on one link."""

    pair: Pair
    asked: Link
    link: Link
    """The requested link with the lowest rate on its way."""
    packets: int
    medium: Hashable = None
    """Channel on which a packet spends its transmission time before the delay of the link begins."""
    crowd: int = 1
    """Number of turns of the links that share a channel or an access limit with this one."""
    place: int | None = None
    """Turn of the link, from 0; None without a shared rate."""
    is_bound_by_downlink: bool = False
    """Whether the downlink has the lowest rate: it delays packets after the kernel has recorded their arrival."""
    sent: int = 0
    delays: dict[int, float] = field(default_factory=dict)
    rate: float | None = None

    @property
    def gap(self) -> float:
        """Minimum time between small packets, in seconds, for a half-idle link or channel."""
        return 2 * self.link.transmission_time(SMALL_FRAME) * self.crowd

    @property
    def gate(self) -> float:
        """Time of a small packet at the gate before the delay of the link begins, in seconds."""
        return 0.0 if self.medium is None else self.link.transmission_time(SMALL_FRAME)

    def measurement(self) -> LinkMeasurement:
        delay = statistics.median(self.delays.values()) if self.delays else None
        if delay is not None:
            delay -= self.gate
        lost = self.sent - len(self.delays)
        problem = tolerance.describe_deviations(
            self.link, self.rate, delay, self.sent, lost, self.gate
        )
        return LinkMeasurement(
            *self.pair,
            requested=self.asked,
            limit=self.link.rate,
            rate=self.rate,
            delay=delay,
            loss=lost / self.sent if self.sent else None,
            packets=self.sent,
            problem=problem,
        )


def measure(
    links: Mapping[Pair, Link],
    sites: Mapping[str, Site],
    media: Mapping[Pair, Route] | None = None,
) -> list[LinkMeasurement]:
    """Measure links; repeat for links outside their tolerance, since hosts may stall occasionally.

    ``sites`` has every device of the pairs, ``media`` the channel and rate of each link on a shared medium. The results
    have the order of ``links``.
    """
    results: dict[Pair, LinkMeasurement] = {}
    media = media or {}
    representatives = _representatives(links, sites, media)
    wanted = dict(links)
    until = time.monotonic() + _AGAIN_SECONDS
    for _ in range(_ATTEMPTS):
        tallies = _make_tallies(wanted, sites, media, representatives)
        with open_sockets(sites, set(chain.from_iterable(wanted))) as ends:
            _measure_parts(tallies, representatives, media, ends)
        for tally in tallies:
            results[tally.pair] = tally.measurement()
        # Only links outside their tolerance: all others have passed.
        again = {}
        for pair, link in wanted.items():
            if results[pair].problem:
                again[pair] = link
        wanted = again
        if not wanted or time.monotonic() > until:
            break
    return [results[pair] for pair in links]


def _representatives(
    links: Mapping[Pair, Link], sites: Mapping[str, Site], media: Mapping[Pair, Route]
) -> set[Pair]:
    """Return the first link of every kind."""
    users = Counter(media[pair].channels for pair in links if pair in media)
    kinds: dict[tuple[Link, Hashable], Pair] = {}
    for pair, link in links.items():
        # A channel with a single link does not make a kind of its own.
        shared = None
        if pair in media and users[media[pair].channels] > 1:
            shared = media[pair]
        kind = (_on_the_way(pair, link, sites, media), shared)
        kinds.setdefault(kind, pair)
    return set(kinds.values())


def measure_half(
    links: Mapping[Pair, Link],
    sites: Mapping[str, Site],
    ends: Mapping[str, Ends | FarEnds],
    run: bytes,
    begin: float,
    media: Mapping[Pair, Route],
) -> list[dict[str, Any]]:
    """Measure the local ends of links to other hosts, which measure their ends at the same time.

    ``begin`` is the common start on this host's monotonic clock, ``run`` a common identifier. Returns for each link
    that begins or ends here: the number of packets ``sent`` from here; the ``delays`` of packets received here, in
    seconds between the sender's clock and this host's; the measured ``rate`` in bit/s; the lowest rate ``asked`` on its
    way; and the time at the ``gate`` in seconds, which only the sender's host knows from ``media``.
    """
    # Without `media`, which only the senders' hosts know: both ends of a link must choose the same trains.
    representatives = _representatives(links, sites, {})
    tallies = _make_tallies(links, sites, media, representatives)
    _measure_parts(tallies, representatives, {}, ends, run, begin)
    return [_half_report(tally) for tally in tallies]


def _half_report(tally: _Tally) -> dict[str, Any]:
    """Return the observations of one host on a link, as plain JSON values."""
    return {
        "source": tally.pair[0],
        "destination": tally.pair[1],
        "sent": tally.sent,
        "delays": [*tally.delays.values()],
        "rate": tally.rate,
        "asked": tally.link.rate,
        "gate": tally.gate,
    }


def _measure_parts(
    tallies: Sequence[_Tally],
    representatives: set[Pair],
    media: Mapping[Pair, Route],
    ends: Mapping[str, Ends | FarEnds],
    run: bytes | None = None,
    begin: float | None = None,
) -> None:
    """Measure delays and losses, then rates; with ``begin``, in step with other hosts."""
    by_pair = {tally.pair: tally for tally in tallies}
    # Hosts exchange no message during the measurement: each computes the same schedule from the common start.
    due = begin or -math.inf
    time.sleep(max(0.0, due - time.monotonic()))
    due += _measure_delays(tallies, ends, run, begin)
    for together in _make_trains(tallies, representatives, media, ends):
        time.sleep(max(0.0, due - time.monotonic()))
        for pair, rate in measure_rates(together, run).items():
            by_pair[pair].rate = rate
        due += longest_seconds(together) + _BETWEEN


def _make_tallies(
    links: Mapping[Pair, Link],
    sites: Mapping[str, Site],
    media: Mapping[Pair, Route],
    representatives: set[Pair],
) -> list[_Tally]:
    """Return an empty tally for each link."""
    tallies = []
    turns, crowds = _assign_turns(links, sites, media)
    for pair, asked in links.items():
        link = _on_the_way(pair, asked, sites, media)
        tally = _Tally(pair, asked, link, packets=0)
        downlink = sites[pair[1]].downlink
        tally.is_bound_by_downlink = link.rate is not None and link.rate == downlink
        tally.crowd = crowds.get(pair, 1)
        tally.place = turns.get(pair)
        tally.medium = media[pair].channels if pair in media else None
        tally.packets = _packet_count(
            tally, len(links), is_representative=pair in representatives
        )
        tallies.append(tally)
    return tallies


def _assign_turns(
    pairs: Iterable[Pair], sites: Mapping[str, Site], media: Mapping[Pair, Route]
) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Return (turns, crowds) of the links with a shared rate: a link's turn, and the number of turns of its group.

    Links of the same turn share no rate, so their packets do not delay each other.
    """
    shared = {pair: _shared_rates(pair, sites, media) for pair in pairs}
    turns: dict[Pair, int] = {}
    taken: dict[Hashable, set[int]] = defaultdict(set)
    for pair, rates_of_pair in shared.items():
        if not rates_of_pair:
            continue
        busy: set[int] = set()
        for shared_rate in rates_of_pair:
            busy |= taken[shared_rate]
        # The first free turn: a greedy colouring, not the least number of turns.
        turn = 0
        while turn in busy:
            turn += 1
        turns[pair] = turn
        for shared_rate in rates_of_pair:
            taken[shared_rate].add(turn)
    crowds = {}
    for pair in turns:
        last = 0
        for shared_rate in shared[pair]:
            last = max(last, *taken[shared_rate])
        crowds[pair] = 1 + last
    return turns, crowds


def _shared_rates(
    pair: Pair, sites: Mapping[str, Site], media: Mapping[Pair, Route]
) -> set[Hashable]:
    """Return the rates shared with other links: uplink, downlink, channels."""
    source, destination = pair
    shared: set[Hashable] = set(media[pair].channels) if pair in media else set()
    if sites[source].uplink is not None:
        shared.add(("uplink", source))
    if sites[destination].downlink is not None:
        shared.add(("downlink", destination))
    return shared


def _make_trains(
    tallies: Sequence[_Tally],
    representatives: set[Pair],
    media: Mapping[Pair, Route],
    ends: Mapping[str, Ends | FarEnds],
) -> list[list[Train]]:
    """Return a train for each link with a rate measurement; the trains of one list are sent together."""
    trains = {}
    for tally in tallies:
        if tally.link.up and tally.link.rate and tally.pair in representatives:
            trains[tally.pair] = make_train(
                tally.pair,
                tally.link,
                ends,
                is_bound_by_downlink=tally.is_bound_by_downlink,
            )
    concurrent_trains = []
    for together in split_into_rounds(list(trains), media):
        # In the order of the links, not of the set: all hosts number the trains alike.
        concurrent_trains.append([trains[pair] for pair in trains if pair in together])
    return concurrent_trains


def _on_the_way(
    pair: Pair, link: Link, sites: Mapping[str, Site], media: Mapping[Pair, Route]
) -> Link:
    """Return a link with the lowest rate of link, channel and access limits."""
    source, destination = pair
    shared = media[pair].rate if pair in media else None
    rate = least_rate(
        link.rate, sites[source].uplink, sites[destination].downlink, shared
    )
    return replace(link, rate=rate)


def split_into_rounds(
    pairs: Sequence[Pair], media: Mapping[Pair, Route] | None = None
) -> list[set[Pair]]:
    """Split links into rounds whose links share neither a device nor a channel.

    >>> [sorted(links) for links in split_into_rounds([("a", "b"), ("b", "a"), ("c", "d")])]
    [[('a', 'b'), ('c', 'd')], [('b', 'a')]]
    """
    # Each round with its links, and the devices and channels that they occupy.
    rounds: list[tuple[set[Pair], set[Hashable]]] = []
    for pair in pairs:
        occupied: set[Hashable] = {*pair}
        if media and pair in media:
            occupied.add(media[pair].channels)
        # The first round with room: a greedy choice, not the least number of rounds.
        for members, busy in rounds:
            if not busy & occupied:
                members.add(pair)
                busy.update(occupied)
                break
        else:
            rounds.append(({pair}, occupied))
    return [members for members, _ in rounds]


def _packet_count(tally: _Tally, links: int, *, is_representative: bool) -> int:
    """Return the number of small packets for a link."""
    link = tally.link
    fair = int(_PACKETS_PER_SECOND * _MOST_SECONDS / links)
    packets = max(_FEWEST_PACKETS, min(_DELAY_PACKETS, fair))
    loss = expected_loss(link)
    # More packets over one link of a kind suffice to find a wrong loss.
    if link.up and loss and is_representative:
        # With thirty lost packets, the relative error of the loss is about one half.
        packets = max(packets, min(2000, round(30 / loss)))
    if link.rate:
        packets = min(packets, max(_FEWEST_PACKETS, int(_MOST_SECONDS / tally.gap)))
    return packets


def _measure_delays(
    tallies: Sequence[_Tally],
    ends: Mapping[str, Ends | FarEnds],
    run: bytes | None,
    begin: float | None,
) -> float:
    """Send the small packets of all links, interleaved, and record the delay of each.

    Returns the planned duration in seconds, equal on all participating hosts.
    """
    began = time.monotonic()
    exchange = _DelayExchange(tallies, ends, run or os.urandom(8))
    for index, tally in enumerate(tallies):
        # Resolves the hardware addresses; receivers ignore a packet of this number.
        exchange.send(index, tally.packets)
    pause = max(tally.gap for tally in tallies) / 2
    time.sleep(0.01 + pause)
    starts, gaps = _schedule(tallies, began + 0.015 + pause)
    last_sent = 0.0
    for start, gap, tally in zip(starts, gaps, tallies, strict=True):
        last_sent = max(last_sent, start + gap * (tally.packets - 1))
    # Time for the last packet to arrive, in seconds, with a margin.
    rest = max(longest_delay(tally.link) + tally.gap for tally in tallies) + 0.1
    planned = last_sent + rest
    # Other hosts follow the same schedule; a single host may fall behind without harm.
    latest = planned if begin is not None else planned + _BEHIND_SECONDS
    exchange.start(starts, gaps)
    exchange.finish(rest, planned, latest)
    return planned - began + _BETWEEN


class _DelayExchange:
    """The exchange of the small packets of all links.

    `start` schedules the first packet of each link, and `finish` sends and receives until all have arrived.
    """

    def __init__(
        self, tallies: Sequence[_Tally], ends: Mapping[str, Ends | FarEnds], run: bytes
    ) -> None:
        self._tallies = tallies
        self._ends = ends
        self._run = run
        self._coming: list[_Tally] = []
        """Links whose packets arrive on this host."""
        for tally in tallies:
            if isinstance(ends[tally.pair[1]], Ends):
                self._coming.append(tally)
        self._gaps: Sequence[float] = ()
        self._upcoming: list[tuple[float, int, int]] = []
        """Heap of (instant, link index, packet number) of packets to send."""

    def send(self, index: int, number: int) -> bool:
        """Send a packet of a link; return False if the sender is on another host."""
        pair = self._tallies[index].pair
        source = self._ends[pair[0]]
        destination = self._ends[pair[1]]
        if isinstance(source, FarEnds):
            return False
        content = CONTENT.pack(self._run, index, number, time.monotonic())
        # A packet refused by a full buffer counts as lost, as on any host that is too slow.
        source.send(content, destination.target)
        return True

    def start(self, starts: Sequence[float], gaps: Sequence[float]) -> None:
        """Schedule the first packet of each link."""
        self._gaps = gaps
        for index, start in enumerate(starts):
            heapq.heappush(self._upcoming, (start, index, 0))

    def finish(self, rest: float, until: float, latest: float) -> None:
        """Send all packets until ``latest``; receive until ``until``, or ``rest`` seconds after the last packet."""
        sockets_here = receiving_sockets(self._ends.values())
        with Listener(sockets_here) as listener:
            while True:
                now = time.monotonic()
                if now >= (latest if self._upcoming else until):
                    break
                if self._send_due(now):
                    # A host behind the schedule waits for its last packet as long as the others.
                    until = max(until, min(latest, now + rest))
                elif not self._upcoming and self._have_all_arrived():
                    break
                following = self._upcoming[0][0] if self._upcoming else until
                for receiver in listener.ready(following - time.monotonic()):
                    self._note_arrivals(receiver)
        # Packets may have arrived while this process was not running.
        for receiver in sockets_here:
            self._note_arrivals(receiver)

    def _have_all_arrived(self) -> bool:
        return all(len(tally.delays) == tally.packets for tally in self._coming)

    def _send_due(self, now: float) -> bool:
        """Send the next packet and schedule the following one of its link; return False if none is due."""
        if not self._upcoming or self._upcoming[0][0] > now:
            return False
        when, index, number = heapq.heappop(self._upcoming)
        tally = self._tallies[index]
        tally.sent += self.send(index, number)
        if number + 1 < tally.packets:
            # After a stall, keep the packets apart: on a slow link the second would wait for the first.
            following = max(when + self._gaps[index], now + tally.gap)
            heapq.heappush(self._upcoming, (following, index, number + 1))
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


def _schedule(
    tallies: Sequence[_Tally], start: float
) -> tuple[list[float], list[float]]:
    """Return the start and the interval of the small packets of each link, in seconds."""
    span = max(0.1, sum(tally.packets for tally in tallies) / _PACKETS_PER_SECOND)
    starts, gaps = [], []
    for index, tally in enumerate(tallies):
        gap = max(span / tally.packets, tally.gap)
        # Spread over the interval: links with a shared rate by their turns, all others by their position.
        among = len(tallies)
        place = index
        if tally.place is not None:
            among = tally.crowd
            place = tally.place
        starts.append(start + gap * place / among)
        gaps.append(gap)
    return starts, gaps
