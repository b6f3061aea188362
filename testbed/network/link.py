"""Directed links as values, the pairs of a topology, and cells that share a channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, permutations
from typing import Any, Literal

Pair = tuple[str, str]
"""(source device, destination device): a link is directed."""


Distribution = Literal["normal", "uniform", "pareto"]
"""Distribution of a jitter, by netem's names."""


def least_rate(*rates: float | None) -> float | None:
    """Return the minimum of some rates in bit/s, where None means unlimited (as fast as the host).

    >>> least_rate(50e6, None, 10e6)
    10000000.0
    """
    return min((rate for rate in rates if rate is not None), default=None)


def transmission_time(wire_bytes: float, rate: float | None) -> float:
    """Return the seconds needed to put bytes on the wire at a rate in bit/s; 0 without a rate.

    >>> transmission_time(1500, 10e6)
    0.0012
    """
    return 0.0 if rate is None else wire_bytes * 8 / rate


@dataclass(frozen=True)
class GilbertElliott:
    """Bursty loss: a two-state Markov chain moving before each packet.

    The parameters are those of netem (``loss gemodel p r 1-h 1-k``). The share of time in the bad state is p / (p + r).

    >>> round(GilbertElliott(p=0.01, r=0.25).loss, 4)
    0.0385
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
    """Properties of a directed link between two devices.

    The rate acts at the sender; all other properties act at the receiver, on the packets of this sender. A link that is
    not ``up`` drops all packets silently, as in a network partition.

    >>> Link(rate=10e6, delay=0.005).transmission_time(1250)
    0.001
    """

    rate: float | None = None
    """bit/s on the wire (Ethernet frames); None is as fast as the host."""
    delay: float = 0.0
    """One-way delay in seconds; the mean for a link with jitter."""
    jitter: float = 0.0
    """Standard deviation of the delay in seconds, for every distribution."""
    distribution: Distribution = "normal"
    """Distribution of the jitter."""
    jitter_correlation: float = 0.0
    """Correlation of successive packets' delays, from 0 to 1."""
    loss: float = 0.0
    """Fraction of packets lost, each independently unless correlated."""
    loss_correlation: float = 0.0
    """Correlation of successive losses, from 0 to 1. Unlike in netem, the correlation leaves the share of losses as it
    is."""
    bursts: GilbertElliott | None = None
    """Loss in bursts, instead of ``loss``."""
    message_loss: float = 0.0
    """Fraction of broadcasts lost whole, independently for each receiver; with ``frame``, the fraction of frames lost.
    """
    duplicate: float = 0.0
    """Fraction of packets that arrive twice, unless one copy is lost."""
    reorder: float = 0.0
    """Fraction of packets that skip the delay and overtake others."""
    corrupt: float = 0.0
    """Fraction of packets in which one bit is wrong."""
    limit: int | None = None
    """Capacity in packets of the queue before the rate limit; None derives the capacity from the bandwidth-delay
    product."""
    up: bool = True
    """Whether any packets arrive."""
    frame: int | None = None
    """Bytes of a frame, if casts are lost frame by frame; None if each cast is lost as a whole."""

    def transmission_time(self, wire_bytes: float) -> float:
        """Return the seconds needed to put bytes on the wire."""
        return transmission_time(wire_bytes, self.rate)

    def to_json(self) -> dict[str, Any]:
        """Return all properties as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Link:
        """Parse the output of `to_json`. Raises TypeError for an unknown field."""
        properties = dict(values)
        if properties.get("bursts") is not None:
            properties["bursts"] = GilbertElliott(**properties["bursts"])
        return Link(**properties)


_FEW_PACKETS = 8 * 1514
"""Bytes of 8 full packets: upper bound of the bytes that a kernel queues before it needs an acknowledgement."""
_DEVIATIONS = 3
"""Standard deviations of jitter in a time-out; less than 0.2 % of normally distributed delays are longer."""


def slowness(forward: Link, backward: Link) -> float:
    """Return an upper bound in seconds for the round trip of a few full packets, by which time-outs are extended."""
    seconds = 0.0
    for link in (forward, backward):
        longest_delay = link.delay + _DEVIATIONS * link.jitter
        seconds += longest_delay + link.transmission_time(_FEW_PACKETS)
    return seconds


def links_to_json(links: Mapping[Pair, Link]) -> list[dict[str, Any]]:
    """Return directed links as plain values: source, destination and the properties of each."""
    entries = []
    for (source, destination), link in links.items():
        entry = {"source": source, "destination": destination, **link.to_json()}
        entries.append(entry)
    return entries


def links_from_json(entries: Iterable[Mapping[str, Any]]) -> dict[Pair, Link]:
    """Parse the output of `links_to_json`. Raises KeyError or TypeError for missing or unknown fields."""
    links = {}
    for entry in entries:
        values = dict(entry)
        pair = (values.pop("source"), values.pop("destination"))
        links[pair] = Link.from_json(values)
    return links


@dataclass(frozen=True)
class Cell:
    """Devices on one radio channel, whose rate is shared by all transmissions between members.

    Messages from a member to a device outside the cell do not use the channel. The rates of the links apply in addition
    to that of the channel.
    """

    devices: tuple[str, ...]
    rate: float
    """Rate of the channel in bit/s on the wire, for the sum of all transmissions."""

    def carries(self, pair: Pair) -> bool:
        """Return whether a transmission between two devices uses the channel."""
        return pair[0] in self.devices and pair[1] in self.devices


def cell_of(pair: Pair, cells: Iterable[Cell]) -> Cell | None:
    """Return the cell of a pair; at most one exists."""
    for cell in cells:
        if cell.carries(pair):
            return cell
    return None


Topology = Literal["mesh", "star", "line", "explicit"]
"""Rule that decides which devices are linked; see `directed_pairs`."""


def directed_pairs(topology: Topology, names: Sequence[str]) -> list[Pair]:
    """Return every (source, destination) of a topology, in both directions.

    mesh: all to all; star: all to the first; line: neighbours in the given order; explicit: none, since the scenario
    lists its links. Devices never forward messages, so two leaves of a star cannot communicate.

    >>> directed_pairs("line", ["a", "b", "c"])
    [('a', 'b'), ('b', 'a'), ('b', 'c'), ('c', 'b')]
    """
    if topology == "mesh":
        return list(permutations(names, 2))
    neighbours: Iterable[Pair] = ()
    if topology == "star":
        neighbours = ((names[0], leaf) for leaf in names[1:])
    elif topology == "line":
        neighbours = pairwise(names)
    pairs: list[Pair] = []
    for one, other in neighbours:
        pairs += [(one, other), (other, one)]
    return pairs
