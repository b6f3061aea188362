"""Mapping of super neurons to devices, and choice of EdgePipe's device coordinator.

There are four mappings: EdgePipe's Algorithm 2 (`genetic_order`), hill climbs (`climbed_order`), a random order
(`random_order`) and an exhaustive search (`best_order`).

Super neurons that transmit often should have devices with good links. A mapping is an order of the devices: the i-th
device gets the i-th super neuron. Its score is the sum over all pairs of super neurons of (transmissions, relative to
the busiest pair) x (reception ratio of the link): the Hadamard product of the paper's two topologies.
"""

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
"""A value for each (sender, receiver), by row and column; zeros on the diagonal."""
Order = tuple[int, ...]
"""For each super neuron, the index of its device."""

MAX_EXHAUSTIVE_DEVICES = 9
"""Maximum number of devices of an exhaustive search: ten devices have 3.6 million orders."""
CLIMBS = 300
"""Number of random orders from which `climbed_order` climbs.

In the worst of 800 random topologies of 4 to 7 devices one climb in 13 led to the best of all orders, so that 300 miss
this order very rarely.
"""


def count_transmissions(assignment: NeuronAssignment) -> tuple[tuple[int, ...], ...]:
    """Return the number of transmissions per batch from each super neuron (row) to each other (column).

    In each pass between two layers (`NeuronAssignment.layer_passes`), every super neuron with neurons of the sending
    layer transmits once to every super neuron with neurons of the receiving layer. In the example, both have neurons of
    all three layers, so all four passes count: two forward, one backward, and one that shares the results.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> count_transmissions(partition_neurons([4, 4, 2], ["a", "b"], "horizontal"))
    ((0, 4), (4, 0))
    """
    transmissions: Counter[Pair] = Counter()
    for source, target in assignment.layer_passes:
        senders = assignment.holders(source)
        receivers = assignment.holders(target)
        # Neurons of adjacent layers are fully connected, so each sender has values for each receiver.
        transmissions.update(itertools.product(senders, receivers))
    names = assignment.devices
    # A device keeps its own values without a transmission.
    for name in names:
        transmissions[name, name] = 0
    rows = []
    for sender in names:
        row = [transmissions[sender, receiver] for receiver in names]
        rows.append(tuple(row))
    return tuple(rows)


def connectivity_matrix(assignment: NeuronAssignment) -> Matrix:
    """Return Algorithm 2's super-neuron topology: transmissions relative to the busiest pair, from 0 to 1.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> connectivity_matrix(partition_neurons([4, 4, 4], ["a", "b", "c"], "vertical"))
    ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0))
    """
    counts = count_transmissions(assignment)
    # A single device transmits nothing, and its matrix is all zeros.
    busiest = max(map(max, counts), default=0) or 1
    rows = []
    for row in counts:
        relative = [count / busiest for count in row]
        rows.append(tuple(relative))
    return tuple(rows)


def reception_matrix(names: Sequence[str], ratios: Mapping[Pair, float]) -> Matrix:
    """Return the reception ratios of all pairs (source, destination) in the order of the names; 0 without a link.

    >>> reception_matrix(["a", "b"], {("a", "b"): 0.9})
    ((0.0, 0.9), (0.0, 0.0))
    """
    rows = []
    for sender in names:
        row = []
        for receiver in names:
            # The diagonal stays 0, since a device has no link to itself.
            ratio = 0.0
            if sender != receiver:
                ratio = ratios.get((sender, receiver), 0.0)
            row.append(ratio)
        rows.append(tuple(row))
    return tuple(rows)


def score_order(connectivity: Matrix, reception: Matrix, order: Order) -> float:
    """Return the sum of the Hadamard product of super-neuron connectivity and device reception ratios.

    The arguments are a `connectivity_matrix` and a `reception_matrix`.

    >>> chain = ((0.0, 1.0), (0.0, 0.0))
    >>> reception = ((0.0, 0.9), (0.6, 0.0))
    >>> score_order(chain, reception, (0, 1)), score_order(chain, reception, (1, 0))
    (0.9, 0.6)
    """
    return _make_scorer(connectivity, reception)(order)


def _make_scorer(connectivity: Matrix, reception: Matrix) -> Callable[[Order], float]:
    """Return `score_order` for these topologies, as a function of the order."""
    # Most pairs of super neurons exchange nothing. Without these pairs, the thousands of scores of a search are cheap.
    edges = []
    for source, row in enumerate(connectivity):
        for target, weight in enumerate(row):
            if weight:
                edges.append((source, target, weight))

    def score(order: Order) -> float:
        products = []
        for source, target, weight in edges:
            sender = order[source]
            receiver = order[target]
            products.append(weight * reception[sender][receiver])
        return sum(products)

    return score


def generation_count(devices: int) -> int:
    """Return the number of generations in the paper's experiments with this number of devices."""
    return 1_000 if devices <= 6 else 10_000


def genetic_order(
    connectivity: Matrix,
    reception: Matrix,
    seed: int,
    count: int | None = None,
) -> Order:
    """Return the result of Algorithm 2 after ``count`` generations, by default the paper's.

    The paper calls Algorithm 2 a simple genetic algorithm (Section IV-B). Its population is one order: a generation
    compares the best order so far with a random order and with a rotation of the best one by one place. As printed, an
    order of equal score replaces the best one. If all links are alike, no order is better than another, and the devices
    keep their order.
    """
    best: Order = tuple(range(len(connectivity)))
    if _are_alike(reception):
        return best
    if count is None:
        count = generation_count(len(connectivity))
    draws = random.Random(derive(seed, "mapping"))
    score = _make_scorer(connectivity, reception)
    best_score = score(best)
    for _ in range(count):
        shuffled = tuple(draws.sample(best, len(best)))
        rotated = (*best[1:], *best[:1])
        shuffled_score = score(shuffled)
        rotated_score = score(rotated)
        # Lines 11 to 16: of orders with equal scores the random one wins, then the rotated one.
        if shuffled_score >= max(rotated_score, best_score):
            best = shuffled
            best_score = shuffled_score
        elif rotated_score >= best_score:
            best = rotated
            best_score = rotated_score
    return best


def _are_alike(reception: Matrix) -> bool:
    """Return whether all links have the same reception ratio."""
    values = set()
    for sender, receiver in itertools.permutations(range(len(reception)), 2):
        values.add(reception[sender][receiver])
    return len(values) < 2


def climbed_order(connectivity: Matrix, reception: Matrix, seed: int) -> Order:
    """Return the best order reached by hill climbs from Algorithm 2's order and from random orders.

    A climb exchanges two devices as long as an exchange improves the score.
    """
    score = _make_scorer(connectivity, reception)
    first = genetic_order(connectivity, reception, seed)
    draws = random.Random(derive(seed, "mapping", "climbing"))
    starts = [first]
    for _ in range(CLIMBS):
        shuffled = draws.sample(first, len(first))
        starts.append(tuple(shuffled))
    summits = [_climb_order(start, score) for start in starts]

    def rounded_score(order: Order) -> float:
        # Sums of equal terms in another order differ in the last bits. Rounded, they are equal, and the first order
        # wins.
        return round(score(order), 12)

    return max(summits, key=rounded_score)


def _climb_order(order: Order, score: Callable[[Order], float]) -> Order:
    """Return the order after exchanges of two devices, as long as an exchange improves the score."""
    best_score = score(order)
    improves = True
    while improves:
        improves = False
        for one, other in itertools.combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[one] = order[other]
            swapped[other] = order[one]
            swapped_score = score(tuple(swapped))
            # Better by more than the rounding of a sum: otherwise the loop could exchange equal orders for ever.
            if swapped_score > best_score + 1e-12:
                order = tuple(swapped)
                best_score = swapped_score
                improves = True
    return order


def random_order(devices: int, seed: int, number: int = 1) -> Order:
    """Return a uniformly random order: the paper's Random.

    ``number``, from 1 on, is the place of the order in the seed's sequence of orders. The orders of the sequence are
    drawn independently, so two numbers may give the same order, especially with few devices.
    """
    draws = random.Random(derive(seed, "mapping", "random"))
    for _ in range(number):
        order = tuple(draws.sample(range(devices), devices))
    return order


def best_order(connectivity: Matrix, reception: Matrix) -> Order:
    """Return the best of all orders, the first on ties: the paper's Upper.

    Among orders whose scores differ only by the rounding of sums, any may be returned. Raises ValueError for more than
    `MAX_EXHAUSTIVE_DEVICES` devices.
    """
    count = len(connectivity)
    if count > MAX_EXHAUSTIVE_DEVICES:
        raise ValueError(
            f"{count} devices are too many for an exhaustive search: use {MAX_EXHAUSTIVE_DEVICES} at most"
        )
    orders = itertools.permutations(range(count))
    return max(orders, key=_make_scorer(connectivity, reception))


def choose_device_coordinator(
    names: Sequence[str], ratios: Mapping[Pair, float]
) -> str:
    """Return EdgePipe's device coordinator, which partitions the model and informs all others of their neurons.

    This is the device of the highest closeness centrality on expected transmissions (Section IV), the first on ties. It
    may be another device than the coordinator of the plan, which records losses and scores.

    A link of reception ratio p takes 1/p transmissions on average; distances are those of the cheapest paths away from
    the device (Floyd and Warshall). A pair missing in ``ratios``, or with ratio 0, has no link.

    >>> choose_device_coordinator("abc", {("a", "b"): 0.5, ("b", "a"): 0.5, ("b", "c"): 0.9, ("c", "b"): 0.9})
    'b'
    """
    distances: dict[Pair, float] = {}
    for pair in itertools.product(names, names):
        ratio = ratios.get(pair, 0.0)
        if pair[0] == pair[1]:
            distances[pair] = 0.0
        elif ratio > 0:
            distances[pair] = 1 / ratio
        else:
            distances[pair] = math.inf
    # The algorithm visits all pairs for one middle device before the next middle device: the first element of `product`
    # changes last.
    for middle, start, end in itertools.product(names, repeat=3):
        detour = distances[start, middle] + distances[middle, end]
        distances[start, end] = min(distances[start, end], detour)

    def total_distance(name: str) -> float:
        return math.fsum(distances[name, other] for other in names)

    return min(names, key=total_distance)
