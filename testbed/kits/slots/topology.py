"""How often super neurons transmit to each other, and which device is best placed to tell the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from testbed.kits.slots.partition import Partition
from testbed.network.link import Pair

Matrix = tuple[tuple[float, ...], ...]
"""By sender, then by receiver; nothing on the diagonal."""


def passes(partition: Partition) -> tuple[tuple[int, ...], ...]:
    """Return how often each super neuron (row) transmits to each other (column) for one batch.

    Forward from each layer to the next, backward from each but the first two layers to the one before (the input
    layer learns nothing), and the results of the output layer among those that hold it.
    """
    count = len(partition.super_neurons)
    found = [[0] * count for _ in range(count)]

    def add(senders: Sequence[int], receivers: Sequence[int]) -> None:
        for sender in senders:
            for receiver in receivers:
                found[sender][receiver] += sender != receiver

    layers = range(len(partition.neurons))
    for layer in layers[1:]:
        add(partition.holders(layer - 1), partition.holders(layer))
        if layer > 1:
            add(partition.holders(layer), partition.holders(layer - 1))
    add(partition.holders(layers[-1]), partition.holders(layers[-1]))
    return tuple(map(tuple, found))


def connectivity(partition: Partition) -> Matrix:
    """Return the super-neuron topology: passes in relation to those of the pair with most, from 0 to 1."""
    counted = passes(partition)
    most = max((value for row in counted for value in row), default=0) or 1
    return tuple(tuple(value / most for value in row) for row in counted)


def coordinator(names: Sequence[str], ratios: Mapping[Pair, float]) -> str:
    """Return the device of the highest closeness centrality on expected transmissions; of equals the first.

    A link of reception ratio p takes 1/p transmissions on average; distances are those of the cheapest paths away from
    the device. A pair that ``ratios`` does not have, or has as 0, is not linked.
    """
    distances = _distances(names, ratios)
    return min(names, key=lambda name: math.fsum(distances[name, other] for other in names))


def _distances(names: Sequence[str], ratios: Mapping[Pair, float]) -> dict[Pair, float]:
    """Return the expected transmissions from each device to each by the cheapest path (Floyd and Warshall)."""
    found = {
        (a, b): 0.0 if a == b else 1 / ratios[a, b] if ratios.get((a, b), 0) > 0 else math.inf
        for a in names
        for b in names
    }
    for middle in names:
        for a in names:
            for b in names:
                found[a, b] = min(found[a, b], found[a, middle] + found[middle, b])
    return found
