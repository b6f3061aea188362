"""How well devices hear each other: log-distance path loss with shadowing, from positions to reception ratios.

The received power is the transmit power less the path loss, ``reference_loss + 10 * exponent * log10(distance)`` in
dB for a distance in metres, less a shadowing drawn from N(0, shadowing^2) dB for each transmission. It is
received when that is not below the receiver's sensitivity.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from testbed.network.link import Pair
from testbed.seeds import derive

Position = tuple[float, float]
"""Metres east and north of a corner of the area."""

REFERENCE_DISTANCE = 1.0
"""Metres at which a loss is the reference loss. The formula does not hold nearer than that and is not used there."""


@dataclass(frozen=True)
class Transceiver:
    """What a kind of radio sends with and what it still receives."""

    name: str
    transmit_power: float
    """dBm."""
    sensitivity: float
    """dBm; what arrives with less is lost."""
    source: str


_TRANSCEIVERS = (
    Transceiver(
        "802.11a",
        16.0,
        -82.0,
        "IEEE 802.11a-1999 at 5.15 to 5.25 GHz: 40 mW, the most that it allows; minimum sensitivity at 6 Mbit/s",
    ),
    Transceiver(
        "802.15.4",
        0.0,
        -95.0,
        "Texas Instruments CC2420 data sheet, 2.4 GHz, as in TelosB motes: highest output power; typical sensitivity",
    ),
)

TRANSCEIVERS = {each.name: each for each in _TRANSCEIVERS}


@dataclass(frozen=True)
class Propagation:
    """What becomes of a transmission between two positions."""

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
        """Return the mean loss in dB over a distance in metres; below one metre, that of one metre."""
        far = max(distance, REFERENCE_DISTANCE) / REFERENCE_DISTANCE
        return self.reference_loss + 10 * self.path_loss_exponent * math.log10(far)

    def reception_ratio(self, distance: float) -> float:
        """Return the probability that a transmission over a distance in metres is received."""
        margin = self.transmit_power - self.path_loss(distance) - self.sensitivity
        if self.shadowing == 0:
            return float(margin >= 0)
        return NormalDist(0, self.shadowing).cdf(margin)


def draw_positions(
    names: Iterable[str], given: Mapping[str, Position], area: tuple[float, float], seed: int
) -> dict[str, Position]:
    """Return where each device is: as given, else anywhere in the area (metres) with equal probability.

    What is drawn for a device depends on its name and the seed alone, not on which others there are.
    """
    return {name: given.get(name) or _anywhere(area, derive(seed, "position", name)) for name in names}


def _anywhere(area: tuple[float, float], seed: int) -> Position:
    draws = random.Random(seed)
    return (draws.uniform(0, area[0]), draws.uniform(0, area[1]))


def reception_ratios(
    propagation: Propagation, positions: Mapping[str, Position], packets: int | None, seed: int
) -> dict[Pair, float]:
    """Return the packet reception ratio (PRR) of each directed pair (source, destination).

    With ``packets`` it is measured, as devices do: that number is sent each way, and those received are
    counted. Without, it is the probability itself, which is the same both ways.
    """
    found = {}
    for source, here in positions.items():
        for destination, there in positions.items():
            if source == destination:
                continue
            ratio = propagation.reception_ratio(math.dist(here, there))
            if packets is not None:
                ratio = _measured(ratio, packets, derive(seed, "prr", source, destination))
            found[source, destination] = ratio
    return found


def _measured(ratio: float, packets: int, seed: int) -> float:
    draws = random.Random(seed)
    return sum(draws.random() < ratio for _ in range(packets)) / packets
