"""How far devices without a server are from their mean, and what is said of that at the end."""

from __future__ import annotations

import math

import pytest
import torch

from testbed.ml.rounds.consensus import CONSENSUS, distance
from testbed.ml.rounds.server import average
from testbed.trace.events import Event
from tests.helpers import recorded


def test_the_distance_is_the_root_of_the_mean_squared_euclidean_one() -> None:
    states = [
        {
            "0.weight": torch.tensor([[1.0, 2.0]]),
            "0.bias": torch.tensor([0.0]),
            "seen": torch.tensor(3),
        },
        {
            "0.weight": torch.tensor([[4.0, 6.0]]),
            "0.bias": torch.tensor([0.0]),
            "seen": torch.tensor(9),
        },
    ]
    mean = average(states, [1, 1])
    # They are 5 apart, each 2.5 from the middle; what is counted, and not trained, is no distance.
    assert distance(states, mean) == pytest.approx(2.5)
    assert distance([states[0]] * 3, states[0]) == 0.0


def test_of_unlike_distances_the_squares_are_averaged() -> None:
    states = [{"w": torch.tensor([value])} for value in (0.0, 0.0, 3.0)]
    mean = average(states, [1, 1, 1])
    assert distance(states, mean) == pytest.approx(math.sqrt((1 + 1 + 4) / 3))


def test_figures_are_those_of_the_last_time() -> None:
    scored = [
        Event(
            1.5,
            "a",
            "consensus",
            {"step": 1, "accuracies": {"a": 0.1, "b": 0.2}, "distance": 9.0},
        ),
        Event(
            2.5,
            "a",
            "consensus",
            {"step": 2, "accuracies": {"a": 0.5, "b": 0.9}, "distance": 4.0},
        ),
    ]
    events = sorted(
        [*recorded.make_events(faulty=False), *scored], key=lambda event: event.time
    )
    found = {
        figure.name: figure.compute(recorded.make_calm_record(events=events))
        for figure in CONSENSUS.metrics
    }
    assert found == {
        "consensus_distance": 4.0,
        "mean_device_accuracy": pytest.approx(0.7),
        "least_device_accuracy": 0.5,
    }
    assert {
        figure.compute(recorded.make_calm_record()) for figure in CONSENSUS.metrics
    } == {None}
