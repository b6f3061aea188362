"""Which pairs of devices are linked, and which share one channel: a radio cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Literal

from testbed.network.link import Pair


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
