"""The shapers of several hosts as one: each shapes what its devices send, and what arrives there.

What the way between two hosts adds to links that cross it is measured, and only the rest imposed.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from testbed.common.errors import HostError, InputError
from testbed.network.checks import MAX_RATE
from testbed.network.impairments import expected_loss, median_delay
from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.hosts.channel import Channel
from testbed_controller.lab.clients import Shaper
from testbed_controller.lab.runstate import RunState
from testbed_controller.shaping import tolerance

Way = tuple[str, str]
"""From one host to another."""
T = TypeVar("T")
_ATTEMPTS = 3
_AHEAD = 0.3
"""Seconds until a measurement begins: every host has been asked for it by then."""
_LEAST = 5e-5
"""Seconds of a round trip of which nothing is known."""


def combined(
    asked: Mapping[Pair, Link],
    halves: Mapping[str, Iterable[Mapping[str, Any]]],
    host: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[LinkMeasurement], dict[Way, tuple[float, float]]]:
    """Put together what hosts measured of links between them; also return what `_between` does.

    ``halves`` are those of `testbed_controller.shaping.probes.measure_half` by host, ``host`` says where each device
    is, and ``offsets`` what each host's clock shows beyond ours, in seconds.
    """
    found = {(name, each["source"], each["destination"]): each for name, half in halves.items() for each in half}
    raw: dict[Pair, list[float]] = {}
    for source, destination in asked:
        gate = found[host[source], source, destination]["gate"]
        raw[source, destination] = [each - gate for each in found[host[destination], source, destination]["delays"]]
    moved = _between({pair: (link, statistics.median(raw[pair])) for pair, link in asked.items() if raw[pair]}, host)
    measured = []
    for (source, destination), link in asked.items():
        way, here = (host[source], host[destination]), found[host[destination], source, destination]
        difference, _ = moved.get(way, (offsets[way[1]] - offsets[way[0]], 0.0))
        there = found[way[0], source, destination]
        delays = [each - difference for each in raw[source, destination]]
        sent = there["sent"]
        delay = statistics.median(delays) if delays else None
        slowest, lost = replace(link, rate=here["asked"]), sent - len(delays)
        measured.append(
            LinkMeasurement(
                source,
                destination,
                requested=link,
                limit=slowest.rate,
                rate=here["rate"],
                delay=delay,
                loss=lost / sent if sent else None,
                packets=sent,
                problem=tolerance.problem(slowest, here["rate"], delay, sent, lost, there["gate"]),
            )
        )
    return measured, moved


def _between(raw: Mapping[Pair, tuple[Link, float]], host: Mapping[str, str]) -> dict[Way, tuple[float, float]]:
    """Return what the clock at the end of a way shows beyond that at its beginning, where packets went both ways.

    And the round trip that the ways have beside what is asked of their links.

    What is more than asked on one way and less on the other is the clocks'. Packets of the data network say it much
    better than the connections of the contexts do.
    """
    beyond: dict[Way, list[float]] = {}
    for pair, (link, delay) in raw.items():
        beyond.setdefault((host[pair[0]], host[pair[1]]), []).append(delay - median_delay(link))
    least = {way: statistics.median(found) for way, found in beyond.items()}
    both = [way for way in least if way[::-1] in least]
    return {(a, b): ((least[a, b] - least[b, a]) / 2, max(0.0, least[a, b] + least[b, a])) for a, b in both}


def samples(links: Mapping[Pair, Link], host: Mapping[str, str]) -> list[Pair]:
    """Return for each way between hosts the link that says most of it: fast, and with little chance in its delay."""
    best: dict[Way, tuple[tuple[float, float, float], Pair]] = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        if way[0] != way[1] and link.up:
            rank = (link.jitter, link.loss, -(link.rate or MAX_RATE))
            best[way] = min(best.get(way, (rank, pair)), (rank, pair))
    return [pair for _, pair in best.values()]


def ways(measured: Iterable[LinkMeasurement], host: Mapping[str, str]) -> dict[Way, float]:
    """Return by how many seconds more than asked each way delays, given measurements of links imposed as asked."""
    return {
        (host[each.source], host[each.destination]): max(0.0, each.delay - median_delay(each.requested))
        for each in measured
        if each.delay is not None
    }


def imposed_links(links: Mapping[Pair, Link], host: Mapping[str, str], delays: Mapping[Way, float]) -> dict[Pair, Link]:
    """Return what shapers are to do so that links are as asked: what is asked without what their ways have already.

    Raises InputError for a link that is asked to be shorter than its way.
    """
    found = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        there = delays.get(way, 0.0)
        if link.up and there > link.delay + tolerance.delay_tolerance(link.delay):
            raise InputError(
                f"the link {pair[0]} -> {pair[1]} asks for a delay of {link.delay * 1e3:g} ms, and the way from "
                f"{way[0]} to {way[1]} has {there * 1e3:.2f} ms already: put both on one host with --place, or give "
                "the link a longer delay"
            )
        found[pair] = replace(link, delay=max(0.0, link.delay - there)) if there else link
    return found


class NothingPasses(HostError):  # noqa: N818 - a state of the way
    """Packets of the data network do not get from one host to another, or only ``small`` ones."""

    def __init__(self, source: str, destination: str, small: bool = False) -> None:
        super().__init__(f"nothing passes from {source} to {destination}")
        self.ends = source, destination
        self.small = small


class Shapers:
    """As `Shaper`, of several."""

    def __init__(
        self,
        parts: Mapping[str, Shaper],
        state: RunState,
        channels: Mapping[str, Channel],
        links: Mapping[Pair, Link],
        lost: Collection[str] = (),
    ) -> None:
        """``links`` are those that the scenario asks for; nothing is asked of hosts while they are ``lost``."""
        self._lost = lost
        self._parts = parts
        self._host = {name: host for host, names in state.hosts.items() for name in names}
        self._ways = {(a, b): delay for a, b, delay in state.ways}
        self._channels = channels
        self._asked = dict(links)

    def crosses(self, pair: Pair) -> bool:
        """Say whether a link leads from one host to another."""
        return self._host[pair[0]] != self._host[pair[1]]

    def imposed(self, links: Mapping[Pair, Link]) -> dict[Pair, Link]:
        """Return what shapers are to do to links so that they are as asked; see `imposed_links`."""
        return imposed_links(links, self._host, self._ways)

    def measured_ways(self) -> list[tuple[str, str, float]]:
        """Measure what the ways between the hosts add to links; imposed are those that the scenario asks for.

        Raises `NothingPasses` where nothing arrived over one of them, or no full frame.
        """
        found = self._across(samples(self._asked, self._host))
        limited, rates = [], []
        for each in found:
            if each.delay is None:
                if expected_loss(each.requested) < 1:
                    raise NothingPasses(self._host[each.source], self._host[each.destination])
            elif each.requested.rate:
                limited.append(each)
                rates.append(each.rate)
        # Of links of one kind one has its rate measured.
        if limited and not any(rates):
            raise NothingPasses(self._host[limited[0].source], self._host[limited[0].destination], small=True)
        return [(*way, delay) for way, delay in ways(found, self._host).items()]

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links, live; no other link notices."""
        imposed = self.imposed(links)
        self._asked |= links
        self._each(lambda host, shaper: shaper.set({p: link for p, link in imposed.items() if self._is_at(p, host)}))

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure these links between the devices themselves."""
        wanted, across = list(pairs), []
        within: dict[str, list[Pair]] = defaultdict(list)
        for pair in wanted:
            if self.crosses(pair):
                across.append(pair)
            else:
                within[self._host[pair[0]]].append(pair)
        measured = self._across(across) if across else []
        for host, own in within.items():
            measured += self._parts[host].probe(own)
        found = {(each.source, each.destination): each for each in measured}
        return [found[pair] for pair in wanted]

    def _across(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links between hosts; what is outside its tolerance again, since a host may stumble once."""
        found: dict[Pair, LinkMeasurement] = {}
        again = list(pairs)
        for _ in range(_ATTEMPTS):
            if not again:
                break
            for each in self._measure_once(again):
                found[each.source, each.destination] = each
            again = [pair for pair in again if found[pair].problem]
        return [found[pair] for pair in pairs]

    def _measure_once(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        asked = {pair: self._asked[pair] for pair in pairs}
        run, ends = secrets.token_hex(8), {name for pair in pairs for name in pair}
        hosts = {host: self._parts[host] for host in dict.fromkeys(self._host[name] for name in sorted(ends))}
        with ThreadPoolExecutor(len(hosts)) as pool:
            opened = pool.map(lambda shaper: shaper.open_ends(run, pairs), hosts.values())
            ports = {name: port for found in opened for name, port in found.items()}
            begin = time.monotonic() + _AHEAD
            offsets = {host: self._channels[host].clock.offset.there(begin) - begin for host in hosts}
            halves = pool.map(lambda host: hosts[host].probe_half(run, pairs, ports, begin + offsets[host]), hosts)
            found, moved = combined(asked, dict(zip(hosts, halves, strict=True)), self._host, offsets)
        self._align(begin, offsets, moved)
        return found

    def _align(
        self, at: float, offsets: Mapping[str, float], moved: Mapping[tuple[str, str], tuple[float, float]]
    ) -> None:
        """Set the clocks by what packets between the hosts say, which is more than the contexts' connections do.

        So clocks agree among the hosts; by how much all of them are off together, no event can show.
        """
        first = next(iter(offsets))
        for host in offsets:
            if (first, host) in moved:
                difference, round_trip = moved[first, host]
                # What the ways have themselves is no longer beside what is asked, and as little known to be equal.
                round_trip += self._ways.get((first, host), 0.0) + self._ways.get((host, first), 0.0)
                self._channels[host].clock.pin(at, offsets[first] + difference, round_trip + _LEAST)
                self._channels[first].clock.pin(at, offsets[first], round_trip + _LEAST)

    def renew(self) -> None:
        """Let the containers live for another lease."""
        self._each(lambda _host, shaper: shaper.renew())

    def show(self) -> dict[str, Any]:
        """Return what `Shaper.show` does, of all devices and links."""
        shown = self._each(lambda _host, shaper: shaper.show())
        links = {(link["source"], link["destination"]): link for each in shown for link in each["links"]}
        return {
            "backend": ", ".join(sorted({each["backend"] for each in shown})),
            "devices": {name: value for each in shown for name, value in each["devices"].items()},
            "links": [*links.values()],
        }

    def host_load(self, reset: bool = False) -> dict[str, Any]:
        """Return how busy the processors of the busiest host were."""
        return merged(self._each(lambda _host, shaper: shaper.host_load(reset)))

    def statistics(self, reset: bool = False) -> dict[str, Any]:
        """Return drops at queues and bytes sent by device, and of what is one figure a host, the largest.

        Also ``hosts``, the devices of each; ``ways``, the delay beneath the links from one to another in seconds; and
        ``clocks``, by how many seconds each may be off.
        """
        hosts: dict[str, list[str]] = {}
        for name, host in self._host.items():
            hosts.setdefault(host, []).append(name)
        found = self._each(lambda _host, shaper: shaper.statistics(reset))
        return {
            **merged(found),
            "processor_seconds": sum(each["processor_seconds"] for each in found),
            "hosts": hosts,
            "ways": [[*way, delay] for way, delay in self._ways.items()],
            "clocks": {host: channel.clock.offset.uncertainty for host, channel in self._channels.items()},
        }

    def _is_at(self, pair: Pair, host: str) -> bool:
        return host in (self._host[pair[0]], self._host[pair[1]])

    def _each(self, act: Callable[[str, Shaper], T]) -> list[T]:
        there = [(host, shaper) for host, shaper in self._parts.items() if host not in self._lost]
        with ThreadPoolExecutor(len(self._parts)) as pool:
            return list(pool.map(lambda each: act(*each), there))


def merged(statistics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several shapers say as one: of each number the largest, of each text the first."""
    found: dict[str, Any] = {}
    for each in statistics:
        for name, value in each.items():
            known = found.get(name)
            if isinstance(value, dict):
                found[name] = merged([known or {}, value])
            elif known is None or (isinstance(value, int | float) and value > known):
                found[name] = value
    return found
