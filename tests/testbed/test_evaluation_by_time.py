"""Evaluations at intervals of time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from testbed.common.errors import InputError
from testbed.ml.preparation import load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import make_scenario

SPLITS = {
    "single": "coordinator",
    "pipeline": "coordinator",
    "pipedream": "coordinator",
    "federated": "iid",
}
"""The distribution of the samples that each method requires."""


def prepare_training(
    method: str, evaluate_every: int | str, **training: object
) -> Prepared:
    workload = {
        "data": {"name": "digits", "train": 96, "test": 20, "split": SPLITS[method]},
        "steps": 40,
        "training": {"optimizer": {"learning_rate": 0.1}, **training},
    }
    options = {"name": method, "evaluate_every": evaluate_every}
    (trial,) = trials(make_scenario(2, workload=workload, method=options))
    return prepare(trial)


@pytest.mark.parametrize("method", SPLITS)
def test_evaluations_follow_interval_of_time(method: str) -> None:
    # No evaluation takes place before the end of this run, which has fewer than 1,000 steps.
    prepared = prepare_training(method, 1000)
    duration = simulate(prepared, load_data(prepared)).events[-1].time
    interval = duration / 6
    prepared = prepare_training(method, f"{interval}s")
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    times = [event.time for event in outcome.events if event.event == "evaluate"]
    # Six intervals, of which some are longer, and the evaluation at the end.
    assert 4 <= len(times) <= 8
    # The last evaluation is that of the end of the run.
    for earlier, later in pairwise(times[:-1]):
        # An evaluation waits for the end of the step, or of the round, in which it is due.
        assert interval <= later - earlier <= 2 * interval


def test_patience_with_evaluations_by_time_is_refused() -> None:
    with pytest.raises(InputError, match="require evaluations at steps or rounds"):
        prepare_training("pipeline", "1s", patience=2)
