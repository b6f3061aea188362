"""Packet loss, delay, duplication and corruption as seeded random processes.

A process is a function that returns the fate of the next packet at each call. The backends and the simulator share
these definitions: the delay line and the simulator call the processes, and netem gets the same tables of delays and the
same Markov chain of losses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from random import Random
from statistics import NormalDist, fmean, pstdev

from testbed.network.link import Distribution, GilbertElliott, Link

QUANTILES = 4096
"""Number of equally likely values that represent a distribution, as in netem's tables."""
MAX_DEVIATIONS = 4.0
"""Maximum deviation from the mean in standard deviations, the bound of netem's tables."""
_PARETO_CUT = 3.7
"""Maximum of the values of Pareto's distribution (exponent 3, minimum 1), so that its tail ends just before
`MAX_DEVIATIONS`."""


@functools.cache
def quantiles(distribution: Distribution) -> tuple[float, ...]:
    """Return `QUANTILES` equally likely values in ascending order, of mean 0 and standard deviation 1."""
    # The middles of equal intervals, because quantiles 0 and 1 of a normal distribution are infinite.
    probabilities = [(index + 0.5) / QUANTILES for index in range(QUANTILES)]
    match distribution:
        case "normal":
            values = [NormalDist().inv_cdf(each) for each in probabilities]
        case "uniform":
            values = probabilities
        case "pareto":
            uncut = [(1 - each) ** (-1 / 3) for each in probabilities]
            values = [min(value, _PARETO_CUT) for value in uncut]
    # Standardised after the cut, so that the jitter is the standard deviation for every distribution.
    mean, deviation = fmean(values), pstdev(values)
    return tuple((value - mean) / deviation for value in values)


def loss_chain(link: Link) -> GilbertElliott | None:
    """Return the Markov chain of a link's losses; None for independent losses.

    Correlated losses are a chain whose long-run share is the link's loss.

    >>> loss_chain(Link(loss=0.1, loss_correlation=0.5))
    GilbertElliott(p=0.05, r=0.45, bad_loss=1.0, good_loss=0.0)
    """
    if link.bursts is not None or not link.loss_correlation or not link.loss:
        return link.bursts
    # The fates of successive packets have the correlation 1 - p - r, and p / (p + r) is the share of losses.
    p_plus_r = 1 - link.loss_correlation
    return GilbertElliott(p=link.loss * p_plus_r, r=(1 - link.loss) * p_plus_r)


def loss_process(link: Link, seed: str) -> Callable[[], bool] | None:
    """Return a function to draw the loss of the next packet; None for a link without loss."""
    chain = loss_chain(link)
    if chain is None:
        return bernoulli_process(link.loss, seed)
    return _chained_losses(chain, seed)


def _chained_losses(chain: GilbertElliott, seed: str) -> Callable[[], bool]:
    random = Random(seed).random
    # Index 0 is the good state, and index 1 the bad state.
    change_probabilities = (chain.p, chain.r)
    loss_probabilities = (chain.good_loss, chain.bad_loss)
    # The first state is drawn from the stationary distribution, so that a short flow has the mean loss of a long one.
    is_bad = random() * (chain.p + chain.r) < chain.p

    def is_lost() -> bool:
        nonlocal is_bad
        # The state changes before the fate of the packet is drawn (`GilbertElliott`).
        if random() < change_probabilities[is_bad]:
            is_bad = not is_bad
        return random() < loss_probabilities[is_bad]

    return is_lost


def bernoulli_process(probability: float, seed: str) -> Callable[[], bool] | None:
    """Return a function returning True with a probability, independently at each call; None for probability 0."""
    if not probability:
        return None
    random = Random(seed).random
    return lambda: random() < probability


def delay_process(link: Link, seed: str) -> Callable[[], float] | None:
    """Return a function to draw the delay of the next packet in seconds; None for a constant delay."""
    draw_delay = _jittered_delays(link, seed) if link.jitter else None
    # A seed of its own, so that reordering does not change the jitter of the packets.
    overtakes = bernoulli_process(link.reorder, f"{seed} reorder")
    if overtakes is None:
        return draw_delay

    def delay() -> float:
        if overtakes():
            return 0.0
        return link.delay if draw_delay is None else draw_delay()

    return delay


def _jittered_delays(link: Link, seed: str) -> Callable[[], float]:
    generator = Random(seed)
    table = []
    for value in quantiles(link.distribution):
        # A packet cannot arrive before it was sent.
        table.append(max(0.0, link.delay + link.jitter * value))
    if not link.jitter_correlation:
        random = generator.random
        return lambda: table[int(random() * QUANTILES)]
    # A first-order autoregressive process of standard normal values has the correlation. Its cumulative probabilities
    # are uniform, so the delays at these quantiles of the table have the distribution of the jitter exactly.
    gauss = generator.gauss
    correlation = link.jitter_correlation
    innovation = math.sqrt(1 - correlation * correlation)
    state = gauss(0, 1)

    def delay() -> float:
        nonlocal state
        state = correlation * state + innovation * gauss(0, 1)
        quantile = (1 + math.erf(state * math.sqrt(0.5))) / 2
        # Far in the tail the quantile rounds to 1.
        return table[min(QUANTILES - 1, int(quantile * QUANTILES))]

    return delay


def corrupt_packet(packet: bytes, random: Random) -> bytes | None:
    """Return an IPv4 packet with one flipped bit.

    None if the bit is in the header: the receiver drops such a packet because of its header checksum.
    """
    byte, bit = divmod(random.randrange(8 * len(packet)), 8)
    # The lower half of the first byte is the length of the header in words of four bytes.
    header_bytes = 4 * (packet[0] & 15)
    if byte < header_bytes:
        return None
    corrupted = bytearray(packet)
    corrupted[byte] ^= 1 << bit
    return bytes(corrupted)


def expected_loss(link: Link) -> float:
    """Return the share of packets lost, or dropped because of a wrong checksum."""
    chain = loss_chain(link)
    loss = link.loss if chain is None else chain.loss
    return 1 - (1 - loss) * (1 - link.corrupt)


def loss_variance_ratio(link: Link) -> float:
    """Return the variance of the number of losses in a long flow, divided by the variance of independent losses."""
    chain = loss_chain(link)
    if chain is None or not 0 < chain.loss < 1:
        return 1.0
    p_plus_r = chain.p + chain.r
    bad_share = chain.p / p_plus_r
    # Part of the variance of one fate that is due to the state.
    state_variance = bad_share * (1 - bad_share)
    state_variance *= (chain.bad_loss - chain.good_loss) ** 2
    explained_share = state_variance / (chain.loss * (1 - chain.loss))
    # Two fates at a distance d have the correlation explained_share * (1 - p - r) ** d, a geometric series.
    return 1 + 2 * explained_share * (1 - p_plus_r) / p_plus_r


def median_delay(link: Link) -> float:
    """Return the median packet delay in seconds."""
    if link.reorder >= 0.5:
        return 0.0
    if not link.jitter:
        return link.delay
    # Reordered packets have the shortest delay, so the median of all packets is a lower quantile of the other packets.
    index = int((0.5 - link.reorder) / (1 - link.reorder) * QUANTILES)
    return max(0.0, link.delay + link.jitter * quantiles(link.distribution)[index])


def longest_delay(link: Link) -> float:
    """Return an upper bound of the packet delay in seconds."""
    return link.delay + MAX_DEVIATIONS * link.jitter
