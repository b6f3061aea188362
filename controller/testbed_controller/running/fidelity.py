"""Fidelity of a run on this host: link measurements before the run, processors and queues during the run.

A link is outside its tolerance if its measured properties differ too much from the requested ones;
`LinkMeasurement.problem` then has the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.common.errors import HostError
from testbed.common.quantities import format_rate
from testbed.network.link import Pair
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.shaping.hostload import HostMonitor
from testbed_controller.shaping.tolerance import RATE_LOWEST

BUSY_SHARE = 0.8
"""Average share of busy processors above which load explains links outside their tolerance."""
_ADVISED_SHARE = 0.95
"""Share of the measured rate that a message advises; less than 1, since repeated measurements of a host differ."""
_PAUSE_SECONDS = 1.0
"""Pause between two measurements of links outside their tolerance, in seconds."""


def statistics_since(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the increase of the shaper's counters between two readings, and the other values from the second.

    The counters are dropped packets, sent bytes, and processor time in seconds.

    >>> statistics_since({"sent": {"worker1": 1000}}, {"sent": {"worker1": 5000}})["sent"]
    {'worker1': 4000}
    """
    earlier = before.get("queues", {})
    queues: dict[str, dict[str, int]] = {}
    for name, counts in after.get("queues", {}).items():
        queues[name] = {}
        for kind, count in counts.items():
            # A restarted device counts from zero again.
            queues[name][kind] = max(0, count - earlier.get(name, {}).get(kind, 0))
    sent = {}
    for name, count in after.get("sent", {}).items():
        sent[name] = max(0, count - before.get("sent", {}).get(name, 0))
    difference = {**after, "queues": queues, "sent": sent}
    if "processor_seconds" in after:
        earlier_seconds = before.get("processor_seconds", 0.0)
        difference["processor_seconds"] = after["processor_seconds"] - earlier_seconds
    return difference


class LinksError(HostError):
    """Links exceed their tolerance, and the user has not accepted the deviation.

    ``host`` is the report of `HostMonitor` during the measurement, with ``neighbours_refused``: how often the kernel's
    neighbour table was full meanwhile.
    """

    def __init__(
        self,
        measurements: Sequence[LinkMeasurement],
        host: Mapping[str, float] | None = None,
    ) -> None:
        failed_count = len(_pairs_outside(measurements))
        causes = "; ".join(_find_causes(measurements, host or {}))
        super().__init__(
            f"{failed_count} of {len(measurements)} links are outside their tolerance: {causes}; "
            "--accept-links runs with these links (the verdict reports it)"
        )
        self.measurements = list(measurements)


def verify_links(
    probe: Callable[[Sequence[Pair]], list[LinkMeasurement]],
    pairs: Sequence[Pair],
    *,
    accept: bool,
    retry_seconds: float = 20.0,
) -> list[LinkMeasurement]:
    """Measure links; unless ``accept``, raise `LinksError` if one stays outside the tolerance.

    Links outside their tolerance are measured again for ``retry_seconds``, since shared hosts are often slow for a few
    seconds only.
    """
    until = time.monotonic() + retry_seconds
    monitor = HostMonitor()
    monitor.start()
    refused_before = count_neighbour_refusals()
    try:
        latest = _measure_by_pair(probe, pairs)
        failed = _pairs_outside(latest.values())
        while failed and not accept and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            latest |= _measure_by_pair(probe, failed)
            failed = _pairs_outside(latest.values())
    finally:
        host = monitor.stop()
    if failed and not accept:
        host["neighbours_refused"] = count_neighbour_refusals() - refused_before
        raise LinksError(list(latest.values()), host)
    return list(latest.values())


def _measure_by_pair(
    probe: Callable[[Sequence[Pair]], list[LinkMeasurement]], pairs: Sequence[Pair]
) -> dict[Pair, LinkMeasurement]:
    measurements = {}
    for measurement in probe(pairs):
        measurements[measurement.source, measurement.destination] = measurement
    return measurements


def _pairs_outside(measurements: Iterable[LinkMeasurement]) -> list[Pair]:
    return [(link.source, link.destination) for link in measurements if link.problem]


def advise_rate(measured: float) -> float:
    """Return a rate within the capacity of the host, somewhat below the measured rate; both in bit/s.

    The result is rounded down to two significant digits.

    Example::

        >>> advise_rate(1e9)
        950000000.0
    """
    advised = measured * _ADVISED_SHARE
    # The value of one in the second digit, such as 10 mbit for 950 mbit.
    unit: float = 10.0 ** (math.floor(math.log10(advised)) - 1)
    return math.floor(advised / unit) * unit


def count_neighbour_refusals(
    statistics: Path = Path("/proc/net/stat/arp_cache"),
) -> int:
    """Return how often the kernel's neighbour table was full since boot; 0 if the kernel has no statistics."""
    try:
        header, *processors = statistics.read_text().splitlines()
    except FileNotFoundError:
        return 0
    column = header.split().index("table_fulls")
    # Each processor has one line of hexadecimal numbers.
    return sum(int(line.split()[column], 16) for line in processors)


def _find_causes(
    measurements: Sequence[LinkMeasurement], host: Mapping[str, float]
) -> list[str]:
    """Return the causes of failed measurements, each with a remedy."""
    # Imported here: a program that only monitors a host needs no numpy.
    from testbed.trace.verdict import STOLEN_SHARE

    causes = []
    stolen = host.get("host_stolen", 0.0)
    load = host.get("host_load")
    if host.get("neighbours_refused"):
        causes.append(
            "the kernel's neighbour table overflowed, so other programs lose packets too: raise "
            "net.ipv4.neigh.default.gc_thresh1, gc_thresh2 and gc_thresh3 by sysctl"
        )
    if stolen > STOLEN_SHARE:
        causes.append(
            f"the hypervisor took {stolen:.0%} of the processor time for other machines: try again later"
        )
    if load is not None and load >= BUSY_SHARE:
        causes.append(
            f"the processors of this host were {load:.0%} busy: use a less loaded host"
        )
    worst = _find_link_beyond_host(measurements)
    if worst is not None:
        assert worst.rate
        requested_rate = format_rate(worst.expected.rate or 0)
        advised_rate = format_rate(advise_rate(worst.rate))
        causes.append(
            f"the rate of {worst.source} -> {worst.destination}, {requested_rate}, exceeds the measured capacity of "
            f"this host: use at most {advised_rate}"
        )
    if causes:
        return causes
    text = "'testbed up' and 'testbed link measure' measure single links"
    if load is not None:
        text = f"the processors of this host were {load:.0%} busy, so load is not the cause; {text}"
    return [text]


def _find_link_beyond_host(
    measurements: Sequence[LinkMeasurement],
) -> LinkMeasurement | None:
    """Return the link with the smallest share of its requested rate, among rates that no link on this host reached."""
    highest = 0.0
    for link in measurements:
        if link.rate and not link.problem:
            highest = max(highest, link.rate)
    candidates = []
    for link in measurements:
        # This host has the capacity for all rates up to the highest that a link reached.
        if _has_low_rate(link) and (link.expected.rate or 0) > highest:
            candidates.append(link)
    return min(candidates, key=_reached_share, default=None)


def _reached_share(link: LinkMeasurement) -> float:
    return (link.rate or 0) / (link.expected.rate or 1)


def _has_low_rate(link: LinkMeasurement) -> bool:
    expected = link.expected.rate
    if not link.problem or not expected or not link.rate:
        return False
    return link.rate < RATE_LOWEST * expected
