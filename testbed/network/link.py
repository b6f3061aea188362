"""Directed links between two devices, as values; which pairs of a topology have one, and cells that share a channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, permutations
from typing import Any, Literal

Pair = tuple[str, str]
"""(source device, destination device): a link is directed."""


Distribution = Literal["normal", "uniform", "pareto"]


def least_rate(*rates: float | None) -> float | None:
    """Return the least of some rates in bit/s; None, as fast as the host, is more than any other rate."""
    return min((rate for rate in rates if rate is not None), default=None)


def transmission_time(wire_bytes: float, rate: float | None) -> float:
    """Return the seconds that a sender needs to put bytes on the wire at a rate in bit/s; 0 without a rate."""
    return 0.0 if rate is None else wire_bytes * 8 / rate


@dataclass(frozen=True)
class GilbertElliott:
    """Loss in bursts: a chain that is in a good or a bad state, and moves before each packet.

    In netem's terms (``loss gemodel p r 1-h 1-k``). The share of time in the bad state is p / (p + r).
    """

    p: float
    """Probability of going from good to bad."""
    r: float
    """Probability of going from bad to good."""
    bad_loss: float = 1.0
    """1 - h: fraction of packets lost in the bad state."""
    good_loss: float = 0.0
    """1 - k: fraction of packets lost in the good state."""

    @property
    def loss(self) -> float:
        """Fraction of packets lost in the long run."""
        bad = self.p / (self.p + self.r)
        return bad * self.bad_loss + (1 - bad) * self.good_loss


@dataclass(frozen=True)
class Link:
    """What packets meet on their way from one device to another.

    The rate is charged at the sender; all the rest acts at the receiver, by source. A link that is not ``up`` drops
    everything silently, as a partition does.
    """

    rate: float | None = None
    """bit/s on the wire (Ethernet frames); None is as fast as the host."""
    delay: float = 0.0
    """One-way delay in seconds; the mean where there is jitter."""
    jitter: float = 0.0
    """Standard deviation of the delay in seconds, whatever its distribution."""
    distribution: Distribution = "normal"
    """Distribution of the jitter."""
    jitter_correlation: float = 0.0
    """Correlation of successive packets' delays, from 0 to 1."""
    loss: float = 0.0
    """Fraction of packets lost, each independently unless correlated."""
    loss_correlation: float = 0.0
    """Correlation of successive packets' fates, from 0 to 1; the share of losses stays what it is, unlike netem's."""
    bursts: GilbertElliott | None = None
    """Loss in bursts, instead of ``loss``."""
    message_loss: float = 0.0
    """Fraction of casts lost whole, each receiver for itself: what radio studies mean by loss. With ``frame``, of their
    frames."""
    duplicate: float = 0.0
    """Fraction of packets that arrive twice, unless one copy is lost."""
    reorder: float = 0.0
    """Fraction of packets that skip the delay, and so overtake the others."""
    corrupt: float = 0.0
    """Fraction of packets in which one bit is wrong."""
    limit: int | None = None
    """Packets that the queue before the rate holds; None follows from the bandwidth-delay product."""
    up: bool = True
    frame: int | None = None
    """Bytes of a frame, where casts are lost by frames; None: whole."""

    def transmission_time(self, wire_bytes: float) -> float:
        """Return the seconds that the sender is busy putting bytes on the wire."""
        return transmission_time(wire_bytes, self.rate)

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(figures: Mapping[str, Any]) -> Link:
        """Return the link that `to_json` wrote; raises TypeError for a figure that there is not."""
        bursts = figures.get("bursts")
        return Link(**{**figures, "bursts": None if bursts is None else GilbertElliott(**bursts)})


_FEW_PACKETS = 8 * 1514
"""Bytes that a kernel puts into a queue before it waits for acknowledgements, generously."""
_DEVIATIONS = 3
"""Standard deviations by which jitter may delay a packet that is not lost."""


def slowness(there: Link, back: Link) -> float:
    """Return the seconds that a few full packets may take there and back: what a time-out has to allow for."""
    return sum(link.delay + _DEVIATIONS * link.jitter + link.transmission_time(_FEW_PACKETS) for link in (there, back))


def links_to_json(links: Mapping[Pair, Link]) -> list[dict[str, Any]]:
    """Return directed links as plain values: source, destination and the figures of each."""
    return [{"source": pair[0], "destination": pair[1], **link.to_json()} for pair, link in links.items()]


def links_from_json(entries: Iterable[Mapping[str, Any]]) -> dict[Pair, Link]:
    """Return the links that `links_to_json` wrote; raises KeyError or TypeError for what is missing or unknown."""
    links = {}
    for entry in entries:
        figures = dict(entry)
        pair = (figures.pop("source"), figures.pop("destination"))
        links[pair] = Link.from_json(figures)
    return links


@dataclass(frozen=True)
class Cell:
    """Devices that hear each other on one channel: what any of them sends to another takes from one rate.

    What a member sends to a device outside of the cell goes another way and costs the channel nothing. The links' own
    rates hold beside the channel's.
    """

    devices: tuple[str, ...]
    rate: float
    """bit/s on the wire, of all transmissions together."""

    def carries(self, pair: Pair) -> bool:
        """Return whether a transmission between the two takes from the channel."""
        return pair[0] in self.devices and pair[1] in self.devices


def cell_of(pair: Pair, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell that carries a pair; there is one at most."""
    return next((cell for cell in cells if cell.carries(pair)), None)


Topology = Literal["mesh", "star", "line", "explicit"]


def directed_pairs(topology: Topology, names: Sequence[str]) -> list[Pair]:
    """Return every (source, destination) that the topology links, both directions of each.

    mesh: everyone to everyone; star: everyone to the first; line: neighbours in the order given; explicit: nobody,
    the scenario lists its links. Nobody forwards for others: in a star two leaves cannot talk.
    """
    if topology == "mesh":
        return list(permutations(names, 2))
    if topology == "star":
        return [pair for leaf in names[1:] for pair in ((names[0], leaf), (leaf, names[0]))]
    if topology == "line":
        return [pair for left, right in pairwise(names) for pair in ((left, right), (right, left))]
    return []
