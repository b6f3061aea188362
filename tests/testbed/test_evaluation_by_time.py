"""Evaluations every so many seconds, by every way of training."""

from __future__ import annotations

from itertools import pairwise

import pytest

from testbed.common.errors import InputError
from testbed.ml.preparation import load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import make_scenario

METHODS = {
    "single": ({}, "coordinator"),
    "pipeline": ({}, "coordinator"),
    "pipedream": ({}, "coordinator"),
    "federated": ({}, "iid"),
}


def run(method: str, every: object, **training: object):
    options, split = METHODS[method]
    data = {"name": "digits", "train": 96, "test": 20, "split": split}
    work = {
        "data": data,
        "steps": 40,
        "training": {"optimizer": {"learning_rate": 0.1}, **training},
    }
    described = make_scenario(
        2, workload=work, method={"name": method, "evaluate_every": every, **options}
    )
    return prepare(trials(described)[0])


@pytest.mark.parametrize("method", METHODS)
def test_there_is_one_as_often_as_its_time_passes(method: str) -> None:
    found = run(method, 1000)
    whole = simulate(found, load_data(found))
    length = whole.events[-1].time
    found = run(method, f"{length / 6}s")
    outcome = simulate(found, load_data(found))
    assert outcome.status == "finished", outcome.error
    times = [event.time for event in outcome.events if event.event == "evaluate"]
    between = [after - before for before, after in pairwise(times[:-1])]
    assert 4 <= len(times) <= 8
    assert all(length / 6 <= gap <= length / 3 for gap in between), (between, length)


def test_what_judges_evaluations_counts_steps() -> None:
    with pytest.raises(InputError, match="require evaluations at steps or rounds"):
        run("pipeline", "1s", patience=2)
