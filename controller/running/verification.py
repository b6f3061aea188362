"""What is done about links that were measured before a run: it goes on, or stops and says why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.shaping.tolerance import RATE_LOWEST
from testbed.errors import HostError
from testbed.quantities import format_rate
from testbed.trace.outcome import LinkMeasurement

_MARGIN = 0.95
"""Of the rate that a link was measured to carry: what is advised instead, since measurements of one host differ."""


class LinksError(HostError):
    """Links are not what the scenario asks for, and nobody said that they may be so."""

    def __init__(self, measurements: Sequence[LinkMeasurement]) -> None:
        bad = [each for each in measurements if each.problem]
        super().__init__(
            f"{len(bad)} of {len(measurements)} links are not what the scenario asks for: {_advice(bad)}, "
            "or --accept-links to run all the same (the verdict says so)"
        )
        self.measurements = list(measurements)


def check(measurements: Sequence[LinkMeasurement], accept: bool) -> None:
    """Raise `LinksError` when a link is outside its tolerance, unless that is accepted."""
    if not accept and any(each.problem for each in measurements):
        raise LinksError(measurements)


def nearest_rate(carried: float) -> float:
    """Return a rate that a host carries which was measured to carry so much, as two digits."""
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
