"""Mapping of super neurons to devices (Algorithm 2, hill climbs, random, exhaustive), and choice of the coordinator."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from testbed.common.seeds import derive
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.network.link import Pair

Matrix = tuple[tuple[float, ...], ...]
"""By sender, then by receiver; nothing on the diagonal."""
Order = tuple[int, ...]
"""For each super neuron, the index of its device."""

MOST_EXHAUSTIVE = 9
"""Devices; ten have 3.6 million orders."""
CLIMBS = 300
"""Random orders from which `climbed_order` climbs.

In the worst of 800 random topologies of 4 to 7 devices one climb in 13 led to the best of all orders.
"""


def count_transmissions(arrangement: NeuronAssignment) -> tuple[tuple[int, ...], ...]:
    """Return the number of transmissions per batch from each super neuron (row) to each other (column)."""
    counted: Counter[Pair] = Counter()
    for source, target in arrangement.passes:
        counted.update(
            itertools.product(arrangement.holders(source), arrangement.holders(target))
        )
    names = arrangement.devices
    return tuple(tuple(counted[a, b] if a != b else 0 for b in names) for a in names)


def connectivity(arrangement: NeuronAssignment) -> Matrix:
    """Return the super-neuron topology: transmissions relative to the busiest pair, from 0 to 1."""
    counted = count_transmissions(arrangement)
    most = max((value for row in counted for value in row), default=0) or 1
    return tuple(tuple(value / most for value in row) for row in counted)


def reception_matrix(names: Sequence[str], ratios: Mapping[Pair, float]) -> Matrix:
    """Return the reception ratios of all pairs (source, destination) in the order of the names; 0 without a link."""
    return tuple(
        tuple(0.0 if a == b else ratios.get((a, b), 0.0) for b in names) for a in names
    )


def score_order(wanted: Matrix, ratios: Matrix, order: Order) -> float:
    """Return the sum of the Hadamard product of super-neuron connectivity and device reception ratios."""
    return _make_scorer(wanted, ratios)(order)


def _make_scorer(wanted: Matrix, ratios: Matrix) -> Callable[[Order], float]:
    edges = [
        (a, b, weight)
        for a, row in enumerate(wanted)
        for b, weight in enumerate(row)
        if weight
    ]
    return lambda order: sum(
        weight * ratios[order[a]][order[b]] for a, b, weight in edges
    )


def generation_count(devices: int) -> int:
    """Return the number of generations in the paper's experiments."""
    return 1_000 if devices <= 6 else 10_000


def genetic_order(
    wanted: Matrix, ratios: Matrix, seed: int, count: int | None = None
) -> Order:
    """Return the result of Algorithm 2 after ``count`` generations, by default the paper's.

    A generation compares the best order so far with a random one and with a rotation of it by one place. As printed, an
    order equal to the best one replaces it. If all links are alike, no order is better than another, and the devices
    keep theirs.
    """
    best: Order = tuple(range(len(wanted)))
    if len({ratios[a][b] for a in best for b in best if a != b}) < 2:
        return best
    draws = random.Random(derive(seed, "mapping"))
    value = _make_scorer(wanted, ratios)
    reached = value(best)
    for _ in range(generation_count(len(wanted)) if count is None else count):
        shuffled, turned = tuple(draws.sample(best, len(best))), (*best[1:], *best[:1])
        values = value(shuffled), value(turned)
        if values[0] >= max(values[1], reached):
            best, reached = shuffled, values[0]
        elif values[1] >= reached:
            best, reached = turned, values[1]
    return best


def climbed_order(wanted: Matrix, ratios: Matrix, seed: int) -> Order:
    """Return the best order that exchanges of two devices find, from Algorithm 2's order and from random ones."""
    value = _make_scorer(wanted, ratios)
    first = genetic_order(wanted, ratios, seed)
    draws = random.Random(derive(seed, "mapping", "climbing"))
    starts = [first, *(tuple(draws.sample(first, len(first))) for _ in range(CLIMBS))]
    return max(
        (_climb_order(start, value) for start in starts),
        key=lambda order: round(value(order), 12),
    )


def _climb_order(order: Order, value: Callable[[Order], float]) -> Order:
    """Exchange pairs of devices while an order improves by more than rounding."""
    reached, improves = value(order), True
    while improves:
        improves = False
        for a, b in itertools.combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[a], swapped[b] = order[b], order[a]
            if (score := value(tuple(swapped))) > reached + 1e-12:
                order, reached, improves = tuple(swapped), score, True
    return order


def random_order(devices: int, seed: int, draw: int = 1) -> Order:
    """Return a uniformly random order: the paper's Random. Each ``draw``, from 1 on, gives another order."""
    draws = random.Random(derive(seed, "mapping", "random"))
    return [tuple(draws.sample(range(devices), devices)) for _ in range(draw)][-1]


def best_order(wanted: Matrix, ratios: Matrix) -> Order:
    """Return the best of all orders, the first on ties: the paper's Upper.

    Raises ValueError for more than nine devices.
    """
    if len(wanted) > MOST_EXHAUSTIVE:
        raise ValueError(
            f"{len(wanted)} devices have too many permutations for an exhaustive search: at most {MOST_EXHAUSTIVE}"
        )
    return max(
        itertools.permutations(range(len(wanted))), key=_make_scorer(wanted, ratios)
    )


def choose_coordinator(names: Sequence[str], ratios: Mapping[Pair, float]) -> str:
    """Return the device of the highest closeness centrality on expected transmissions; the first on ties.

    A link of reception ratio p takes 1/p transmissions on average; distances are those of the cheapest paths away from
    the device (Floyd and Warshall). A pair missing in ``ratios``, or with ratio 0, has no link.
    """
    distances = {
        (a, b): 0.0
        if a == b
        else 1 / ratios[a, b]
        if ratios.get((a, b), 0) > 0
        else math.inf
        for a in names
        for b in names
    }
    for middle, a, b in itertools.product(names, repeat=3):
        distances[a, b] = min(
            distances[a, b], distances[a, middle] + distances[middle, b]
        )
    return min(
        names, key=lambda name: math.fsum(distances[name, other] for other in names)
    )
