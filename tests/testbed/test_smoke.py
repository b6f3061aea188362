"""The smoke scenarios on the virtual clock: each must fulfil what it expects, as on containers."""

from __future__ import annotations

import pytest

from testbed.ml.data import load as load_data
from testbed.ml.preparation import data_folder
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.expect import evaluate
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.registry import metrics_of
from tests.helpers import ROOT
from tests.helpers.runs import fields_of

FOLDER = ROOT / "scenarios" / "smoke"


@pytest.mark.parametrize(
    "file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem
)
def test_smoke_scenario(file):
    for trial in trials(load(file)):
        scenario = trial.scenario
        assert scenario.expect, "a smoke scenario says what it expects"
        ready = prepare(trial)
        dataset = load_data(scenario.workload.data, data_folder(scenario))
        outcome = simulate(ready, dataset)
        assert outcome.status == "finished", outcome.error
        figures = metrics(outcome, trial.experiment, ready.plan, ready.method.declared)
        assert [
            result
            for result in evaluate(
                scenario.expect, figures, metrics_of(ready.method.declared)
            )
            if not result.holds
        ] == []
        assert figures["duration"] < 45, (
            "it has to be over within a minute on containers, setting up included"
        )


@pytest.mark.parametrize("seed", [3, 8])
def test_the_quickstart_learns_from_seeds_whose_loss_is_slow_to_fall(seed):
    (trial,) = trials(
        load(
            "quickstart",
            [f"seed={seed}", "faults=[]", "workload.method={name: single}"],
        )
    )
    ready = prepare(trial)
    outcome = simulate(ready, load_data(ready.scenario.workload.data))
    assert fields_of(outcome, "evaluate")[-1]["accuracy"] >= 0.93, (
        "three points above what the scenario expects"
    )


def test_versatile_rises_though_much_was_learned_before_a_device_died():
    (trial,) = trials(load("smoke/versatile", ["seed=31"]))
    ready = prepare(trial)
    outcome = simulate(ready, load_data(ready.scenario.workload.data))
    assert (
        metrics(outcome, trial.experiment, ready.plan, ready.method.declared)[
            "accuracy_gain"
        ]
        >= 0.1
    )
