"""Link measurement by packets between sockets in the devices' namespaces: a single clock, and no help from agents.

Delay and loss are measured on all links at once, with small packets that are too few to fill a queue. The rate is
measured on one link of each kind, its representative, since links of a kind have equal properties. A rate measurement
sends a short train of full frames (`trains.py`); links that share a device are measured one after another. The links of
a radio cell share its channel, so their packets are spaced as if they were one link.

A tally collects the observations on one link. In a measurement by several hosts, each host has a tally of the packets
that it sends or receives, and the controller combines both halves.
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
    Listener,
    ProbedDevice,
    ProbeSockets,
    RemoteReceiver,
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
_DELAY_SECONDS = 1.0
"""Intended duration of the measurement of delays, in seconds; links at their minimum of packets may exceed it."""
_LAG_SECONDS = 30.0
"""Maximum time by which an overloaded host may send later than scheduled, in seconds."""
_ATTEMPTS = 3
"""Maximum number of measurements of a link; the last result is reported."""
_REPEAT_SECONDS = 30.0
"""Time after which no further attempt begins, in seconds: many slow links of different kinds take minutes."""
_PAUSE_SECONDS = 0.1
"""Pause between two parts of a measurement by several hosts, in seconds, above the uncertainty of their clocks."""


@dataclass
class _Tally:
    """The observations on one link."""

    pair: Pair
    requested: Link
    effective: Link
    """The requested link with the lowest rate of link, channel and access limits."""
    packet_count: int
    """Number of small packets to send."""
    channels: Hashable = None
    """Channels on which a packet spends its transmission time before the delay of the link begins; None without any."""
    turn: int | None = None
    """Links with a shared rate send in turns; the turn of this link, from 0, or None without a shared rate."""
    turn_count: int = 1
    """Number of turns of the links that share a rate with this one."""
    is_bound_by_downlink: bool = False
    """Whether the downlink has the lowest rate: it delays packets after the kernel has recorded their arrival."""
    sent_count: int = 0
    """Number of small packets sent so far."""
    delays: dict[int, float] = field(default_factory=dict)
    """One-way delays in seconds by packet number."""
    rate: float | None = None
    """Measured rate in bit/s; None without a measurement or with too few arrivals."""

    @property
    def min_gap(self) -> float:
        """Minimum time between two small packets in seconds, so that the link or channel is idle half of the time."""
        return 2 * self.effective.transmission_time(SMALL_FRAME) * self.turn_count

    @property
    def gate_seconds(self) -> float:
        """Time of a small packet at the gate before the delay of the link begins, in seconds."""
        if self.channels is None:
            return 0.0
        return self.effective.transmission_time(SMALL_FRAME)

    def measurement(self) -> LinkMeasurement:
        """Return the result for a link with both ends on this host."""
        delay = statistics.median(self.delays.values()) if self.delays else None
        if delay is not None:
            delay -= self.gate_seconds
        lost = self.sent_count - len(self.delays)
        problem = tolerance.describe_deviations(
            self.effective, self.rate, delay, self.sent_count, lost, self.gate_seconds
        )
        return LinkMeasurement(
            *self.pair,
            requested=self.requested,
            limit=self.effective.rate,
            rate=self.rate,
            delay=delay,
            loss=lost / self.sent_count if self.sent_count else None,
            packets=self.sent_count,
            problem=problem,
        )


def measure(
    links: Mapping[Pair, Link],
    devices: Mapping[str, ProbedDevice],
    routes: Mapping[Pair, Route],
) -> list[LinkMeasurement]:
    """Measure links; repeat for links outside their tolerance, since hosts may stall occasionally.

    ``devices`` has every device of the pairs, ``routes`` the channels and the rate of each link on a shared medium. The
    results have the order of ``links``.
    """
    results: dict[Pair, LinkMeasurement] = {}
    representatives = _choose_representatives(links, devices, routes)
    remaining = dict(links)
    last_start = time.monotonic() + _REPEAT_SECONDS
    for _ in range(_ATTEMPTS):
        tallies = _make_tallies(remaining, devices, routes, representatives)
        with open_sockets(devices, set(chain.from_iterable(remaining))) as ends:
            _measure_parts(tallies, representatives, routes, ends)
        for tally in tallies:
            results[tally.pair] = tally.measurement()
        # Links within their tolerance are not measured again.
        deviating = {}
        for pair, link in remaining.items():
            if results[pair].problem:
                deviating[pair] = link
        remaining = deviating
        if not remaining or time.monotonic() > last_start:
            break
    return [results[pair] for pair in links]


def _choose_representatives(
    links: Mapping[Pair, Link],
    devices: Mapping[str, ProbedDevice],
    routes: Mapping[Pair, Route],
) -> set[Pair]:
    """Return the first link of every kind: the links with equal properties, on the same shared channels."""
    link_counts = Counter(routes[pair].channels for pair in links if pair in routes)
    first_by_kind: dict[tuple[Link, Hashable], Pair] = {}
    for pair, link in links.items():
        # A link that alone uses its channel needs no kind of its own.
        shared_route = None
        if pair in routes and link_counts[routes[pair].channels] > 1:
            shared_route = routes[pair]
        kind = (_limit_rate(pair, link, devices, routes), shared_route)
        first_by_kind.setdefault(kind, pair)
    return set(first_by_kind.values())


def measure_half(
    links: Mapping[Pair, Link],
    devices: Mapping[str, ProbedDevice],
    ends: Mapping[str, ProbeSockets | RemoteReceiver],
    measurement_id: bytes,
    begin: float,
    routes: Mapping[Pair, Route],
) -> list[dict[str, Any]]:
    """Measure the local ends of links to other hosts, which measure their ends at the same time.

    ``begin`` is the common start on this host's monotonic clock, and ``measurement_id`` a common identifier of 8 bytes.
    Returns for each link that begins or ends here the keys

    - ``sent``: the number of packets sent from here;
    - ``delays``: the delays of packets received here, in seconds between the sender's clock and this host's;
    - ``rate``: the measured rate in bit/s;
    - ``asked``: the lowest rate of link, channel and access limits, in bit/s;
    - ``gate``: the time at the gate in seconds, which only the sender's host knows from ``routes``.
    """
    # Only the sender's host knows the channels of a link, and both ends must choose the same trains, so representatives
    # and trains are chosen without `routes`.
    representatives = _choose_representatives(links, devices, {})
    tallies = _make_tallies(links, devices, routes, representatives)
    _measure_parts(tallies, representatives, {}, ends, measurement_id, begin)
    return [_half_report(tally) for tally in tallies]


def _half_report(tally: _Tally) -> dict[str, Any]:
    """Return the observations of one host on a link, as plain JSON values."""
    return {
        "source": tally.pair[0],
        "destination": tally.pair[1],
        "sent": tally.sent_count,
        "delays": [*tally.delays.values()],
        "rate": tally.rate,
        "asked": tally.effective.rate,
        "gate": tally.gate_seconds,
    }


def _measure_parts(
    tallies: Sequence[_Tally],
    representatives: set[Pair],
    routes: Mapping[Pair, Route],
    ends: Mapping[str, ProbeSockets | RemoteReceiver],
    measurement_id: bytes | None = None,
    begin: float | None = None,
) -> None:
    """Measure delays and losses, then rates, and record both in the tallies.

    With ``begin``, an instant on the monotonic clock, other hosts measure the remote ends at the same time.
    """
    by_pair = {tally.pair: tally for tally in tallies}
    # Hosts exchange no message during the measurement: each computes the same schedule from the common start. A single
    # host does not wait.
    next_start = begin or -math.inf
    time.sleep(max(0.0, next_start - time.monotonic()))
    next_start += _measure_delays(tallies, ends, measurement_id, begin)
    for round_trains in _make_trains(tallies, representatives, routes, ends):
        time.sleep(max(0.0, next_start - time.monotonic()))
        for pair, rate in measure_rates(round_trains, measurement_id).items():
            by_pair[pair].rate = rate
        next_start += longest_seconds(round_trains) + _PAUSE_SECONDS


def _make_tallies(
    links: Mapping[Pair, Link],
    devices: Mapping[str, ProbedDevice],
    routes: Mapping[Pair, Route],
    representatives: set[Pair],
) -> list[_Tally]:
    """Return an empty tally for each link."""
    tallies = []
    turns, turn_counts = _assign_turns(links, devices, routes)
    for pair, requested in links.items():
        effective = _limit_rate(pair, requested, devices, routes)
        tally = _Tally(pair, requested, effective, packet_count=0)
        downlink = devices[pair[1]].downlink
        tally.is_bound_by_downlink = (
            effective.rate is not None and effective.rate == downlink
        )
        tally.turn_count = turn_counts.get(pair, 1)
        tally.turn = turns.get(pair)
        tally.channels = routes[pair].channels if pair in routes else None
        tally.packet_count = _packet_count(
            tally, len(links), is_representative=pair in representatives
        )
        tallies.append(tally)
    return tallies


def _assign_turns(
    pairs: Iterable[Pair],
    devices: Mapping[str, ProbedDevice],
    routes: Mapping[Pair, Route],
) -> tuple[dict[Pair, int], dict[Pair, int]]:
    """Return the turn of each link with a shared rate, and the number of turns among the links that share its rates.

    Links of the same turn share no rate, so their packets do not delay each other.
    """
    shared_rates = {pair: _shared_rates(pair, devices, routes) for pair in pairs}
    turns: dict[Pair, int] = {}
    turns_by_rate: dict[Hashable, set[int]] = defaultdict(set)
    for pair, rates_of_pair in shared_rates.items():
        if not rates_of_pair:
            continue
        occupied_turns: set[int] = set()
        for shared_rate in rates_of_pair:
            occupied_turns |= turns_by_rate[shared_rate]
        # The first free turn: a greedy colouring, not the least number of turns.
        turn = 0
        while turn in occupied_turns:
            turn += 1
        turns[pair] = turn
        for shared_rate in rates_of_pair:
            turns_by_rate[shared_rate].add(turn)
    turn_counts = {}
    for pair in turns:
        last_turn = 0
        for shared_rate in shared_rates[pair]:
            last_turn = max(last_turn, *turns_by_rate[shared_rate])
        turn_counts[pair] = 1 + last_turn
    return turns, turn_counts


def _shared_rates(
    pair: Pair, devices: Mapping[str, ProbedDevice], routes: Mapping[Pair, Route]
) -> set[Hashable]:
    """Return identifiers of the rates that a link shares with others: uplink, downlink, channels."""
    source, destination = pair
    shared: set[Hashable] = set(routes[pair].channels) if pair in routes else set()
    if devices[source].uplink is not None:
        shared.add(("uplink", source))
    if devices[destination].downlink is not None:
        shared.add(("downlink", destination))
    return shared


def _make_trains(
    tallies: Sequence[_Tally],
    representatives: set[Pair],
    routes: Mapping[Pair, Route],
    ends: Mapping[str, ProbeSockets | RemoteReceiver],
) -> list[list[Train]]:
    """Return a train for each representative with a rate; the trains of one inner list are sent at the same time."""
    trains = {}
    for tally in tallies:
        link = tally.effective
        if link.up and link.rate and tally.pair in representatives:
            trains[tally.pair] = make_train(
                tally.pair,
                link,
                ends,
                is_bound_by_downlink=tally.is_bound_by_downlink,
            )
    concurrent_trains = []
    for pairs_of_round in split_into_rounds(list(trains), routes):
        # In the order of the links, not of the set: all hosts number the trains alike.
        round_trains = [trains[pair] for pair in trains if pair in pairs_of_round]
        concurrent_trains.append(round_trains)
    return concurrent_trains


def _limit_rate(
    pair: Pair,
    link: Link,
    devices: Mapping[str, ProbedDevice],
    routes: Mapping[Pair, Route],
) -> Link:
    """Return a link with the lowest rate of link, channel and access limits."""
    source, destination = pair
    channel_rate = routes[pair].rate if pair in routes else None
    rate = least_rate(
        link.rate, devices[source].uplink, devices[destination].downlink, channel_rate
    )
    return replace(link, rate=rate)


def split_into_rounds(
    pairs: Sequence[Pair], routes: Mapping[Pair, Route] | None = None
) -> list[set[Pair]]:
    """Split links into rounds whose links share neither a device nor a channel.

    >>> [sorted(links) for links in split_into_rounds([("a", "b"), ("b", "a"), ("c", "d")])]
    [[('a', 'b'), ('c', 'd')], [('b', 'a')]]
    """
    # Each round with its links, and the devices and channels that they occupy.
    rounds: list[tuple[set[Pair], set[Hashable]]] = []
    for pair in pairs:
        occupied: set[Hashable] = {*pair}
        if routes and pair in routes:
            occupied.add(routes[pair].channels)
        # The first round with room: a greedy choice, not the least number of rounds.
        for round_pairs, round_occupied in rounds:
            if not round_occupied & occupied:
                round_pairs.add(pair)
                round_occupied.update(occupied)
                break
        else:
            rounds.append(({pair}, occupied))
    return [round_pairs for round_pairs, _ in rounds]


def _packet_count(tally: _Tally, link_count: int, *, is_representative: bool) -> int:
    """Return the number of small packets for a link, if ``link_count`` links are measured at once."""
    link = tally.effective
    equal_share = int(_PACKETS_PER_SECOND * _DELAY_SECONDS / link_count)
    packets = max(_FEWEST_PACKETS, min(_DELAY_PACKETS, equal_share))
    loss = expected_loss(link)
    # Only the representative sends more packets, since links of a kind have the same loss.
    if link.up and loss and is_representative:
        # With thirty lost packets, the relative error of the loss is about one half.
        packets = max(packets, min(2000, round(30 / loss)))
    if link.rate:
        fitting = int(_DELAY_SECONDS / tally.min_gap)
        packets = min(packets, max(_FEWEST_PACKETS, fitting))
    return packets


def _measure_delays(
    tallies: Sequence[_Tally],
    ends: Mapping[str, ProbeSockets | RemoteReceiver],
    measurement_id: bytes | None,
    begin: float | None,
) -> float:
    """Send the small packets of all links, interleaved, and record the delay of each.

    Returns the planned duration in seconds, with the pause after it; equal on all participating hosts.
    """
    began = time.monotonic()
    exchange = _DelayExchange(tallies, ends, measurement_id or os.urandom(8))
    for index, tally in enumerate(tallies):
        # The kernel resolves hardware addresses for this first packet, whose number receivers ignore.
        exchange.send(index, tally.packet_count)
    pause = max(tally.min_gap for tally in tallies) / 2
    time.sleep(0.01 + pause)
    starts, gaps = _schedule(tallies, began + 0.015 + pause)
    last_sent = 0.0
    for start, gap, tally in zip(starts, gaps, tallies, strict=True):
        last_sent = max(last_sent, start + gap * (tally.packet_count - 1))
    arrival_seconds = 0.0
    for tally in tallies:
        longest = longest_delay(tally.effective) + tally.min_gap
        arrival_seconds = max(arrival_seconds, longest)
    arrival_seconds += 0.1  # margin
    planned_end = last_sent + arrival_seconds
    # Other hosts follow the same schedule; a single host may fall behind without harm.
    latest_end = planned_end
    if begin is None:
        latest_end += _LAG_SECONDS
    exchange.start(starts, gaps)
    exchange.finish(arrival_seconds, planned_end, latest_end)
    return planned_end - began + _PAUSE_SECONDS


class _DelayExchange:
    """The exchange of the small packets of all links.

    `start` schedules the first packet of each link, and `finish` sends and receives until all have arrived.
    """

    def __init__(
        self,
        tallies: Sequence[_Tally],
        ends: Mapping[str, ProbeSockets | RemoteReceiver],
        measurement_id: bytes,
    ) -> None:
        self._tallies = tallies
        self._ends = ends
        self._measurement_id = measurement_id
        self._arriving: list[_Tally] = []
        """Tallies of the links whose packets arrive on this host."""
        for tally in tallies:
            if isinstance(ends[tally.pair[1]], ProbeSockets):
                self._arriving.append(tally)
        self._gaps: Sequence[float] = ()
        self._upcoming: list[tuple[float, int, int]] = []
        """Heap of (instant, link index, packet number) of packets to send."""

    def send(self, index: int, number: int) -> bool:
        """Send a packet of a link; return False if the sender is on another host."""
        pair = self._tallies[index].pair
        source = self._ends[pair[0]]
        destination = self._ends[pair[1]]
        if isinstance(source, RemoteReceiver):
            return False
        content = CONTENT.pack(self._measurement_id, index, number, time.monotonic())
        # A packet refused by a full buffer counts as lost, as on any host that is too slow.
        source.send(content, destination.target)
        return True

    def start(self, starts: Sequence[float], gaps: Sequence[float]) -> None:
        """Schedule the first packet of each link."""
        self._gaps = gaps
        for index, start in enumerate(starts):
            heapq.heappush(self._upcoming, (start, index, 0))

    def finish(
        self, arrival_seconds: float, planned_end: float, latest_end: float
    ) -> None:
        """Send the remaining packets and receive until all packets have arrived, or no more are expected.

        Waits for arrivals until ``planned_end``, or for ``arrival_seconds`` after a packet that was sent late, but not
        longer than ``latest_end``. The ends are instants on the monotonic clock.
        """
        end = planned_end
        sockets_here = receiving_sockets(self._ends.values())
        with Listener(sockets_here) as listener:
            while True:
                now = time.monotonic()
                if now >= (latest_end if self._upcoming else end):
                    break
                if self._send_due(now):
                    # A packet sent behind the schedule has the same time to arrive as the others.
                    end = max(end, min(latest_end, now + arrival_seconds))
                elif not self._upcoming and self._have_all_arrived():
                    break
                following = self._upcoming[0][0] if self._upcoming else end
                for receiver in listener.ready(following - time.monotonic()):
                    self._note_arrivals(receiver)
        # Packets may have arrived while this process was not running.
        for receiver in sockets_here:
            self._note_arrivals(receiver)

    def _have_all_arrived(self) -> bool:
        return all(len(tally.delays) == tally.packet_count for tally in self._arriving)

    def _send_due(self, now: float) -> bool:
        """Send the next packet and schedule the following one of its link; return False if none is due."""
        if not self._upcoming or self._upcoming[0][0] > now:
            return False
        when, index, number = heapq.heappop(self._upcoming)
        tally = self._tallies[index]
        tally.sent_count += self.send(index, number)
        if number + 1 < tally.packet_count:
            # After a stall, keep the packets apart: on a slow link the second would wait for the first.
            following = max(when + self._gaps[index], now + tally.min_gap)
            heapq.heappush(self._upcoming, (following, index, number + 1))
        return True

    def _note_arrivals(self, receiver: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data = receiver.recv(FRAME)
                now = time.monotonic()
                if len(data) != CONTENT.size:
                    continue
                received_id, index, number, sent_at = CONTENT.unpack(data)
                # Late packets of an earlier measurement have another identifier.
                if received_id != self._measurement_id:
                    continue
                tally = self._tallies[index]
                if number < tally.packet_count:
                    tally.delays.setdefault(number, now - sent_at)


def _schedule(
    tallies: Sequence[_Tally], start: float
) -> tuple[list[float], list[float]]:
    """Return the instant of the first small packet, and the time between two, for each link in seconds."""
    total_packets = sum(tally.packet_count for tally in tallies)
    seconds = max(0.1, total_packets / _PACKETS_PER_SECOND)
    starts, gaps = [], []
    for index, tally in enumerate(tallies):
        gap = max(seconds / tally.packet_count, tally.min_gap)
        # The links divide the time between two packets: with a shared rate by their turns, else by their position.
        slot = index
        slot_count = len(tallies)
        if tally.turn is not None:
            slot = tally.turn
            slot_count = tally.turn_count
        starts.append(start + gap * slot / slot_count)
        gaps.append(gap)
    return starts, gaps
