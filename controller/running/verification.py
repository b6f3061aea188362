"""What is done about links that were measured before a run: it goes on, or stops and says why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from controller.running.fidelity import HostMonitor
from controller.shaping.tolerance import RATE_LOWEST
from testbed.common.errors import HostError
from testbed.common.quantities import format_rate
from testbed.network.link import Pair
from testbed.trace.outcome import LinkMeasurement
from testbed.trace.verdict import STOLEN_SHARE

_MARGIN = 0.95
"""Share of the rate that a link was measured to carry that is advised, since measurements of one host differ."""
_PAUSE = 1.0
"""Seconds between two measurements of links that were outside their tolerance."""


class LinksError(HostError):
    """Links are not what the scenario asks for, and nobody said that they may be so."""

    def __init__(self, measurements: Sequence[LinkMeasurement], stolen: float = 0.0) -> None:
        bad = [each for each in measurements if each.problem]
        advice = _advice(bad)
        if stolen > STOLEN_SHARE:
            advice = f"a hypervisor kept {stolen:.0%} of the processors' time for others: try again later, {advice}"
        super().__init__(
            f"{len(bad)} of {len(measurements)} links are not what the scenario asks for: {advice}, "
            "or --accept-links to run all the same (the verdict says so)"
        )
        self.measurements = list(measurements)


def verified(
    probe: Callable[[Sequence[Pair]], list[LinkMeasurement]],
    pairs: Sequence[Pair],
    accept: bool,
    patience: float = 20.0,
) -> list[LinkMeasurement]:
    """Measure these links; raise `LinksError` when one stays outside its tolerance, unless that is accepted.

    Links outside their tolerance are measured again for ``patience`` seconds: hosts that others share are often slow
    for a few seconds and then are not.
    """
    until = time.monotonic() + patience
    monitor = HostMonitor()
    monitor.start()
    try:
        found = {(each.source, each.destination): each for each in probe(pairs)}
        while not accept and (bad := _outside(found.values())) and time.monotonic() < until:
            time.sleep(_PAUSE)
            found |= {(each.source, each.destination): each for each in probe(bad)}
    finally:
        host = monitor.stop()
    if not accept and _outside(found.values()):
        raise LinksError(list(found.values()), host.get("host_stolen", 0.0))
    return list(found.values())


def _outside(measurements: Iterable[LinkMeasurement]) -> list[Pair]:
    return [(each.source, each.destination) for each in measurements if each.problem]


def nearest_rate(carried: float) -> float:
    """Return a rate that this host carries, given the rate it was measured to carry, as two digits."""
    advised = carried * _MARGIN
    unit: float = 10.0 ** (math.floor(math.log10(advised)) - 1)
    return math.floor(advised / unit) * unit


def _advice(bad: Sequence[LinkMeasurement]) -> str:
    slow = [each for each in bad if _too_slow(each)]
    if not slow:
        return "use a less loaded host"
    worst = min(slow, key=lambda each: (each.rate or 0) / (each.requested.rate or 1))
    assert worst.rate
    assert worst.requested.rate
    return (
        f"the rate of {worst.source} -> {worst.destination}, {format_rate(worst.requested.rate)}, is above what this "
        f"host was measured to carry: use at most {format_rate(nearest_rate(worst.rate))}, a less loaded host"
    )


def _too_slow(each: LinkMeasurement) -> bool:
    wanted = each.requested.rate
    return bool(wanted and each.rate and each.rate < RATE_LOWEST * wanted)
