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
FURTHEST = 4.0
"""Maximum deviation in standard deviations, the bound of netem's tables."""
_PARETO_CUT = 3.7
"""Cut-off of Pareto's distribution (exponent 3, from 1), so that its tail ends just before `FURTHEST`."""


@functools.cache
def quantiles(distribution: Distribution) -> tuple[float, ...]:
    """Return `QUANTILES` equally likely values in ascending order, of mean 0 and standard deviation 1."""
    at = [(index + 0.5) / QUANTILES for index in range(QUANTILES)]
    match distribution:
        case "normal":
            raw = [NormalDist().inv_cdf(probability) for probability in at]
        case "uniform":
            raw = at
        case "pareto":
            raw = [
                min((1 - probability) ** (-1 / 3), _PARETO_CUT) for probability in at
            ]
    mean, deviation = fmean(raw), pstdev(raw)
    return tuple((value - mean) / deviation for value in raw)


def chain(link: Link) -> GilbertElliott | None:
    """Return the chain behind a link's losses, correlated ones with the right share; None: independent."""
    if link.bursts is not None or not link.loss_correlation or not link.loss:
        return link.bursts
    apart = 1 - link.loss_correlation
    return GilbertElliott(p=link.loss * apart, r=(1 - link.loss) * apart)


def losses(link: Link, seed: str) -> Callable[[], bool] | None:
    """Return a function that draws whether the next packet is lost; None for a link without loss."""
    states = chain(link)
    if states is None:
        return chance(link.loss, seed)
    return _chained_losses(states, seed)


def _chained_losses(states: GilbertElliott, seed: str) -> Callable[[], bool]:
    random = Random(seed).random
    leave = (states.p, states.r)
    lose = (states.good_loss, states.bad_loss)
    # Begun as it is in the long run, so that a short flow loses no less than a long one.
    bad = random() * (states.p + states.r) < states.p

    def lost() -> bool:
        nonlocal bad
        if random() < leave[bad]:
            bad = not bad
        return random() < lose[bad]

    return lost


def chance(probability: float, seed: str) -> Callable[[], bool] | None:
    """Return a function that draws independent events of a probability; None for probability 0."""
    if not probability:
        return None
    random = Random(seed).random
    return lambda: random() < probability


def delays(link: Link, seed: str) -> Callable[[], float] | None:
    """Return a function that draws the delay of the next packet in seconds; None for a constant delay."""
    vary = _jittered_delays(link, seed) if link.jitter else None
    skip = chance(link.reorder, f"{seed} reorder")
    if skip is None:
        return vary
    overtakes, constant = skip, link.delay
    if vary is None:
        return lambda: 0.0 if overtakes() else constant
    varying = vary
    return lambda: 0.0 if overtakes() else varying()


def _jittered_delays(link: Link, seed: str) -> Callable[[], float]:
    source = Random(seed)
    table = [
        max(0.0, link.delay + link.jitter * value)
        for value in quantiles(link.distribution)
    ]
    if not link.jitter_correlation:
        random = source.random
        return lambda: table[int(random() * QUANTILES)]
    # A normal variable that remembers, read as a quantile: any distribution, kept exactly, with a memory.
    gauss, keep = source.gauss, link.jitter_correlation
    fresh = math.sqrt(1 - keep * keep)
    state = gauss(0, 1)

    def delay() -> float:
        nonlocal state
        state = keep * state + fresh * gauss(0, 1)
        return table[
            min(
                QUANTILES - 1,
                int((1 + math.erf(state * math.sqrt(0.5))) / 2 * QUANTILES),
            )
        ]

    return delay


def corrupted(packet: bytes, random: Random) -> bytes | None:
    """Return an IPv4 packet with one flipped bit; None for a flipped header bit, which the checksum reveals."""
    bit = random.randrange(8 * len(packet))
    if bit // 8 < 4 * (packet[0] & 15):
        return None
    changed = bytearray(packet)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def expected_loss(link: Link) -> float:
    """Return the share of packets lost, or dropped because of a wrong checksum."""
    states = chain(link)
    lost = link.loss if states is None else states.loss
    return 1 - (1 - lost) * (1 - link.corrupt)


def memory(link: Link) -> float:
    """Return the ratio of the losses' variance in a long flow to the variance of independent losses."""
    states = chain(link)
    if states is None or not 0 < states.loss < 1:
        return 1.0
    turning = states.p + states.r
    bad = states.p / turning
    # Of a chain's fates the correlation falls with distance as (1 - p - r) ** distance.
    shared = (
        bad
        * (1 - bad)
        * (states.bad_loss - states.good_loss) ** 2
        / (states.loss * (1 - states.loss))
    )
    return 1 + 2 * shared * (1 - turning) / turning


def median_delay(link: Link) -> float:
    """Return the median packet delay in seconds."""
    if link.reorder >= 0.5:
        return 0.0
    at = int((0.5 - link.reorder) / (1 - link.reorder) * QUANTILES)
    return (
        max(0.0, link.delay + link.jitter * quantiles(link.distribution)[at])
        if link.jitter
        else link.delay
    )


def longest_delay(link: Link) -> float:
    """Return an upper bound of the packet delay in seconds."""
    return link.delay + FURTHEST * link.jitter
