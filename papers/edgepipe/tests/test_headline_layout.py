"""The places of ``papers/edgepipe-headlines`` are as any others with the paper's mean reception."""

import math
import random
from itertools import combinations, pairwise, permutations
from statistics import fmean, stdev

import pytest

from testbed.network.radio import Propagation
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

Places = list[tuple[float, float]]
PACKETS = 50
ORDERS = [[*pairwise(order)] for order in permutations(range(6))]


def ratios(air: Propagation, places: Places) -> dict[tuple[int, int], float]:
    """Return the reception ratio of each pair."""
    found = {}
    for one, other in combinations(range(len(places)), 2):
        found[one, other] = found[other, one] = air.reception_ratio(math.dist(places[one], places[other]))
    return found


def lost(heard: dict[tuple[int, int], float], draws: random.Random) -> float:
    """Return how many batches are lost on the chain of six devices that is best as 50 packets a link measure them."""
    measured = {pair: sum(draws.random() < ratio for _ in range(PACKETS)) / PACKETS for pair, ratio in heard.items()}
    best = max(ORDERS, key=lambda hops: sum(measured[one, other] + measured[other, one] for one, other in hops))
    return 1 - math.prod(measured[hop] for hop in best)


def test_the_headlines_layout_is_one_among_those_with_the_papers_reception() -> None:
    experiment = trials(load("papers/edgepipe-headlines"))[0].experiment
    radio = experiment.radio
    assert radio is not None
    heard = ratios(radio.propagation, list(radio.positions.values()))
    assert fmean(heard.values()) == pytest.approx(0.809, abs=0.002)
    draws = random.Random(1)
    own = fmean(lost(heard, draws) for _ in range(50))
    assert own == pytest.approx(0.28, abs=0.02)
    others = []
    while len(others) < 50:
        there = ratios(radio.propagation, [(draws.uniform(0, 50), draws.uniform(0, 50)) for _ in range(6)])
        if abs(fmean(there.values()) - 0.809) < 0.01:
            others.append(fmean(lost(there, draws) for _ in range(5)))
    assert fmean(others) == pytest.approx(0.25, abs=0.02)
    assert abs(own - fmean(others)) < stdev(others)
