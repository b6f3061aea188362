"""Which pairs of devices are linked. Devices without a link between them cannot talk at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Literal

from testbed.network.link import Pair

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
