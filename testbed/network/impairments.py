"""Packet loss, delay, duplication and corruption as seeded random processes. Pure.

The backends and the simulator share these definitions: the delay line and the simulator run them, netem is given the
same tables and the same chain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from random import Random
from statistics import NormalDist, fmean, pstdev

from testbed.network.link import Distribution, GilbertElliott, Link

QUANTILES = 4096
"""Number of equally likely values that stand for a distribution, as netem's tables do."""
FURTHEST = 4.0
"""Maximum deviation in standard deviations, the bound of netem's tables."""
_PARETO_CUT = 3.7
"""Cut-off of Pareto's distribution (exponent 3, from 1), so that its tail ends just before `FURTHEST`."""


@functools.cache
def quantiles(distribution: Distribution) -> tuple[float, ...]:
    """Return `QUANTILES` equally likely values in ascending order, of mean 0 and standard deviation 1."""
    # The middle of each interval: quantiles 0 and 1 of a normal distribution are infinite.
    probabilities = [(index + 0.5) / QUANTILES for index in range(QUANTILES)]
    match distribution:
        case "normal":
            raw = [NormalDist().inv_cdf(probability) for probability in probabilities]
        case "uniform":
            raw = probabilities
        case "pareto":
            tail = [(1 - probability) ** (-1 / 3) for probability in probabilities]
            raw = [min(value, _PARETO_CUT) for value in tail]
    # Standardised after the cut, so that a jitter is the standard deviation for every distribution.
    mean, deviation = fmean(raw), pstdev(raw)
    return tuple((value - mean) / deviation for value in raw)


def loss_chain(link: Link) -> GilbertElliott | None:
    """Return the Markov chain of a link's losses; None for independent losses.

    Correlated losses are a chain whose long-run share is the link's loss.

    >>> loss_chain(Link(loss=0.1, loss_correlation=0.5))
    GilbertElliott(p=0.05, r=0.45, bad_loss=1.0, good_loss=0.0)
    """
    if link.bursts is not None or not link.loss_correlation or not link.loss:
        return link.bursts
    # Fates of neighbours correlate by 1 - p - r, and p / (p + r) is the share of losses.
    turning = 1 - link.loss_correlation
    return GilbertElliott(p=link.loss * turning, r=(1 - link.loss) * turning)


def loss_process(link: Link, seed: str) -> Callable[[], bool] | None:
    """Return a function for the fate of the next packet, True if lost; None for a link without loss."""
    states = loss_chain(link)
    if states is None:
        return bernoulli_process(link.loss, seed)
    return _chained_losses(states, seed)


def _chained_losses(states: GilbertElliott, seed: str) -> Callable[[], bool]:
    random = Random(seed).random
    leave = (states.p, states.r)
    lose = (states.good_loss, states.bad_loss)
    # Started in its stationary distribution, so that a short flow loses no less than a long one.
    bad = random() * (states.p + states.r) < states.p

    def lost() -> bool:
        nonlocal bad
        # The state moves before the fate of the packet is drawn (`GilbertElliott`).
        if random() < leave[bad]:
            bad = not bad
        return random() < lose[bad]

    return lost


def bernoulli_process(probability: float, seed: str) -> Callable[[], bool] | None:
    """Return a function for independent draws with a probability; None for probability 0."""
    if not probability:
        return None
    random = Random(seed).random
    return lambda: random() < probability


def delay_process(link: Link, seed: str) -> Callable[[], float] | None:
    """Return a function for the delay of the next packet in seconds; None for a constant delay."""
    vary = _jittered_delays(link, seed) if link.jitter else None
    # A stream of its own: whether packets are reordered must not change their jitter.
    overtakes = bernoulli_process(link.reorder, f"{seed} reorder")
    if overtakes is None:
        return vary

    def delay() -> float:
        if overtakes():
            return 0.0
        return link.delay if vary is None else vary()

    return delay


def _jittered_delays(link: Link, seed: str) -> Callable[[], float]:
    source = Random(seed)
    # A packet cannot arrive before it was sent.
    table = [
        max(0.0, link.delay + link.jitter * value)
        for value in quantiles(link.distribution)
    ]
    if not link.jitter_correlation:
        random = source.random
        return lambda: table[int(random() * QUANTILES)]
    # An autoregressive normal variable, read as a quantile, correlates delays and keeps their distribution exactly.
    gauss, keep = source.gauss, link.jitter_correlation
    fresh = math.sqrt(1 - keep * keep)
    state = gauss(0, 1)

    def delay() -> float:
        nonlocal state
        state = keep * state + fresh * gauss(0, 1)
        quantile = (1 + math.erf(state * math.sqrt(0.5))) / 2
        # Far in the tail the quantile rounds to 1.
        return table[min(QUANTILES - 1, int(quantile * QUANTILES))]

    return delay


def corrupt_packet(packet: bytes, random: Random) -> bytes | None:
    """Return an IPv4 packet with one flipped bit; None for a flipped header bit, which the checksum reveals."""
    byte, bit = divmod(random.randrange(8 * len(packet)), 8)
    header_bytes = 4 * (packet[0] & 15)
    if byte < header_bytes:
        return None
    changed = bytearray(packet)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def expected_loss(link: Link) -> float:
    """Return the share of packets lost, or dropped because of a wrong checksum."""
    states = loss_chain(link)
    lost = link.loss if states is None else states.loss
    return 1 - (1 - lost) * (1 - link.corrupt)


def loss_variance_ratio(link: Link) -> float:
    """Return the ratio of the losses' variance in a long flow to the variance of independent losses."""
    states = loss_chain(link)
    if states is None or not 0 < states.loss < 1:
        return 1.0
    turning = states.p + states.r
    bad = states.p / turning
    # The correlation of two fates falls with their distance as (1 - p - r) ** distance: a geometric series.
    between = bad * (1 - bad) * (states.bad_loss - states.good_loss) ** 2
    shared = between / (states.loss * (1 - states.loss))
    return 1 + 2 * shared * (1 - turning) / turning


def median_delay(link: Link) -> float:
    """Return the median packet delay in seconds."""
    if link.reorder >= 0.5:
        return 0.0
    if not link.jitter:
        return link.delay
    # Reordered packets have the shortest delay, so the median of all is a lower quantile of the others.
    index = int((0.5 - link.reorder) / (1 - link.reorder) * QUANTILES)
    return max(0.0, link.delay + link.jitter * quantiles(link.distribution)[index])


def longest_delay(link: Link) -> float:
    """Return an upper bound of the packet delay in seconds."""
    return link.delay + FURTHEST * link.jitter
