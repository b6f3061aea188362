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

HostPath = tuple[str, str]
"""The path through the real network from one host to another: (source host, destination host)."""
T = TypeVar("T")
_ATTEMPTS = 3
"""Maximum number of measurements of links between hosts; links within their tolerance are not repeated."""
_AHEAD_SECONDS = 0.3
"""Time from the requests to the start of a measurement, in seconds; by then every host has received its request."""
_MIN_UNCERTAINTY = 5e-5
"""Smallest uncertainty of a clock in seconds, for measured round trips of zero."""


def combine_halves(
    requested: Mapping[Pair, Link],
    halves: Mapping[str, Iterable[Mapping[str, Any]]],
    host: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[LinkMeasurement], dict[HostPath, tuple[float, float]]]:
    """Combine the measurements of links between hosts; also return the result of `_clock_differences`.

    The sender's host and the receiver's host each measure one half of a link. ``halves`` are the results of
    `testbed_controller.shaping.probes.measure_half` by host, ``host`` is the host of each device, and ``offsets`` are
    the offsets of the hosts' clocks from the controller's clock in seconds.
    """
    sent_by, received_by = _reports_by_end(halves, host)
    raw: dict[Pair, list[float]] = {}
    for pair in requested:
        # The sender's host measures the time that a packet waits in the gate before it leaves (see the
        # glossary), and the receiver's host measures the arrivals.
        gate = sent_by[pair]["gate"]
        raw[pair] = [delay - gate for delay in received_by[pair]["delays"]]
    medians = {}
    for pair, link in requested.items():
        if raw[pair]:
            medians[pair] = (link, statistics.median(raw[pair]))
    differences = _clock_differences(medians, host)
    measured = []
    for pair, link in requested.items():
        source_host, destination_host = host[pair[0]], host[pair[1]]
        # The offsets over the docker contexts are less accurate, but they need no packets in both directions.
        by_contexts = offsets[destination_host] - offsets[source_host]
        difference, _ = differences.get(
            (source_host, destination_host), (by_contexts, 0.0)
        )
        # A raw delay is the difference of two time stamps, one of each host, so it includes the clock difference.
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
) -> dict[HostPath, tuple[float, float]]:
    """Return the clock difference between two hosts, and the round trip beyond the requested delays, in seconds.

    If delays are longer than requested in one direction and shorter in the other, then the clocks differ. Packets of
    the data network show the difference more accurately than the connections of the docker contexts. Only pairs of
    hosts with packets in both directions are included.
    """
    beyond: dict[HostPath, list[float]] = defaultdict(list)
    for (source, destination), (link, delay) in raw.items():
        beyond[host[source], host[destination]].append(delay - median_delay(link))
    excess = {path: statistics.median(delays) for path, delays in beyond.items()}
    differences = {}
    for (a, b), there in excess.items():
        back = excess.get((b, a))
        if back is not None:
            # As in NTP: a clock difference lengthens one direction and shortens the other by the same time.
            differences[a, b] = ((there - back) / 2, max(0.0, there + back))
    return differences


def sample_links(links: Mapping[Pair, Link], host: Mapping[str, str]) -> list[Pair]:
    """Return the most informative link for each path between hosts: fast, and with little random delay.

    >>> host = {"a": "node1", "b": "node2", "c": "node2"}
    >>> sample_links({("a", "b"): Link(rate=1e6), ("a", "c"): Link(rate=1e9)}, host)
    [('a', 'c')]
    """
    ranked: dict[HostPath, list[tuple[tuple[float, float, float], Pair]]] = defaultdict(
        list
    )
    for pair, link in links.items():
        path = host[pair[0]], host[pair[1]]
        if path[0] == path[1] or not link.up:
            continue
        # The lowest rank is the best. The jitter comes first, since random delays hide the delay of the path.
        rank = (link.jitter, link.loss, -(link.rate or MAX_RATE))
        ranked[path].append((rank, pair))
    return [min(candidates)[1] for candidates in ranked.values()]


def path_delays(
    measured: Iterable[LinkMeasurement], host: Mapping[str, str]
) -> dict[HostPath, float]:
    """Return the delay of each path in seconds: the measured delay minus the requested delay of a link on it.

    During the measurement, the full requested delay must have been emulated.
    """
    delays = {}
    for measurement in measured:
        if measurement.delay is not None:
            path = (host[measurement.source], host[measurement.destination])
            excess = measurement.delay - median_delay(measurement.requested)
            # On a short path, the error of the measurement may exceed the delay, and the difference may be negative.
            delays[path] = max(0.0, excess)
    return delays


def links_to_emulate(
    links: Mapping[Pair, Link],
    host: Mapping[str, str],
    delays: Mapping[HostPath, float],
) -> dict[Pair, Link]:
    """Return the links to emulate: the requested links minus the delays of their paths.

    Raises InputError for a link with a shorter delay than its path.

    >>> host = {"a": "node1", "b": "node2"}
    >>> links_to_emulate({("a", "b"): Link(delay=0.01)}, host, {("node1", "node2"): 0.002})["a", "b"].delay
    0.008
    """
    to_emulate = {}
    for pair, link in links.items():
        path = host[pair[0]], host[pair[1]]
        path_delay = delays.get(path, 0.0)
        # Emulation can only add to the delay of a path.
        if link.up and path_delay > link.delay + tolerance.delay_tolerance(link.delay):
            raise InputError(
                f"the link {pair[0]} -> {pair[1]} needs a delay of {link.delay * 1e3:g} ms, but the path from "
                f"{path[0]} to {path[1]} has {path_delay * 1e3:.2f} ms: put both on one host with --place, or give "
                "the link a longer delay"
            )
        to_emulate[pair] = link
        if path_delay:
            to_emulate[pair] = replace(link, delay=max(0.0, link.delay - path_delay))
    return to_emulate


class PathBlocked(HostError):  # noqa: N818 - a state of the path
    """The data network carries no packets from one host to another.

    With ``passes_small``, small packets pass and full frames do not.
    """

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
        """``parts`` are the shapers by host, ``links`` the links of the scenario; ``lost`` hosts are not called."""
        self._lost = lost
        self._parts = parts
        self._host_by_device: dict[str, str] = {}
        for host, names in state.hosts.items():
            self._host_by_device |= dict.fromkeys(names, host)
        self._delay_by_path = {(a, b): delay for a, b, delay in state.ways}
        self._channels = channels
        self._requested = dict(links)

    def connects_hosts(self, pair: Pair) -> bool:
        """Return whether the ends of a link are on different hosts."""
        return self._host_by_device[pair[0]] != self._host_by_device[pair[1]]

    def emulated_links(self, links: Mapping[Pair, Link]) -> dict[Pair, Link]:
        """Return the links to emulate for the requested links; see `links_to_emulate`."""
        return links_to_emulate(links, self._host_by_device, self._delay_by_path)

    def measure_path_delays(self) -> list[tuple[str, str, float]]:
        """Measure the delays of the paths between hosts, while links are emulated as requested.

        Raises `PathBlocked` if no packets or no full frames arrive over a path.
        """
        measurements = self._probe_between_hosts(
            sample_links(self._requested, self._host_by_device)
        )
        limited: list[HostPath] = []
        rates = []
        for measurement in measurements:
            path = (
                self._host_by_device[measurement.source],
                self._host_by_device[measurement.destination],
            )
            if measurement.delay is None:
                if expected_loss(measurement.requested) < 1:
                    raise PathBlocked(*path)
            elif measurement.requested.rate:
                limited.append(path)
                rates.append(measurement.rate)
        # A measured rate shows that full frames pass. Of links with equal properties, only one has a rate measurement,
        # so a single measured rate suffices.
        if limited and not any(rates):
            raise PathBlocked(*limited[0], passes_small=True)
        delays = path_delays(measurements, self._host_by_device)
        return [(*path, delay) for path, delay in delays.items()]

    def set(self, links: Mapping[Pair, Link]) -> None:
        """Change these links while running; other links are unaffected."""
        emulated = self.emulated_links(links)
        self._requested |= links

        def set_part(host: str, shaper: Shaper) -> None:
            host_links = {}
            for pair, link in emulated.items():
                # The hosts of both ends need the link: the sender's host shapes the rate, the receiver's host the delay
                # and the loss.
                if self._has_end_on(pair, host):
                    host_links[pair] = link
            shaper.set(host_links)

        self._call_all(set_part)

    def probe(self, pairs: Iterable[Pair]) -> list[LinkMeasurement]:
        """Measure links between the devices themselves."""
        wanted = list(pairs)
        across = []
        within: dict[str, list[Pair]] = defaultdict(list)
        for pair in wanted:
            if self.connects_hosts(pair):
                across.append(pair)
            else:
                within[self._host_by_device[pair[0]]].append(pair)
        measured = self._probe_between_hosts(across) if across else []
        for host, host_links in within.items():
            measured += self._parts[host].probe(host_links)
        by_pair = {}
        for measurement in measured:
            by_pair[measurement.source, measurement.destination] = measurement
        return [by_pair[pair] for pair in wanted]

    def _probe_between_hosts(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links between hosts; repeat for links outside their tolerance."""
        latest: dict[Pair, LinkMeasurement] = {}
        remaining = list(pairs)
        for _ in range(_ATTEMPTS):
            if not remaining:
                break
            for measurement in self._measure_once(remaining):
                latest[measurement.source, measurement.destination] = measurement
            remaining = [pair for pair in remaining if latest[pair].problem]
        return [latest[pair] for pair in pairs]

    def _measure_once(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        requested = {pair: self._requested[pair] for pair in pairs}
        run = secrets.token_hex(8)
        shapers = {}
        for name in sorted(set(chain.from_iterable(pairs))):
            host = self._host_by_device[name]
            shapers[host] = self._parts[host]
        with ThreadPoolExecutor(len(shapers)) as pool:
            ports: dict[str, int] = {}
            open_ends = methodcaller("open_ends", run, pairs)
            for opened in pool.map(open_ends, shapers.values()):
                ports |= opened
            begin = time.monotonic() + _AHEAD_SECONDS
            offsets = {}
            for host in shapers:
                offsets[host] = (
                    self._channels[host].estimator.offset.to_host(begin) - begin
                )

            def measure_at(host: str) -> list[dict[str, Any]]:
                there = begin + offsets[host]
                return shapers[host].probe_half(run, pairs, ports, there)

            halves = dict(zip(shapers, pool.map(measure_at, shapers), strict=True))
        measurements, differences = combine_halves(
            requested, halves, self._host_by_device, offsets
        )
        self._align_clocks(begin, offsets, differences)
        return measurements

    def _align_clocks(
        self,
        at: float,
        offsets: Mapping[str, float],
        differences: Mapping[HostPath, tuple[float, float]],
    ) -> None:
        """Set the clocks of the hosts by packets between them, which are more accurate than the contexts' connections.

        The clocks are aligned with the clock of the first host. An error of that clock is common to all hosts, so it
        does not change the order of events.
        """
        first = next(iter(offsets))
        for host in offsets:
            if (first, host) not in differences:
                continue
            difference, round_trip = differences[first, host]
            # The round trip excludes the requested delays, which now include the delays of the paths. Those delays may
            # be asymmetric too, so they count as uncertainty.
            there = self._delay_by_path.get((first, host), 0.0)
            back = self._delay_by_path.get((host, first), 0.0)
            round_trip += there + back
            uncertainty = round_trip + _MIN_UNCERTAINTY
            offset = offsets[first] + difference
            self._channels[host].estimator.add_permanent(at, offset, uncertainty)
            self._channels[first].estimator.add_permanent(
                at, offsets[first], uncertainty
            )

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

        Further keys are ``hosts``, the devices of each host; ``ways``, the delays of the paths in seconds; and
        ``clocks``, the uncertainty of each clock in seconds.
        """
        hosts: dict[str, list[str]] = {}
        for name, host in self._host_by_device.items():
            hosts.setdefault(host, []).append(name)
        reports = self._call_all(lambda _host, shaper: shaper.statistics(reset=reset))
        clocks = {}
        for host, channel in self._channels.items():
            clocks[host] = channel.estimator.offset.uncertainty
        return {
            **merge_statistics(reports),
            "processor_seconds": sum(report["processor_seconds"] for report in reports),
            "hosts": hosts,
            "ways": [[*path, delay] for path, delay in self._delay_by_path.items()],
            "clocks": clocks,
        }

    def _has_end_on(self, pair: Pair, host: str) -> bool:
        return host in (self._host_by_device[pair[0]], self._host_by_device[pair[1]])

    def _call_all(self, act: Callable[[str, Shaper], T]) -> list[T]:
        """Call a function with the name and the shaper of each host concurrently, except lost hosts."""
        present = {}
        for host, shaper in self._parts.items():
            if host not in self._lost:
                present[host] = shaper
        with ThreadPoolExecutor(len(self._parts)) as pool:
            return list(pool.map(act, present.keys(), present.values()))


def merge_statistics(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of several shapers; each key gets its largest number, or its first text.

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
