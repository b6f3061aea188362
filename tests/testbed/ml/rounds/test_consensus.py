"""Tests of the evaluation of methods without a server: distance from the mean, and metrics."""

from __future__ import annotations

import math

import pytest
import torch

from testbed.ml.rounds.consensus import CONSENSUS, distance
from testbed.ml.rounds.server import average
from testbed.trace.events import Event
from tests.helpers import recorded


def test_distance_is_root_of_mean_squared_euclidean_distance() -> None:
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
    # They are 5 apart, each 2.5 from the mean; counters, which are not trained, have no distance.
    assert distance(states, mean) == pytest.approx(2.5)
    assert distance([states[0]] * 3, states[0]) == 0.0


def test_squares_of_different_distances_are_averaged() -> None:
    states = [{"w": torch.tensor([value])} for value in (0.0, 0.0, 3.0)]
    mean = average(states, [1, 1, 1])
    # The mean is 1.
    assert distance(states, mean) == pytest.approx(math.sqrt((1 + 1 + 4) / 3))


def compute_metrics(record) -> dict[str, float | None]:
    return {metric.name: metric.compute(record) for metric in CONSENSUS.metrics}


def test_metrics_are_those_of_last_scored_round() -> None:
    first = {"step": 1, "accuracies": {"a": 0.1, "b": 0.2}, "distance": 9.0}
    last = {"step": 2, "accuracies": {"a": 0.5, "b": 0.9}, "distance": 4.0}
    events = [
        *recorded.make_events(faulty=False),
        Event(1.5, "a", "consensus", first),
        Event(2.5, "a", "consensus", last),
    ]
    events.sort(key=lambda event: event.time)
    assert compute_metrics(recorded.make_calm_record(events=events)) == {
        "consensus_distance": 4.0,
        "mean_device_accuracy": pytest.approx(0.7),
        "least_device_accuracy": 0.5,
    }


def test_metrics_are_none_without_scored_rounds() -> None:
    values = compute_metrics(recorded.make_calm_record()).values()
    assert set(values) == {None}
