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
from itertools import chain
from operator import methodcaller
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
"""Number of measurements of a set of links across hosts before the last result stands."""
_AHEAD_SECONDS = 0.3
"""Time until a measurement begins, in seconds; by then every host has its request."""
_MIN_UNCERTAINTY = 5e-5
"""Uncertainty of a clock in seconds, even if the round trip shows none."""


def combine_halves(
    asked: Mapping[Pair, Link],
    halves: Mapping[str, Iterable[Mapping[str, Any]]],
    host: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[LinkMeasurement], dict[Way, tuple[float, float]]]:
    """Combine the measurements of links between hosts; also return the result of `_clock_differences`.

    ``halves`` are the results of `testbed_controller.shaping.probes.measure_half` by host, ``host`` is the host of each
    device, and ``offsets`` are the offsets of the hosts' clocks from ours in seconds.
    """
    sent_by, received_by = _reports_by_end(halves, host)
    raw: dict[Pair, list[float]] = {}
    for pair in asked:
        # Only the sender's host knows the time at the gate, and only the receiver's host the arrivals.
        gate = sent_by[pair]["gate"]
        raw[pair] = [delay - gate for delay in received_by[pair]["delays"]]
    medians = {}
    for pair, link in asked.items():
        if raw[pair]:
            medians[pair] = (link, statistics.median(raw[pair]))
    differences = _clock_differences(medians, host)
    measured = []
    for pair, link in asked.items():
        source_host, destination_host = host[pair[0]], host[pair[1]]
        # Less accurate, but known without packets in both directions.
        by_contexts = offsets[destination_host] - offsets[source_host]
        difference, _ = differences.get(
            (source_host, destination_host), (by_contexts, 0.0)
        )
        # A time stamp of each host: the difference of their clocks is part of every raw delay.
        delays = [delay - difference for delay in raw[pair]]
        measured.append(
            _make_measurement(pair, link, delays, sent_by[pair], received_by[pair])
        )
    return measured, differences


def _reports_by_end(
    halves: Mapping[str, Iterable[Mapping[str, Any]]], host: Mapping[str, str]
) -> tuple[dict[Pair, Mapping[str, Any]], dict[Pair, Mapping[str, Any]]]:
    """Return the reports of the senders' hosts and of the receivers' hosts, by link."""
    sent_by: dict[Pair, Mapping[str, Any]] = {}
    received_by: dict[Pair, Mapping[str, Any]] = {}
    for name, half in halves.items():
        for report in half:
            source, destination = report["source"], report["destination"]
            if host[source] == name:
                sent_by[source, destination] = report
            if host[destination] == name:
                received_by[source, destination] = report
    return sent_by, received_by


def _make_measurement(
    pair: Pair,
    link: Link,
    delays: Sequence[float],
    sent_by: Mapping[str, Any],
    received_by: Mapping[str, Any],
) -> LinkMeasurement:
    """Return the measurement of a link from the reports of the sender's and the receiver's host."""
    sent = sent_by["sent"]
    lost = sent - len(delays)
    delay = statistics.median(delays) if delays else None
    rate = received_by["rate"]
    slowest = replace(link, rate=received_by["asked"])
    problem = tolerance.describe_deviations(
        slowest, rate, delay, sent, lost, sent_by["gate"]
    )
    return LinkMeasurement(
        *pair,
        requested=link,
        limit=slowest.rate,
        rate=rate,
        delay=delay,
        loss=lost / sent if sent else None,
        packets=sent,
        problem=problem,
    )


def _clock_differences(
    raw: Mapping[Pair, tuple[Link, float]], host: Mapping[str, str]
) -> dict[Way, tuple[float, float]]:
    """Return the clock difference between two hosts, and the round trip beyond the requested delays, in seconds.

    A delay above the request in one direction and below in the other results from the clocks. Packets of the data
    network reveal the difference more accurately than the connections of the docker contexts. Only pairs of hosts with
    packets in both directions are included.
    """
    beyond: dict[Way, list[float]] = defaultdict(list)
    for (source, destination), (link, delay) in raw.items():
        beyond[host[source], host[destination]].append(delay - median_delay(link))
    excess = {way: statistics.median(delays) for way, delays in beyond.items()}
    differences = {}
    for (a, b), there in excess.items():
        back = excess.get((b, a))
        if back is not None:
            # As in NTP: the clocks add to one direction what they take from the other.
            differences[a, b] = ((there - back) / 2, max(0.0, there + back))
    return differences


def sample_links(links: Mapping[Pair, Link], host: Mapping[str, str]) -> list[Pair]:
    """Return the most informative link for each path between hosts: fast, and with little random delay.

    >>> host = {"a": "node1", "b": "node2", "c": "node2"}
    >>> sample_links({("a", "b"): Link(rate=1e6), ("a", "c"): Link(rate=1e9)}, host)
    [('a', 'c')]
    """
    best: dict[Way, tuple[tuple[float, float, float], Pair]] = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        if way[0] == way[1] or not link.up:
            continue
        # The lowest rank is the best: jitter first, since a random delay hides that of the path.
        rank = (link.jitter, link.loss, -(link.rate or MAX_RATE))
        best[way] = min(best.get(way, (rank, pair)), (rank, pair))
    return [pair for _, pair in best.values()]


def path_delays(
    measured: Iterable[LinkMeasurement], host: Mapping[str, str]
) -> dict[Way, float]:
    """Return the delay of each path in seconds beyond the request, given measurements of unmodified links."""
    delays = {}
    for measurement in measured:
        if measurement.delay is not None:
            way = (host[measurement.source], host[measurement.destination])
            excess = measurement.delay - median_delay(measurement.requested)
            # An error of the measurement may be larger than the delay of a short path.
            delays[way] = max(0.0, excess)
    return delays


def imposed_links(
    links: Mapping[Pair, Link], host: Mapping[str, str], delays: Mapping[Way, float]
) -> dict[Pair, Link]:
    """Return the links to emulate: the requested links minus the delays of their paths.

    Raises InputError for a link with a shorter delay than its path.

    >>> host = {"a": "node1", "b": "node2"}
    >>> imposed_links({("a", "b"): Link(delay=0.01)}, host, {("node1", "node2"): 0.002})["a", "b"].delay
    0.008
    """
    imposed = {}
    for pair, link in links.items():
        way = host[pair[0]], host[pair[1]]
        path_delay = delays.get(way, 0.0)
        # A delay can be added to a path, and none taken away.
        if link.up and path_delay > link.delay + tolerance.delay_tolerance(link.delay):
            raise InputError(
                f"the link {pair[0]} -> {pair[1]} needs a delay of {link.delay * 1e3:g} ms, but the path from "
                f"{way[0]} to {way[1]} has {path_delay * 1e3:.2f} ms: put both on one host with --place, or give "
                "the link a longer delay"
            )
        imposed[pair] = link
        if path_delay:
            imposed[pair] = replace(link, delay=max(0.0, link.delay - path_delay))
    return imposed


class PathBlocked(HostError):  # noqa: N818 - a state of the path
    """The data network carries no packets from one host to another, or no full frames (``passes_small``)."""

    def __init__(
        self, source: str, destination: str, *, passes_small: bool = False
    ) -> None:
        super().__init__(f"no packets pass from {source} to {destination}")
        self.ends = (source, destination)
        self.passes_small = passes_small


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
        self._host: dict[str, str] = {}
        for host, names in state.hosts.items():
            self._host |= dict.fromkeys(names, host)
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

        Raises `PathBlocked` if no packets or no full frames arrive over a path.
        """
        measurements = self._probe_between_hosts(sample_links(self._asked, self._host))
        limited: list[Way] = []
        rates = []
        for measurement in measurements:
            way = (
                self._host[measurement.source],
                self._host[measurement.destination],
            )
            if measurement.delay is None:
                if expected_loss(measurement.requested) < 1:
                    raise PathBlocked(*way)
            elif measurement.requested.rate:
                limited.append(way)
                rates.append(measurement.rate)
        # Only one link of each kind has a rate measurement, which needs full frames.
        if limited and not any(rates):
            raise PathBlocked(*limited[0], passes_small=True)
        delays = path_delays(measurements, self._host)
        return [(*way, delay) for way, delay in delays.items()]

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links while running; other links are unaffected."""
        imposed = self.imposed(links)
        self._asked |= links

        def set_part(host: str, shaper: Shaper) -> None:
            own = {}
            for pair, link in imposed.items():
                # Both ends: the sender's host shapes the rate, the receiver's the delay and loss.
                if self._is_at(pair, host):
                    own[pair] = link
            shaper.set(own)

        self._call_all(set_part)

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure links between the devices themselves."""
        wanted = list(pairs)
        across = []
        within: dict[str, list[Pair]] = defaultdict(list)
        for pair in wanted:
            if self.crosses(pair):
                across.append(pair)
            else:
                within[self._host[pair[0]]].append(pair)
        measured = self._probe_between_hosts(across) if across else []
        for host, own in within.items():
            measured += self._parts[host].probe(own)
        by_pair = {}
        for measurement in measured:
            by_pair[measurement.source, measurement.destination] = measurement
        return [by_pair[pair] for pair in wanted]

    def _probe_between_hosts(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links between hosts; repeat for links outside their tolerance."""
        latest: dict[Pair, LinkMeasurement] = {}
        again = list(pairs)
        for _ in range(_ATTEMPTS):
            if not again:
                break
            for measurement in self._measure_once(again):
                latest[measurement.source, measurement.destination] = measurement
            again = [pair for pair in again if latest[pair].problem]
        return [latest[pair] for pair in pairs]

    def _measure_once(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        asked = {pair: self._asked[pair] for pair in pairs}
        run = secrets.token_hex(8)
        shapers = {}
        for name in sorted(set(chain.from_iterable(pairs))):
            host = self._host[name]
            shapers[host] = self._parts[host]
        with ThreadPoolExecutor(len(shapers)) as pool:
            ports: dict[str, int] = {}
            open_ends = methodcaller("open_ends", run, pairs)
            for opened in pool.map(open_ends, shapers.values()):
                ports |= opened
            # An instant ahead, by which every host has received its request.
            begin = time.monotonic() + _AHEAD_SECONDS
            offsets = {}
            for host in shapers:
                offsets[host] = self._channels[host].clock.offset.there(begin) - begin

            def measure_at(host: str) -> list[dict[str, Any]]:
                there = begin + offsets[host]
                return shapers[host].probe_half(run, pairs, ports, there)

            halves = dict(zip(shapers, pool.map(measure_at, shapers), strict=True))
        measurements, differences = combine_halves(asked, halves, self._host, offsets)
        self._align_clocks(begin, offsets, differences)
        return measurements

    def _align_clocks(
        self,
        at: float,
        offsets: Mapping[str, float],
        differences: Mapping[Way, tuple[float, float]],
    ) -> None:
        """Set the clocks from packets between hosts, which are more accurate than the contexts' connections.

        This aligns the hosts' clocks with each other; a common error of all hosts affects no event.
        """
        first = next(iter(offsets))
        for host in offsets:
            if (first, host) not in differences:
                continue
            difference, round_trip = differences[first, host]
            # The paths' own delays, now part of the requested ones, may also be asymmetric.
            there = self._ways.get((first, host), 0.0)
            back = self._ways.get((host, first), 0.0)
            round_trip += there + back
            uncertainty = round_trip + _MIN_UNCERTAINTY
            offset = offsets[first] + difference
            self._channels[host].clock.pin(at, offset, uncertainty)
            self._channels[first].clock.pin(at, offsets[first], uncertainty)

    def renew(self) -> None:
        """Renew the lease of the containers."""
        self._call_all(lambda _host, shaper: shaper.renew())

    def show(self) -> dict[str, Any]:
        """Return the result of `Shaper.show` for all devices and links."""
        backends = set()
        devices: dict[str, Any] = {}
        links = {}
        for shown in self._call_all(lambda _host, shaper: shaper.show()):
            backends.add(shown["backend"])
            devices |= shown["devices"]
            # The shapers of both ends report a link between hosts.
            for link in shown["links"]:
                links[link["source"], link["destination"]] = link
        return {
            "backend": ", ".join(sorted(backends)),
            "devices": devices,
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
        clocks = {}
        for host, channel in self._channels.items():
            clocks[host] = channel.clock.offset.uncertainty
        return {
            **merge_statistics(reports),
            "processor_seconds": sum(report["processor_seconds"] for report in reports),
            "hosts": hosts,
            "ways": [[*way, delay] for way, delay in self._ways.items()],
            "clocks": clocks,
        }

    def _is_at(self, pair: Pair, host: str) -> bool:
        return host in (self._host[pair[0]], self._host[pair[1]])

    def _call_all(self, act: Callable[[str, Shaper], T]) -> list[T]:
        """Call a function with the name and the shaper of each host, all at once; lost hosts are left out."""
        present = {}
        for host, shaper in self._parts.items():
            if host not in self._lost:
                present[host] = shaper
        with ThreadPoolExecutor(len(self._parts)) as pool:
            return list(pool.map(act, present.keys(), present.values()))


def merge_statistics(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of several shapers: the largest number, and the first text, of each key.

    >>> merge_statistics([{"host_load": 0.5, "backend": "netem"}, {"host_load": 0.9, "backend": "netem"}])
    {'host_load': 0.9, 'backend': 'netem'}
    """
    result: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            known = result.get(name)
            if isinstance(value, dict):
                result[name] = merge_statistics([known or {}, value])
            elif known is None or (isinstance(value, int | float) and value > known):
                result[name] = value
    return result
