"""Tolerances of measured links, the only definition of a trustworthy link. Pure functions."""

from __future__ import annotations

import math

from testbed.network.impairments import expected_loss, median_delay, memory
from testbed.network.link import Link

DELAY_SECONDS = 0.3e-3
DELAY_FRACTION = 0.02
"""The tolerance of the median one-way delay is the larger of the two, in seconds."""
RATE_LOWEST, RATE_HIGHEST = 0.96, 1.01
"""Bounds of a measured rate, as shares of the requested rate on the wire."""
LOSS_CONFIDENCE = 0.99
"""Probability of the central binomial interval for the number of lost packets."""


def delay_tolerance(delay: float) -> float:
    """Return the tolerance of a median delay in seconds."""
    return max(DELAY_SECONDS, DELAY_FRACTION * delay)


def binomial_interval(
    packets: int, probability: float, confidence: float = LOSS_CONFIDENCE
) -> tuple[int, int]:
    """Return the central interval of ``packets`` draws, excluding ``(1 - confidence) / 2`` on each side."""
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
    """Return the minimum and maximum number of lost or damaged packets of a link.

    The binomial interval is widened for bursts, whose losses scatter more than independent ones.
    """
    lowest, highest = binomial_interval(packets, expected_loss(link))
    mean, scale = packets * expected_loss(link), math.sqrt(memory(link))
    return max(0, math.floor(mean - (mean - lowest) * scale)), min(
        packets, math.ceil(mean + (highest - mean) * scale)
    )


def median_tolerance(link: Link, packets: int, gate: float = 0.0) -> float:
    """Return the tolerance of the median delay of ``packets`` packets in seconds, including jitter.

    ``gate`` is the transmission time subtracted from the measurement; the fraction applies to the sum of both.
    """
    correlated = (1 + link.jitter_correlation) / (1 - link.jitter_correlation)
    scatter = link.jitter * math.sqrt(math.pi / 2 * correlated / max(1, packets))
    return delay_tolerance(link.delay + gate) + 2.6 * scatter


def problem(
    link: Link,
    rate: float | None,
    delay: float | None,
    sent: int,
    lost: int,
    gate: float = 0.0,
) -> str | None:
    """Describe the values outside their tolerance (rates in bit/s, delay in seconds), or return None.

    ``delay`` is the median of the received packets; the link's rate is the lowest on its way, including access limits.
    ``gate`` is as for `median_tolerance`.
    """
    if not link.up:
        return (
            None
            if lost == sent
            else f"is down, yet {sent - lost} of {sent} packets arrived"
        )
    problems = []
    if delay is None:
        if expected_loss(link) < 0.9:
            problems.append(f"none of {sent} packets arrived")
    else:
        problems += _delay_problems(link, delay, sent, lost, gate)
    if (
        rate is not None
        and link.rate
        and not RATE_LOWEST <= rate / link.rate <= RATE_HIGHEST
    ):
        problems.append(
            f"carries {rate / 1e6:.4g} mbit instead of {link.rate / 1e6:g} mbit "
            f"({RATE_LOWEST * 100:.0f} to {RATE_HIGHEST * 100:.0f}% are tolerated)"
        )
    return "; ".join(problems) or None


def _delay_problems(
    link: Link, delay: float, sent: int, lost: int, gate: float
) -> list[str]:
    """Return problems of delay and loss, if some packets arrived."""
    problems = []
    asked, bound = median_delay(link), median_tolerance(link, sent - lost, gate)
    if abs(delay - asked) > bound:
        problems.append(
            f"delays by {delay * 1e3:.2f} ms instead of {asked * 1e3:g} ms (tolerance {bound * 1e3:.2f} ms)"
        )
    lowest, highest = loss_interval(link, sent)
    if not lowest <= lost <= highest:
        share = expected_loss(link) * 100
        problems.append(
            f"loses {lost} of {sent} packets, {lowest} to {highest} would be {share:g}%"
        )
    return problems
