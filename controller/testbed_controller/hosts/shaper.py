"""The combined shapers of several hosts: each shapes the traffic that its devices send and receive.

A path is the way through the real network from one host to another. The delay of each path is measured, and the
shapers emulate only the remaining delay of the links on it.

The two hosts of a link between hosts measure one half each: the sender's host sends packets with time stamps of its
clock, and the receiver's host subtracts these stamps from its own times. Combining the halves of both directions shows
the difference of the clocks.
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
"""A path: (source host, destination host)."""
T = TypeVar("T")
_ATTEMPTS = 3
"""Maximum number of measurements of links between hosts; links within their tolerance are not repeated."""
_LEAD_SECONDS = 0.3
"""Time from the requests to the common start of a measurement, in seconds: enough for a request to each host."""
_MIN_UNCERTAINTY = 5e-5
"""Added to the uncertainty of a clock in seconds, since a measured round trip may be zero."""


def combine_halves(
    requested: Mapping[Pair, Link],
    halves: Mapping[str, Iterable[Mapping[str, Any]]],
    host_by_device: Mapping[str, str],
    offsets: Mapping[str, float],
) -> tuple[list[LinkMeasurement], dict[HostPath, tuple[float, float]]]:
    """Combine the halves of measured links between hosts; also return the result of `_clock_differences`.

    ``halves`` are the results of `testbed_controller.shaping.probes.measure_half` by host, ``host_by_device`` is the
    host of each device, and ``offsets`` are the offsets of the hosts' clocks from the controller's clock in seconds.
    """
    sent_by, received_by = _reports_by_end(halves, host_by_device)
    # Raw delays are the differences of two time stamps, one of each host, so they include the clock difference.
    raw_delays: dict[Pair, list[float]] = {}
    for pair in requested:
        # Only the sender's host knows how long a packet stays at the gate before the delay of the link begins.
        gate_seconds = sent_by[pair]["gate"]
        delays = received_by[pair]["delays"]
        raw_delays[pair] = [delay - gate_seconds for delay in delays]
    medians = {}
    for pair, link in requested.items():
        if raw_delays[pair]:
            medians[pair] = (link, statistics.median(raw_delays[pair]))
    differences = _clock_differences(medians, host_by_device)
    measurements = []
    for pair, link in requested.items():
        source_host, destination_host = host_by_device[pair[0]], host_by_device[pair[1]]
        # Without packets in both directions, the less accurate offsets over the docker contexts remain.
        difference = offsets[destination_host] - offsets[source_host]
        if (source_host, destination_host) in differences:
            difference, _ = differences[source_host, destination_host]
        delays = [delay - difference for delay in raw_delays[pair]]
        measurements.append(
            _make_measurement(pair, link, delays, sent_by[pair], received_by[pair])
        )
    return measurements, differences


def _reports_by_end(
    halves: Mapping[str, Iterable[Mapping[str, Any]]], host_by_device: Mapping[str, str]
) -> tuple[dict[Pair, Mapping[str, Any]], dict[Pair, Mapping[str, Any]]]:
    """Return the report of the sender's host and the report of the receiver's host for each link."""
    sent_by: dict[Pair, Mapping[str, Any]] = {}
    received_by: dict[Pair, Mapping[str, Any]] = {}
    for host, reports in halves.items():
        for report in reports:
            source, destination = report["source"], report["destination"]
            if host_by_device[source] == host:
                sent_by[source, destination] = report
            if host_by_device[destination] == host:
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
    # The rate includes the limits of both devices' accesses.
    effective = replace(link, rate=received_by["asked"])
    problem = tolerance.describe_deviations(
        effective, rate, delay, sent, lost, sent_by["gate"]
    )
    return LinkMeasurement(
        *pair,
        requested=link,
        limit=effective.rate,
        rate=rate,
        delay=delay,
        loss=lost / sent if sent else None,
        packets=sent,
        problem=problem,
    )


def _clock_differences(
    medians: Mapping[Pair, tuple[Link, float]], host_by_device: Mapping[str, str]
) -> dict[HostPath, tuple[float, float]]:
    """Return the clock difference between two hosts, and the round trip beyond the requested delays, in seconds.

    ``medians`` has the requested link and the median of the raw delays of each link. The clock difference is the clock
    of the destination host minus the clock of the source host.

    If delays are longer than requested in one direction and shorter in the other, then the clocks differ. Packets of
    the data network show the difference more accurately than the connections of the docker contexts. Only pairs of
    hosts with packets in both directions are included.
    """
    excess_by_link: dict[HostPath, list[float]] = defaultdict(list)
    for (source, destination), (link, delay) in medians.items():
        path = (host_by_device[source], host_by_device[destination])
        excess_by_link[path].append(delay - median_delay(link))
    excess = {}
    for path, delays in excess_by_link.items():
        excess[path] = statistics.median(delays)
    differences = {}
    for (source_host, destination_host), forward in excess.items():
        backward = excess.get((destination_host, source_host))
        if backward is not None:
            # As in NTP: a clock difference lengthens one direction and shortens the other by the same time.
            difference = (forward - backward) / 2
            round_trip = max(0.0, forward + backward)
            differences[source_host, destination_host] = (difference, round_trip)
    return differences


def sample_links(
    links: Mapping[Pair, Link], host_by_device: Mapping[str, str]
) -> list[Pair]:
    """Return the best link to measure each path with: little random delay, few losses, and then a high rate.

    >>> host = {"a": "node1", "b": "node2", "c": "node2"}
    >>> sample_links({("a", "b"): Link(rate=1e6), ("a", "c"): Link(rate=1e9)}, host)
    [('a', 'c')]
    """
    ranked: dict[HostPath, list[tuple[tuple[float, float, float], Pair]]] = defaultdict(
        list
    )
    for pair, link in links.items():
        path = host_by_device[pair[0]], host_by_device[pair[1]]
        if path[0] == path[1] or not link.up:
            continue
        # The lowest rank is the best. The jitter comes first, since random delays hide the delay of the path.
        rank = (link.jitter, link.loss, -(link.rate or MAX_RATE))
        ranked[path].append((rank, pair))
    return [min(candidates)[1] for candidates in ranked.values()]


def path_delays(
    measurements: Iterable[LinkMeasurement], host_by_device: Mapping[str, str]
) -> dict[HostPath, float]:
    """Return the delay of each path in seconds: the measured delay minus the requested delay of a link on the path.

    During the measurements, the full requested delays must have been emulated.
    """
    delays = {}
    for measurement in measurements:
        if measurement.delay is not None:
            path = (
                host_by_device[measurement.source],
                host_by_device[measurement.destination],
            )
            excess = measurement.delay - median_delay(measurement.requested)
            # On a short path, the error of the measurement may exceed the delay, and the difference may be negative.
            delays[path] = max(0.0, excess)
    return delays


def links_to_emulate(
    links: Mapping[Pair, Link],
    host_by_device: Mapping[str, str],
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
        path = host_by_device[pair[0]], host_by_device[pair[1]]
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
    """The data network carries no packets from one host to another, or, with ``passes_small``, only small ones."""

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
        """Combine ``parts``, the shapers by host, for the ``links`` of the scenario.

        ``lost`` is a live collection of hosts without contact, whose shapers are not called.
        """
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
        paths_with_rate: list[HostPath] = []
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
                paths_with_rate.append(path)
                rates.append(measurement.rate)
        # A measured rate shows that full frames pass. Of links with equal properties, only one has a rate measurement,
        # so a single measured rate suffices.
        if paths_with_rate and not any(rates):
            raise PathBlocked(*paths_with_rate[0], passes_small=True)
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
        pairs = list(pairs)
        between_hosts = []
        within_host: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            if self.connects_hosts(pair):
                between_hosts.append(pair)
            else:
                within_host[self._host_by_device[pair[0]]].append(pair)
        measurements = self._probe_between_hosts(between_hosts) if between_hosts else []
        for host, host_pairs in within_host.items():
            measurements += self._parts[host].probe(host_pairs)
        by_pair = {}
        for measurement in measurements:
            by_pair[measurement.source, measurement.destination] = measurement
        return [by_pair[pair] for pair in pairs]

    def _probe_between_hosts(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links between hosts; repeat for links outside their tolerance."""
        last_measurement: dict[Pair, LinkMeasurement] = {}
        remaining = list(pairs)
        for _ in range(_ATTEMPTS):
            if not remaining:
                break
            for measurement in self._measure_once(remaining):
                pair = (measurement.source, measurement.destination)
                last_measurement[pair] = measurement
            remaining = [pair for pair in remaining if last_measurement[pair].problem]
        return [last_measurement[pair] for pair in pairs]

    def _measure_once(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        """Measure links between hosts once, and align the hosts' clocks by the result."""
        requested = {pair: self._requested[pair] for pair in pairs}
        measurement_id = secrets.token_hex(8)
        shapers = {}
        for name in sorted(set(chain.from_iterable(pairs))):
            host = self._host_by_device[name]
            shapers[host] = self._parts[host]
        with ThreadPoolExecutor(len(shapers)) as pool:
            ports: dict[str, int] = {}
            open_ends = methodcaller("open_ends", measurement_id, pairs)
            for host_ports in pool.map(open_ends, shapers.values()):
                ports |= host_ports
            begin = time.monotonic() + _LEAD_SECONDS
            offsets = {}
            for host in shapers:
                offset = self._channels[host].estimator.offset
                offsets[host] = offset.to_host(begin) - begin

            def measure_at(host: str) -> list[dict[str, Any]]:
                host_begin = begin + offsets[host]
                return shapers[host].probe_half(
                    measurement_id, pairs, ports, host_begin
                )

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
        """Correct the offsets of the hosts' clocks by the measured differences between hosts.

        ``at`` is the instant of the measurement on the controller's clock. Packets between hosts are more accurate than
        the docker contexts' connections, by which the ``offsets`` were measured. The clocks are aligned with the clock
        of the first host: an error of that clock is common to all hosts, so it does not change the order of events.
        """
        first = next(iter(offsets))
        for host in offsets:
            if (first, host) not in differences:
                continue
            difference, round_trip = differences[first, host]
            # The round trip excludes the requested delays, of which the paths cause a part. The delays of paths may be
            # asymmetric, so they count as uncertainty.
            forward = self._delay_by_path.get((first, host), 0.0)
            backward = self._delay_by_path.get((host, first), 0.0)
            round_trip += forward + backward
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
    """Merge the statistics of several shapers: each key has the largest number, or the first text.

    >>> merge_statistics([{"host_load": 0.5, "backend": "netem"}, {"host_load": 0.9, "backend": "netem"}])
    {'host_load': 0.9, 'backend': 'netem'}
    """
    result: dict[str, Any] = {}
    for report in reports:
        for name, value in report.items():
            current = result.get(name)
            is_number = isinstance(value, int | float)
            if isinstance(value, dict):
                result[name] = merge_statistics([current or {}, value])
            elif current is None or (is_number and value > current):
                result[name] = value
    return result
