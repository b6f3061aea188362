"""The combined shapers of several hosts: each shapes the traffic that its devices send and receive.

The delay of the real path between two hosts is measured, and only the remaining delay is emulated.
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
"""A path: (source host, destination host)."""
T = TypeVar("T")
_ATTEMPTS = 3
_AHEAD = 0.3
"""Time until a measurement begins, in seconds; by then every host has its request."""
_LEAST = 5e-5
"""Unknown part of a round trip, in seconds."""


def combined(
    asked: Mapping[Pair, Link],
    halves: Mapping[str, Iterable[Mapping[str, Any]]],
    host: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[LinkMeasurement], dict[Way, tuple[float, float]]]:
    """Combine the measurements of hosts for links between them; also return the result of `_between`.

    ``halves`` are the results of `testbed_controller.shaping.probes.measure_half` by host, ``host`` is the host of each
    device, and ``offsets`` are the offsets of the hosts' clocks from ours in seconds.
    """
    reports = {
        (name, each["source"], each["destination"]): each
        for name, half in halves.items()
        for each in half
    }
    raw: dict[Pair, list[float]] = {}
    for source, destination in asked:
        gate = reports[host[source], source, destination]["gate"]
        raw[source, destination] = [
            each - gate
            for each in reports[host[destination], source, destination]["delays"]
        ]
    moved = _between(
        {
            pair: (link, statistics.median(raw[pair]))
            for pair, link in asked.items()
            if raw[pair]
        },
        host,
    )
    measured = []
    for (source, destination), link in asked.items():
        way, here = (
            (host[source], host[destination]),
            reports[host[destination], source, destination],
        )
        difference, _ = moved.get(way, (offsets[way[1]] - offsets[way[0]], 0.0))
        there = reports[way[0], source, destination]
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
                problem=tolerance.describe_deviations(
                    slowest, here["rate"], delay, sent, lost, there["gate"]
                ),
            )
        )
    return measured, moved


def _between(
    raw: Mapping[Pair, tuple[Link, float]], host: Mapping[str, str]
) -> dict[Way, tuple[float, float]]:
    """Return the clock difference between two hosts, and the round trip beyond the requested delays, in seconds.

    A delay above the request in one direction and below in the other results from the clocks. Packets of the data
    network reveal it more accurately than the connections of the docker contexts. Only pairs of hosts with packets in
    both directions are included.
    """
    beyond: dict[Way, list[float]] = {}
    for pair, (link, delay) in raw.items():
        beyond.setdefault((host[pair[0]], host[pair[1]]), []).append(
            delay - median_delay(link)
        )
    excess = {way: statistics.median(found) for way, found in beyond.items()}
    pairs = [way for way in excess if way[::-1] in excess]
    return {
        (a, b): (
            (excess[a, b] - excess[b, a]) / 2,
            max(0.0, excess[a, b] + excess[b, a]),
        )
        for a, b in pairs
    }


def samples(links: Mapping[Pair, Link], host: Mapping[str, str]) -> list[Pair]:
    """Return the most informative link for each path between hosts: fast, and with little random delay."""
    best: dict[Way, tuple[tuple[float, float, float], Pair]] = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        if way[0] != way[1] and link.up:
            rank = (link.jitter, link.loss, -(link.rate or MAX_RATE))
            best[way] = min(best.get(way, (rank, pair)), (rank, pair))
    return [pair for _, pair in best.values()]


def path_delays(
    measured: Iterable[LinkMeasurement], host: Mapping[str, str]
) -> dict[Way, float]:
    """Return the delay of each path in seconds beyond the request, given measurements of unmodified links."""
    return {
        (host[each.source], host[each.destination]): max(
            0.0, each.delay - median_delay(each.requested)
        )
        for each in measured
        if each.delay is not None
    }


def imposed_links(
    links: Mapping[Pair, Link], host: Mapping[str, str], delays: Mapping[Way, float]
) -> dict[Pair, Link]:
    """Return the links to emulate: the requested links minus the delays of their paths.

    Raises InputError for a link with a shorter delay than its path.
    """
    imposed = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        path_delay = delays.get(way, 0.0)
        if link.up and path_delay > link.delay + tolerance.delay_tolerance(link.delay):
            raise InputError(
                f"the link {pair[0]} -> {pair[1]} needs a delay of {link.delay * 1e3:g} ms, but the path from "
                f"{way[0]} to {way[1]} has {path_delay * 1e3:.2f} ms: put both on one host with --place, or give "
                "the link a longer delay"
            )
        imposed[pair] = (
            replace(link, delay=max(0.0, link.delay - path_delay))
            if path_delay
            else link
        )
    return imposed


class NothingPasses(HostError):  # noqa: N818 - a state of the way
    """Packets of the data network do not pass from one host to another, or only ``small`` ones."""

    def __init__(self, source: str, destination: str, small: bool = False) -> None:
        super().__init__(f"no packets pass from {source} to {destination}")
        self.ends = source, destination
        self.small = small


class Shapers:
    """The shapers of several hosts, with the interface of `Shaper`."""

    def __init__(
        self,
        parts: Mapping[str, Shaper],
        state: RunState,
        channels: Mapping[str, Channel],
        links: Mapping[Pair, Link],
        lost: Collection[str] = (),
    ) -> None:
        """``links`` are the links of the scenario; ``lost`` hosts are skipped."""
        self._lost = lost
        self._parts = parts
        self._host = {
            name: host for host, names in state.hosts.items() for name in names
        }
        self._ways = {(a, b): delay for a, b, delay in state.ways}
        self._channels = channels
        self._asked = dict(links)

    def crosses(self, pair: Pair) -> bool:
        """Return whether a link leads from one host to another."""
        return self._host[pair[0]] != self._host[pair[1]]

    def imposed(self, links: Mapping[Pair, Link]) -> dict[Pair, Link]:
        """Return the links to emulate for the requested links; see `imposed_links`."""
        return imposed_links(links, self._host, self._ways)

    def measure_path_delays(self) -> list[tuple[str, str, float]]:
        """Measure the delays of the paths between hosts, while links are emulated as requested.

        Raises `NothingPasses` if no packets or no full frames arrive over a path.
        """
        measurements = self._probe_between_hosts(samples(self._asked, self._host))
        limited, rates = [], []
        for each in measurements:
            if each.delay is None:
                if expected_loss(each.requested) < 1:
                    raise NothingPasses(
                        self._host[each.source], self._host[each.destination]
                    )
            elif each.requested.rate:
                limited.append(each)
                rates.append(each.rate)
        # Only one link of each kind has a rate measurement.
        if limited and not any(rates):
            raise NothingPasses(
                self._host[limited[0].source],
                self._host[limited[0].destination],
                small=True,
            )
        return [
            (*way, delay)
            for way, delay in path_delays(measurements, self._host).items()
        ]

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links while running; other links are unaffected."""
        imposed = self.imposed(links)
        self._asked |= links
        self._call_all(
            lambda host, shaper: shaper.set(
                {p: link for p, link in imposed.items() if self._is_at(p, host)}
            )
        )

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure links between the devices themselves."""
        wanted, across = list(pairs), []
        within: dict[str, list[Pair]] = defaultdict(list)
        for pair in wanted:
            if self.crosses(pair):
                across.append(pair)
            else:
                within[self._host[pair[0]]].append(pair)
        measured = self._probe_between_hosts(across) if across else []
        for host, own in within.items():
            measured += self._parts[host].probe(own)
        by_pair = {(each.source, each.destination): each for each in measured}
        return [by_pair[pair] for pair in wanted]

    def _probe_between_hosts(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links between hosts; repeat for links outside their tolerance."""
        latest: dict[Pair, LinkMeasurement] = {}
        again = list(pairs)
        for _ in range(_ATTEMPTS):
            if not again:
                break
            for each in self._measure_once(again):
                latest[each.source, each.destination] = each
            again = [pair for pair in again if latest[pair].problem]
        return [latest[pair] for pair in pairs]

    def _measure_once(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        asked = {pair: self._asked[pair] for pair in pairs}
        run, ends = secrets.token_hex(8), {name for pair in pairs for name in pair}
        hosts = {
            host: self._parts[host]
            for host in dict.fromkeys(self._host[name] for name in sorted(ends))
        }
        with ThreadPoolExecutor(len(hosts)) as pool:
            opened = pool.map(
                lambda shaper: shaper.open_ends(run, pairs), hosts.values()
            )
            ports = {name: port for found in opened for name, port in found.items()}
            begin = time.monotonic() + _AHEAD
            offsets = {
                host: self._channels[host].clock.offset.there(begin) - begin
                for host in hosts
            }
            halves = pool.map(
                lambda host: hosts[host].probe_half(
                    run, pairs, ports, begin + offsets[host]
                ),
                hosts,
            )
            found, moved = combined(
                asked, dict(zip(hosts, halves, strict=True)), self._host, offsets
            )
        self._align_clocks(begin, offsets, moved)
        return found

    def _align_clocks(
        self,
        at: float,
        offsets: Mapping[str, float],
        moved: Mapping[tuple[str, str], tuple[float, float]],
    ) -> None:
        """Set the clocks from packets between hosts, which are more accurate than the contexts' connections.

        This aligns the hosts' clocks with each other; a common error of all hosts affects no event.
        """
        first = next(iter(offsets))
        for host in offsets:
            if (first, host) in moved:
                difference, round_trip = moved[first, host]
                # The paths' own delays, now part of the requested ones, may also be asymmetric.
                round_trip += self._ways.get((first, host), 0.0) + self._ways.get(
                    (host, first), 0.0
                )
                self._channels[host].clock.pin(
                    at, offsets[first] + difference, round_trip + _LEAST
                )
                self._channels[first].clock.pin(at, offsets[first], round_trip + _LEAST)

    def renew(self) -> None:
        """Renew the lease of the containers."""
        self._call_all(lambda _host, shaper: shaper.renew())

    def show(self) -> dict[str, Any]:
        """Return the result of `Shaper.show` for all devices and links."""
        shown = self._call_all(lambda _host, shaper: shaper.show())
        links = {
            (link["source"], link["destination"]): link
            for each in shown
            for link in each["links"]
        }
        return {
            "backend": ", ".join(sorted({each["backend"] for each in shown})),
            "devices": {
                name: value for each in shown for name, value in each["devices"].items()
            },
            "links": [*links.values()],
        }

    def host_load(self, *, reset: bool = False) -> dict[str, Any]:
        """Return the processor load of the busiest host."""
        return merge_statistics(
            self._call_all(lambda _host, shaper: shaper.host_load(reset=reset))
        )

    def statistics(self, *, reset: bool = False) -> dict[str, Any]:
        """Return queue drops and sent bytes by device, and the maximum of values per host.

        Also ``hosts``, the devices of each host; ``ways``, the delays of paths in seconds; and ``clocks``, the
        uncertainty of each clock in seconds.
        """
        hosts: dict[str, list[str]] = {}
        for name, host in self._host.items():
            hosts.setdefault(host, []).append(name)
        reports = self._call_all(lambda _host, shaper: shaper.statistics(reset=reset))
        return {
            **merge_statistics(reports),
            "processor_seconds": sum(each["processor_seconds"] for each in reports),
            "hosts": hosts,
            "ways": [[*way, delay] for way, delay in self._ways.items()],
            "clocks": {
                host: channel.clock.offset.uncertainty
                for host, channel in self._channels.items()
            },
        }

    def _is_at(self, pair: Pair, host: str) -> bool:
        return host in (self._host[pair[0]], self._host[pair[1]])

    def _call_all(self, act: Callable[[str, Shaper], T]) -> list[T]:
        there = [
            (host, shaper)
            for host, shaper in self._parts.items()
            if host not in self._lost
        ]
        with ThreadPoolExecutor(len(self._parts)) as pool:
            return list(pool.map(lambda each: act(*each), there))


def merge_statistics(statistics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of several shapers: the largest number, and the first text, of each key."""
    result: dict[str, Any] = {}
    for each in statistics:
        for name, value in each.items():
            known = result.get(name)
            if isinstance(value, dict):
                result[name] = merge_statistics([known or {}, value])
            elif known is None or (isinstance(value, int | float) and value > known):
                result[name] = value
    return result
