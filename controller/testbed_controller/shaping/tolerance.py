"""How far a link may be from what was asked before a run must not be trusted. The one place that says so. Pure."""

from __future__ import annotations

import math

from testbed.network.impairments import expected_loss, median_delay, memory
from testbed.network.link import Link

DELAY_SECONDS = 0.3e-3
DELAY_FRACTION = 0.02
"""The median one-way delay may be off by the larger of the two."""
RATE_LOWEST, RATE_HIGHEST = 0.96, 1.01
"""Bounds of a measured rate, as shares of the requested rate on the wire."""
LOSS_CONFIDENCE = 0.99
"""The packets lost must lie in the central binomial interval of this probability."""


def delay_tolerance(delay: float) -> float:
    """Return by how many seconds the median may differ."""
    return max(DELAY_SECONDS, DELAY_FRACTION * delay)


def binomial_interval(packets: int, probability: float, confidence: float = LOSS_CONFIDENCE) -> tuple[int, int]:
    """Return the smallest and largest count that ``packets`` draws give but for ``(1 - confidence) / 2`` each side."""
    if packets == 0 or probability <= 0:
        return 0, 0
    if probability >= 1:
        return packets, packets
    tail = (1 - confidence) / 2
    odds = math.log(probability) - math.log1p(-probability)
    logarithm = packets * math.log1p(-probability)
    total, lowest = 0.0, -1
    for count in range(packets + 1):
        if count:
            logarithm += math.log(packets - count + 1) - math.log(count) + odds
        total += math.exp(logarithm)
        if lowest < 0 and total >= tail:
            lowest = count
        if total >= 1 - tail:
            return lowest, count
    return lowest, packets


def loss_interval(link: Link, packets: int) -> tuple[int, int]:
    """Return how few and how many of a link's packets may be lost, or damaged so that they are dropped.

    The binomial interval, wider by as much as losses in bursts scatter more than independent ones.
    """
    lowest, highest = binomial_interval(packets, expected_loss(link))
    mean, wider = packets * expected_loss(link), math.sqrt(memory(link))
    return max(0, math.floor(mean - (mean - lowest) * wider)), min(packets, math.ceil(mean + (highest - mean) * wider))


def median_tolerance(link: Link, packets: int, gate: float = 0.0) -> float:
    """Return the seconds by which the median delay of this many packets may differ: jitter adds chance.

    ``gate`` is the transmission time that was subtracted from what was measured: the tolerated fraction counts of both.
    """
    correlated = (1 + link.jitter_correlation) / (1 - link.jitter_correlation)
    scatter = link.jitter * math.sqrt(math.pi / 2 * correlated / max(1, packets))
    return delay_tolerance(link.delay + gate) + 2.6 * scatter


def problem(link: Link, rate: float | None, delay: float | None, sent: int, lost: int, gate: float = 0.0) -> str | None:
    """Say what is outside its tolerance in what was measured (rates in bit/s, delay in seconds), or None.

    ``delay`` is the median of those that arrived; the link's rate is the lowest on the way, access limits included.
    ``gate`` is as for `median_tolerance`.
    """
    if not link.up:
        return None if lost == sent else f"is down, yet {sent - lost} of {sent} packets arrived"
    found = []
    if delay is None:
        if expected_loss(link) < 0.9:
            found.append(f"none of {sent} packets arrived")
    else:
        found += _delay_problems(link, delay, sent, lost, gate)
    if rate is not None and link.rate and not RATE_LOWEST <= rate / link.rate <= RATE_HIGHEST:
        found.append(
            f"carries {rate / 1e6:.4g} mbit instead of {link.rate / 1e6:g} mbit "
            f"({RATE_LOWEST * 100:.0f} to {RATE_HIGHEST * 100:.0f}% are tolerated)"
        )
    return "; ".join(found) or None


def _delay_problems(link: Link, delay: float, sent: int, lost: int, gate: float) -> list[str]:
    """Return which of delay and loss are outside their tolerance, if some packets arrived."""
    found = []
    asked, bound = median_delay(link), median_tolerance(link, sent - lost, gate)
    if abs(delay - asked) > bound:
        found.append(f"delays by {delay * 1e3:.2f} ms instead of {asked * 1e3:g} ms (tolerance {bound * 1e3:.2f} ms)")
    lowest, highest = loss_interval(link, sent)
    if not lowest <= lost <= highest:
        share = expected_loss(link) * 100
        found.append(f"loses {lost} of {sent} packets, {lowest} to {highest} would be {share:g}%")
    return found
