"""The places of ``scenarios/papers/edgepipe-headlines``: those of a layout as any other with the paper's reception."""

import math
import random
from itertools import combinations, pairwise, permutations
from statistics import fmean

import pytest

from testbed.network.radio import Propagation
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

Places = list[tuple[float, float]]


def ratios(air: Propagation, places: Places) -> dict[tuple[int, int], float]:
    """Return the reception ratio of each pair."""
    found = {}
    for one, other in combinations(range(len(places)), 2):
        found[one, other] = found[other, one] = air.reception_ratio(math.dist(places[one], places[other]))
    return found


def chain(heard: dict[tuple[int, int], float], devices: int) -> float:
    """Return how often a batch comes through the chain of all devices whose links are best."""
    orders = permutations(range(devices))
    hops = max(([*pairwise(order)] for order in orders), key=lambda o: sum(heard[hop] for hop in o))
    return math.prod(heard[hop] for hop in hops)


def test_the_headlines_layout_is_an_average_one_with_the_papers_reception() -> None:
    experiment = trials(load("papers/edgepipe-headlines"))[0].experiment
    radio = experiment.radio
    assert radio is not None
    air = radio.propagation
    heard = ratios(air, list(radio.positions.values()))
    assert fmean(heard.values()) == pytest.approx(0.809, abs=0.01)
    draws = random.Random(1)
    others = []
    while len(others) < 100:
        places = [(draws.uniform(0, 50), draws.uniform(0, 50)) for _ in range(6)]
        there = ratios(air, places)
        if abs(fmean(there.values()) - 0.809) < 0.01:
            others.append(chain(there, 6))
    assert chain(heard, 6) == pytest.approx(fmean(others), abs=0.03)
