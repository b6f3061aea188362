"""Which device takes which super neuron: Algorithm 2, chance, and the best of all orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from testbed.common.seeds import derive
from testbed.kits.slots.topology import Matrix

Order = tuple[int, ...]
"""For each super neuron, the index of its device."""

MOST_EXHAUSTIVE = 9
"""Devices; ten have 3.6 million orders."""


def score(wanted: Matrix, ratios: Matrix, order: Order) -> float:
    """Return the sum of the Hadamard product: connectivity of super neurons times reception ratio of their devices."""
    return _scorer(wanted, ratios)(order)


def _scorer(wanted: Matrix, ratios: Matrix) -> Callable[[Order], float]:
    edges = [(a, b, weight) for a, row in enumerate(wanted) for b, weight in enumerate(row) if weight]

    def score(order: Order) -> float:
        return sum(weight * ratios[order[a]][order[b]] for a, b, weight in edges)

    return score


def generations(devices: int) -> int:
    """Return how many generations the paper's experiments take."""
    return 1_000 if devices <= 6 else 10_000


def genetic(wanted: Matrix, ratios: Matrix, seed: int, count: int | None = None) -> Order:
    """Return what Algorithm 2 finds in ``count`` generations, those of the paper unless given.

    A generation puts the best order so far beside a random one and beside the same turned by one place. So it need not
    find the best of all: see `exhaustive`.
    """
    draws = random.Random(derive(seed, "mapping"))
    value = _scorer(wanted, ratios)
    best: Order = tuple(range(len(wanted)))
    reached = value(best)
    for _ in range(generations(len(wanted)) if count is None else count):
        shuffled = tuple(draws.sample(best, len(best)))
        turned = (*best[1:], *best[:1])
        for each, found in [(shuffled, value(shuffled)), (turned, value(turned))]:
            if found > reached:
                best, reached = each, found
    return best


def by_chance(devices: int, seed: int) -> Order:
    """Return any order, all equally likely: the paper's Random."""
    return tuple(random.Random(derive(seed, "mapping", "random")).sample(range(devices), devices))


def exhaustive(wanted: Matrix, ratios: Matrix) -> Order:
    """Return the best of all orders, of equals the first: the paper's Upper. Raises ValueError beyond nine devices."""
    if len(wanted) > MOST_EXHAUSTIVE:
        raise ValueError(f"{len(wanted)} devices have too many orders to try: at most {MOST_EXHAUSTIVE}")
    return max(itertools.permutations(range(len(wanted))), key=_scorer(wanted, ratios))


def matrix(names: Sequence[str], ratio: Callable[[str, str], float]) -> Matrix:
    """Return the reception ratios of all pairs (source, destination) in the order of the names."""
    return tuple(tuple(0.0 if a == b else ratio(a, b) for b in names) for a in names)
