"""Reception ratios of radio links from positions: log-distance path loss with shadowing.

The received power is the transmit power less the path loss, ``reference_loss + 10 * exponent * log10(distance)`` in
dB for a distance in metres, less a shadowing drawn from N(0, shadowing^2) dB for each transmission. A transmission is
received if its power is not below the receiver's sensitivity.
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
"""Distance of the reference loss in metres. The formula of the path loss is invalid at shorter distances, which
therefore have the reference loss."""


@dataclass(frozen=True)
class Transceiver:
    """Transmit power and receiver sensitivity of a radio."""

    name: str
    transmit_power: float
    """Power in dBm."""
    sensitivity: float
    """Minimum received power in dBm; weaker signals are lost."""
    source: str
    """Standard or data sheet that states the values."""


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
"""Radios by the names of `network.radio.preset`."""


@dataclass(frozen=True)
class Propagation:
    """Propagation model: path loss with shadowing.

    >>> propagation = Propagation(16.0, -82.0, 3.1, 46.68, shadowing=8.0)
    >>> round(propagation.path_loss(100.0), 2), round(propagation.reception_ratio(40.0), 3)
    (108.68, 0.582)
    """

    transmit_power: float
    """Power in dBm."""
    sensitivity: float
    """Minimum received power in dBm."""
    path_loss_exponent: float
    """2 in free space, more indoors."""
    reference_loss: float
    """Path loss in dB at `REFERENCE_DISTANCE`."""
    shadowing: float
    """Standard deviation of the shadowing in dB."""

    def path_loss(self, distance: float) -> float:
        """Return the mean loss in dB at a distance in metres, which is constant below one metre."""
        ratio = max(distance, REFERENCE_DISTANCE) / REFERENCE_DISTANCE
        return self.reference_loss + 10 * self.path_loss_exponent * math.log10(ratio)

    def reception_ratio(self, distance: float) -> float:
        """Return the probability, from 0 to 1, of receiving a transmission at a distance in metres."""
        margin = self.transmit_power - self.path_loss(distance) - self.sensitivity
        # A normal distribution without deviation is not defined.
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
            "a mean reception ratio requires shadowing and at least two devices"
        )

    def excess(power: float) -> float:
        candidate = replace(propagation, transmit_power=power)
        ratios = sum(candidate.reception_ratio(distance) for distance in distances)
        return ratios / len(distances) - mean

    # The mean rises with the power, which bisection finds. The power of any radio is between these bounds in dBm.
    low, high = -500.0, 500.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if excess(middle) > 0:
            high = middle
        else:
            low = middle
    return replace(propagation, transmit_power=high)


def draw_positions(
    names: Iterable[str],
    fixed: Mapping[str, Position],
    area: tuple[float, float],
    seed: int,
) -> dict[str, Position]:
    """Return the position of each device in metres: from ``fixed``, or drawn uniformly from the area.

    The draw for a device depends only on its name and the seed, not on the other devices.
    """
    positions = {}
    for name in names:
        random_position = _random_position(area, derive(seed, "position", name))
        positions[name] = fixed.get(name, random_position)
    return positions


def _random_position(area: tuple[float, float], seed: int) -> Position:
    width, height = area
    generator = random.Random(seed)
    return (generator.uniform(0, width), generator.uniform(0, height))


@dataclass(frozen=True)
class Radio:
    """Devices communicating by radio, with their positions."""

    propagation: Propagation
    positions: Mapping[str, Position]
    """Position of each device, in metres."""
    packets: int | None
    """Number of packets in a measurement of the reception ratio; None for the exact probability."""
    seed: int
    """Seed of the run, from which the draws of the measurements are derived."""

    def reception_ratio(self, pair: Pair, exponent: float | None = None) -> float:
        """Return the packet reception ratio (PRR) of a directed pair (source, destination): from 0 to 1.

        If `packets` is set, the ratio is the result of a measurement with this number of packets, which may differ
        between the two directions; otherwise the ratio is the exact probability. An ``exponent`` replaces the path loss
        exponent.
        """
        propagation = self.propagation
        if exponent is not None:
            propagation = replace(propagation, path_loss_exponent=exponent)
        source, destination = pair
        distance = math.dist(self.positions[source], self.positions[destination])
        ratio = propagation.reception_ratio(distance)
        if self.packets is None:
            return ratio
        # The draws are equal for all exponents, so a higher exponent loses every packet that a lower exponent loses.
        generator = random.Random(derive(self.seed, "prr", source, destination))
        received = sum(generator.random() < ratio for _ in range(self.packets))
        return received / self.packets
