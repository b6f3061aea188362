"""Tests of the mapping of super neurons to devices: topologies, Algorithm 2, hill climbs, and the coordinator."""

from __future__ import annotations

import random
from itertools import permutations, product
from statistics import fmean

import pytest

from testbed.common.seeds import derive
from testbed.ml.slots.mapping import (
    best_order,
    choose_device_coordinator,
    climbed_order,
    connectivity_matrix,
    count_transmissions,
    generation_count,
    genetic_order,
    random_order,
    reception_matrix,
    score_order,
)
from testbed.network.radio import Propagation, Radio, draw_positions
from tests.testbed.ml.slots.networks import EVALUATED, FIGURE_2, partition


def communicating_pairs(counts):
    """Return the pairs (sender, receiver) with transmissions."""
    pairs = set()
    for sender, row in enumerate(counts):
        for receiver, count in enumerate(row):
            if count:
                pairs.add((sender, receiver))
    return pairs


def test_transmissions_of_example_of_paper_are_1_2_or_3_per_pair():
    counts = count_transmissions(partition(FIGURE_2, 6))
    groups = [(0, 1), (2, 3), (4, 5)]
    # Within the first group outputs go forward only; the last group shares results besides.
    for (one, other), within in zip(groups, (1, 2, 3), strict=True):
        assert counts[one][other] == counts[other][one] == within
    neighbours = [*product(groups[0], groups[1]), *product(groups[1], groups[2])]
    for one, other in neighbours:
        assert counts[one][other] == counts[other][one] == 1
    for one, other in product(groups[0], groups[2]):
        assert counts[one][other] == counts[other][one] == 0
    # Connectivity is relative to the most frequent pair.
    connectivity = connectivity_matrix(partition(FIGURE_2, 6))
    assert connectivity[4][5] == 1
    assert connectivity[2][3] == pytest.approx(2 / 3)


def test_vertical_partition_transmits_between_neighbours_but_not_back_to_input():
    counts = count_transmissions(partition(FIGURE_2, 6, "vertical"))
    forward = {(layer, layer + 1) for layer in range(5)}
    # The input layer has no weights and needs no losses.
    backward = {(layer + 1, layer) for layer in range(1, 5)}
    assert communicating_pairs(counts) == forward | backward


def test_horizontal_partition_transmits_equally_between_all_pairs():
    counts = count_transmissions(partition(FIGURE_2, 6, "horizontal"))
    # Outputs of 5 layers forward, losses of 4 backward, and the results.
    for one, other in permutations(range(6), 2):
        assert counts[one][other] == 5 + 4 + 1


def random_reception(seed, devices=6):
    """Return the reception ratios of devices at random places of a square of 50 m."""
    names = [f"d{number}" for number in range(devices)]
    positions = draw_positions(names, {}, (50, 50), seed)
    radio = Radio(Propagation(16, -82, 3.1, 46.68, 8), positions, 50, seed)
    ratios = {}
    for pair in permutations(names, 2):
        ratios[pair] = radio.reception_ratio(pair)
    return reception_matrix(names, ratios)


def relative_losses(mapping, allocation, devices=6, count=100):
    """Return for random topologies how far the score of a mapping is below the best score, as a fraction."""
    connectivity = connectivity_matrix(partition(EVALUATED, devices, allocation))
    losses = []
    for seed in range(count):
        reception = random_reception(seed, devices)
        best = score_order(connectivity, reception, best_order(connectivity, reception))
        order = mapping(connectivity, reception, seed)
        score = score_order(connectivity, reception, order)
        losses.append(1 - score / best)
    return losses


@pytest.mark.parametrize("allocation", ["vertical", "hybrid"])
@pytest.mark.parametrize(
    ("devices", "count"), [(4, 20), (5, 20), (6, 30), (7, 5), (8, 2)]
)
def test_hill_climbs_reach_best_of_all_orders(allocation, devices, count):
    # Above rounding of sums of scores.
    assert max(relative_losses(climbed_order, allocation, devices, count)) < 1e-12


def test_algorithm_2_is_near_best_order():
    # Of 6 devices in vertical groups, one order in 720 is the best.
    losses = relative_losses(genetic_order, "vertical", count=50)
    assert any(losses)
    assert fmean(losses) < 0.005
    assert max(relative_losses(genetic_order, "hybrid", count=50)) < 1e-12


def square_matrix(make_value):
    """Return a matrix of four devices with zeros on the diagonal."""
    rows = []
    for sender in range(4):
        row = [0.0 if receiver == sender else make_value() for receiver in range(4)]
        rows.append(tuple(row))
    return tuple(rows)


def test_algorithm_2_replaces_best_order_by_equally_good_random_one():
    # With equal connectivity of all pairs, every order has the same score.
    equal = square_matrix(lambda: 1.0)
    reception = ((0.0, 0.5, 1.0, 1.0), *equal[1:])
    draws = random.Random(derive(3, "mapping"))
    expected = tuple(range(4))
    for _ in range(5):
        expected = tuple(draws.sample(expected, 4))
    assert genetic_order(equal, reception, seed=3, count=5) == expected


def test_algorithm_2_keeps_order_of_devices_if_all_links_are_alike():
    equal = square_matrix(lambda: 1.0)
    assert genetic_order(equal, equal, seed=3, count=5) == (0, 1, 2, 3)


def test_genetic_order_is_reproducible_and_not_worse_than_initial_order():
    connectivity = connectivity_matrix(partition(EVALUATED, 6))
    reception = random_reception(1)
    order = genetic_order(connectivity, reception, seed=5)
    assert genetic_order(connectivity, reception, seed=5) == order
    after_3 = genetic_order(connectivity, reception, seed=5, count=3)
    initial = score_order(connectivity, reception, (0, 1, 2, 3, 4, 5))
    assert score_order(connectivity, reception, after_3) >= initial


def test_random_order_depends_on_seed_and_number_only():
    first = random_order(6, 1)
    assert sorted(first) == list(range(6))
    assert random_order(6, 1) == first
    assert random_order(6, 1, number=1) == first
    assert len({random_order(6, seed) for seed in range(20)}) > 10
    assert len({random_order(6, 1, number) for number in range(1, 6)}) == 5


def test_generation_count_is_that_of_paper_for_6_and_7_devices():
    assert generation_count(6) == 1_000
    assert generation_count(7) == 10_000


def test_score_is_sum_of_hadamard_product():
    draws = random.Random(0)
    connectivity = square_matrix(draws.random)
    reception = square_matrix(draws.random)
    order = (2, 0, 3, 1)
    expected = 0.0
    for a, b in product(range(4), repeat=2):
        expected += connectivity[a][b] * reception[order[a]][order[b]]
    assert score_order(connectivity, reception, order) == pytest.approx(expected)


def test_exhaustive_search_rejects_10_devices():
    connectivity = connectivity_matrix(partition(EVALUATED, 10))
    with pytest.raises(ValueError, match="use 9 at most"):
        best_order(connectivity, connectivity)


def test_coordinator_has_least_expected_transmissions_to_all_devices():
    # b reaches both in 1 / 0.9; a reaches c better by way of b than by itself.
    links = {("a", "b"): 0.9, ("b", "c"): 0.9, ("a", "c"): 0.1}
    reverse = {(receiver, sender): ratio for (sender, receiver), ratio in links.items()}
    assert choose_device_coordinator(["a", "b", "c"], links | reverse) == "b"


def test_coordinator_depends_on_outgoing_links_only():
    # c receives from all devices, but none receives from c.
    links = {
        ("a", "b"): 1.0,
        ("a", "c"): 0.5,
        ("b", "a"): 1.0,
        ("b", "c"): 0.4,
        ("c", "a"): 0.0,
        ("c", "b"): 0.0,
    }
    assert choose_device_coordinator(["c", "b", "a"], links) == "a"
