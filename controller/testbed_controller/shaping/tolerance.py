"""Tolerances of measured links: all parts of the testbed trust a link within these. Pure functions."""

from __future__ import annotations

import math

from testbed.network.impairments import expected_loss, loss_variance_ratio, median_delay
from testbed.network.link import Link

DELAY_SECONDS = 0.3e-3
DELAY_FRACTION = 0.02
"""The tolerance of a median one-way delay is `DELAY_SECONDS`, or this fraction of the delay if that is longer."""
RATE_LOWEST, RATE_HIGHEST = 0.96, 1.01
"""Bounds of a measured rate, as shares of the requested rate on the wire."""
LOSS_CONFIDENCE = 0.99
"""Probability of the central binomial interval for the number of lost packets."""


def delay_tolerance(delay: float) -> float:
    """Return the tolerance of a median delay in seconds.

    >>> delay_tolerance(0.005), delay_tolerance(0.1)
    (0.0003, 0.002)
    """
    return max(DELAY_SECONDS, DELAY_FRACTION * delay)


def binomial_interval(packets: int, probability: float) -> tuple[int, int]:
    """Return the smallest and the largest plausible number of lost packets, if each is lost with a probability.

    On each side, the number is outside with a probability of at most ``(1 - LOSS_CONFIDENCE) / 2``.

    >>> binomial_interval(100, 0.1)
    (3, 18)
    """
    if packets == 0 or probability <= 0:
        return 0, 0
    if probability >= 1:
        return packets, packets
    tail = (1 - LOSS_CONFIDENCE) / 2
    # Logarithms, since the chance of no loss among many packets is too small for a float.
    odds = math.log(probability) - math.log1p(-probability)
    logarithm = packets * math.log1p(-probability)
    total = 0.0
    lowest = -1
    for count in range(packets + 1):
        if count:
            # P(count) = P(count - 1) * (packets - count + 1) / count * odds.
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

    >>> loss_interval(Link(loss=0.1), packets=1000)
    (76, 125)
    """
    loss = expected_loss(link)
    lowest, highest = binomial_interval(packets, loss)
    mean = packets * loss
    # The variance of a sum of correlated draws is larger by this ratio, so a deviation is larger by its square root.
    scale = math.sqrt(loss_variance_ratio(link))
    lowest = math.floor(mean - (mean - lowest) * scale)
    highest = math.ceil(mean + (highest - mean) * scale)
    return max(0, lowest), min(packets, highest)


def median_tolerance(link: Link, packets: int, gate: float = 0.0) -> float:
    """Return the tolerance of the median delay of ``packets`` packets in seconds, including jitter.

    ``gate`` is the time that packets spend at the gate, in seconds. The measured delay excludes this time, but the
    measurement is as inexact as that of both times together.
    """
    # The variance of the mean of a correlated sequence (first-order autoregression) is larger by this factor.
    variance_ratio = (1 + link.jitter_correlation) / (1 - link.jitter_correlation)
    # The standard deviation of a median is larger than that of a mean, by sqrt(pi / 2) for a normal distribution.
    deviation = link.jitter * math.sqrt(math.pi / 2 * variance_ratio / max(1, packets))
    # 99 % of a normal distribution are within 2.6 standard deviations.
    return delay_tolerance(link.delay + gate) + 2.6 * deviation


def describe_deviations(
    link: Link,
    rate: float | None,
    delay: float | None,
    sent: int,
    lost: int,
    gate: float = 0.0,
) -> str | None:
    """Describe the measured values outside their tolerance (rates in bit/s, delay in seconds); None for a good link.

    ``link`` has the requested values; its rate includes the limits of channels and accesses. ``delay`` is the median of
    the received packets, None without any. ``gate`` is as for `median_tolerance`.

    >>> describe_deviations(Link(rate=1e6, delay=0.005), rate=0.9e6, delay=0.005, sent=30, lost=0)
    'carries 0.9 mbit instead of 1 mbit (96 to 101% are tolerated)'
    """
    if not link.up:
        if lost == sent:
            return None
        return f"is down, yet {sent - lost} of {sent} packets arrived"
    problems = []
    if delay is None:
        # On a very lossy link, all of a few packets may be lost.
        if expected_loss(link) < 0.9:
            problems.append(f"none of {sent} packets arrived")
    else:
        problems += _describe_delay_and_loss(link, delay, sent, lost, gate)
    if rate is not None and link.rate and not _is_tolerable(rate / link.rate):
        problems.append(
            f"carries {rate / 1e6:.4g} mbit instead of {link.rate / 1e6:g} mbit "
            f"({RATE_LOWEST * 100:.0f} to {RATE_HIGHEST * 100:.0f}% are tolerated)"
        )
    return "; ".join(problems) or None


def _is_tolerable(share: float) -> bool:
    return RATE_LOWEST <= share <= RATE_HIGHEST


def _describe_delay_and_loss(
    link: Link, delay: float, sent: int, lost: int, gate: float
) -> list[str]:
    problems = []
    requested = median_delay(link)
    tolerance = median_tolerance(link, sent - lost, gate)
    if abs(delay - requested) > tolerance:
        problems.append(
            f"delays by {delay * 1e3:.2f} ms instead of {requested * 1e3:g} ms (tolerance {tolerance * 1e3:.2f} ms)"
        )
    lowest, highest = loss_interval(link, sent)
    if not lowest <= lost <= highest:
        share = expected_loss(link) * 100
        problems.append(
            f"loses {lost} of {sent} packets; at a loss of {share:g}%, {lowest} to {highest} are expected"
        )
    return problems
