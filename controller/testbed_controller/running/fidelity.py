"""How far a run on this host can be trusted: its links measured before, processors and queues while it goes on."""

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

BUSY = 0.8
"""Share of all processors busy, on average, from which load explains links that are outside their tolerance."""
_MARGIN = 0.95
"""Share of the rate that a link was measured to carry that is advised, since measurements of one host differ."""
_PAUSE = 1.0
"""Seconds between two measurements of links that were outside their tolerance."""


def since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shaper's statistics with only what was between two readings: packets dropped, bytes, processor time.

    What the measurement of the links before the run did to their queues is none of the run's business.
    """
    earlier = before.get("queues", {})
    queues = {
        name: {kind: max(0, count - earlier.get(name, {}).get(kind, 0)) for kind, count in counts.items()}
        for name, counts in after.get("queues", {}).items()
    }
    sent = {name: count - before.get("sent", {}).get(name, 0) for name, count in after.get("sent", {}).items()}
    took = {key: after[key] - before.get(key, 0.0) for key in ("processor_seconds",) if key in after}
    # A device that has started again counts from nothing.
    return {**after, **took, "queues": queues, "sent": {name: max(0, count) for name, count in sent.items()}}


class LinksError(HostError):
    """Links are outside their tolerance, and the user has not accepted that.

    ``host`` holds what `HostMonitor` found while the links were measured, and ``neighbours_refused``: how often the
    kernel's neighbour table had no room meanwhile.
    """

    def __init__(self, measurements: Sequence[LinkMeasurement], host: Mapping[str, float] | None = None) -> None:
        bad = [each for each in measurements if each.problem]
        super().__init__(
            f"{len(bad)} of {len(measurements)} links are not what the scenario asks for: "
            f"{'; '.join(_causes(measurements, host or {}))}; --accept-links runs all the same (the verdict says so)"
        )
        self.measurements = list(measurements)


def verified(
    probe: Callable[[Sequence[Pair]], list[LinkMeasurement]],
    pairs: Sequence[Pair],
    accept: bool,
    patience: float = 20.0,
) -> list[LinkMeasurement]:
    """Measure these links; raise `LinksError` when one stays outside its tolerance, unless that is accepted.

    Links outside their tolerance, and no others, are measured again for ``patience`` seconds: hosts that others share
    are often slow for a few seconds and then are not.
    """
    until = time.monotonic() + patience
    monitor = HostMonitor()
    monitor.start()
    refused = neighbours_refused()
    try:
        found = {(each.source, each.destination): each for each in probe(pairs)}
        while not accept and (bad := _outside(found.values())) and time.monotonic() < until:
            time.sleep(_PAUSE)
            found |= {(each.source, each.destination): each for each in probe(bad)}
    finally:
        host = monitor.stop()
    if not accept and _outside(found.values()):
        host["neighbours_refused"] = neighbours_refused() - refused
        raise LinksError(list(found.values()), host)
    return list(found.values())


def _outside(measurements: Iterable[LinkMeasurement]) -> list[Pair]:
    return [(each.source, each.destination) for each in measurements if each.problem]


def nearest_rate(carried: float) -> float:
    """Return a rate that this host carries, given the rate it was measured to carry, as two digits."""
    advised = carried * _MARGIN
    unit: float = 10.0 ** (math.floor(math.log10(advised)) - 1)
    return math.floor(advised / unit) * unit


def neighbours_refused(statistics: Path = Path("/proc/net/stat/arp_cache")) -> int:
    """Return how often the kernel's neighbour table has had no room since boot; 0 where the kernel does not count."""
    try:
        header, *processors = statistics.read_text().splitlines()
    except FileNotFoundError:
        return 0
    column = header.split().index("table_fulls")
    return sum(int(line.split()[column], 16) for line in processors)


def _causes(measurements: Sequence[LinkMeasurement], host: Mapping[str, float]) -> list[str]:
    """Return the causes that the measurements show, each with its remedy."""
    from testbed.trace.verdict import STOLEN_SHARE  # late: who watches a host needs no numpy

    causes = []
    stolen, load = host.get("host_stolen", 0.0), host.get("host_load")
    if host.get("neighbours_refused"):
        causes.append(
            "the kernel's neighbour table overflowed, which costs other programs packets as well: raise "
            "net.ipv4.neigh.default.gc_thresh1, gc_thresh2 and gc_thresh3 by sysctl"
        )
    if stolen > STOLEN_SHARE:
        causes.append(f"a hypervisor kept {stolen:.0%} of the processors' time for others: try again later")
    if load is not None and load >= BUSY:
        causes.append(f"the processors of this host were {load:.0%} busy: use a less loaded host")
    if worst := _beyond_the_host(measurements):
        assert worst.rate
        asked, carried = format_rate(worst.expected.rate or 0), format_rate(nearest_rate(worst.rate))
        causes.append(
            f"the rate of {worst.source} -> {worst.destination}, {asked}, is above what this host was measured to "
            f"carry: use at most {carried}"
        )
    if causes:
        return causes
    idle = "" if load is None else f"the processors of this host were {load:.0%} busy, so load is not the cause; "
    return [f"{idle}'testbed up' and 'testbed link measure' measure single links"]


def _beyond_the_host(measurements: Sequence[LinkMeasurement]) -> LinkMeasurement | None:
    """Return the link that falls furthest short of its rate, unless this host carried as much over another link."""
    most = max((each.rate for each in measurements if each.rate and not each.problem), default=0.0)
    slow = [each for each in measurements if _too_slow(each) and (each.expected.rate or 0) > most]
    return min(slow, key=lambda each: (each.rate or 0) / (each.expected.rate or 1), default=None)


def _too_slow(each: LinkMeasurement) -> bool:
    wanted = each.expected.rate
    return bool(each.problem and wanted and each.rate and each.rate < RATE_LOWEST * wanted)
