"""How well devices hear each other: log-distance path loss with shadowing, from positions to reception ratios.

The received power is the transmit power less the path loss, ``reference_loss + 10 * exponent * log10(distance)`` in
dB for a distance in metres, less a shadowing drawn from N(0, shadowing^2) dB for each transmission. It is
received when that is not below the receiver's sensitivity.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import NormalDist

from testbed.common.seeds import derive
from testbed.network.link import Pair

Position = tuple[float, float]
"""Metres east and north of a corner of the area."""

REFERENCE_DISTANCE = 1.0
"""Metres of the reference loss. The path loss formula does not hold at shorter distances, where it is not used."""


@dataclass(frozen=True)
class Transceiver:
    """Transmit power and receiver sensitivity of a radio."""

    name: str
    transmit_power: float
    """dBm."""
    sensitivity: float
    """dBm; weaker signals are lost."""
    source: str


_TRANSCEIVERS = (
    Transceiver(
        "802.11a",
        16.0,
        -82.0,
        "IEEE 802.11a-1999: 40 mW, the most at 5.15 to 5.25 GHz (17.3.9.1); what every receiver must hear at 6 Mbit/s, "
        "with at most 10 % of frames of 1,000 bytes lost (17.3.10.1)",
    ),
    Transceiver(
        "802.15.4",
        0.0,
        -95.0,
        "Texas Instruments CC2420 data sheet SWRS041, 2.4 GHz, as in TelosB motes: nominal output power at the highest "
        "setting; typical sensitivity with 1 % of packets lost (at least -90 dBm; the standard asks for -85)",
    ),
)

TRANSCEIVERS = {each.name: each for each in _TRANSCEIVERS}


@dataclass(frozen=True)
class Propagation:
    """Propagation model: path loss with shadowing."""

    transmit_power: float
    """dBm."""
    sensitivity: float
    """dBm."""
    path_loss_exponent: float
    reference_loss: float
    """dB at one metre."""
    shadowing: float
    """Standard deviation in dB."""

    def path_loss(self, distance: float) -> float:
        """Return the mean loss in dB at a distance in metres, which is constant below one metre."""
        far = max(distance, REFERENCE_DISTANCE) / REFERENCE_DISTANCE
        return self.reference_loss + 10 * self.path_loss_exponent * math.log10(far)

    def reception_ratio(self, distance: float) -> float:
        """Return the probability, from 0 to 1, of receiving a transmission at a distance in metres."""
        margin = self.transmit_power - self.path_loss(distance) - self.sensitivity
        if self.shadowing == 0:
            return float(margin >= 0)
        return NormalDist(0, self.shadowing).cdf(margin)


def with_mean_reception(
    propagation: Propagation, positions: Iterable[Position], mean: float
) -> Propagation:
    """Adjust the transmit power to reach a mean reception ratio over all pairs.

    ``mean`` is above 0 and below 1. Raises ValueError without shadowing, or for fewer than two positions.
    """
    distances = [math.dist(one, other) for one, other in combinations(positions, 2)]
    if propagation.shadowing == 0 or not distances:
        raise ValueError(
            "without shadowing, or for one device alone, no power gives every mean"
        )

    def excess(power: float) -> float:
        there = replace(propagation, transmit_power=power)
        return (
            sum(there.reception_ratio(distance) for distance in distances)
            / len(distances)
            - mean
        )

    weak, strong = -500.0, 500.0
    while strong - weak > 1e-9:
        middle = (weak + strong) / 2
        weak, strong = (weak, middle) if excess(middle) > 0 else (middle, strong)
    return replace(propagation, transmit_power=strong)


def draw_positions(
    names: Iterable[str],
    given: Mapping[str, Position],
    area: tuple[float, float],
    seed: int,
) -> dict[str, Position]:
    """Return where each device is: as given, else anywhere in the area (metres) with equal probability.

    What is drawn for a device depends on its name and the seed alone, not on which others there are.
    """
    return {
        name: given.get(name) or _random_position(area, derive(seed, "position", name))
        for name in names
    }


def _random_position(area: tuple[float, float], seed: int) -> Position:
    draws = random.Random(seed)
    return (draws.uniform(0, area[0]), draws.uniform(0, area[1]))


@dataclass(frozen=True)
class Radio:
    """Devices that communicate by radio, with their positions."""

    propagation: Propagation
    positions: Mapping[str, Position]
    """Position of each device, in metres."""
    packets: int | None
    """Number of packets in a measurement of the reception ratio; None for the exact probability."""
    seed: int

    def reception_ratio(self, pair: Pair, exponent: float | None = None) -> float:
        """Return the packet reception ratio (PRR) of a directed pair (source, destination): from 0 to 1.

        With ``packets`` it is measured, as devices do: that number is sent each way, and those received are
        counted. Without, it is the probability itself, which is the same both ways. ``exponent``: with another path
        loss exponent and the same draws, so that what was lost with a lower one is lost with a higher one as well.
        """
        propagation = (
            self.propagation
            if exponent is None
            else replace(self.propagation, path_loss_exponent=exponent)
        )
        source, destination = pair
        ratio = propagation.reception_ratio(
            math.dist(self.positions[source], self.positions[destination])
        )
        if self.packets is None:
            return ratio
        draws = random.Random(derive(self.seed, "prr", source, destination))
        return sum(draws.random() < ratio for _ in range(self.packets)) / self.packets
