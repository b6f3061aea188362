"""The smoke scenarios in simulation: the expectations are the same as in containers."""

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

SMOKE_SCENARIOS = sorted((ROOT / "scenarios" / "smoke").glob("*.yaml"))


def simulate_trial(trial):
    """Return the outcome, the metrics, and the metrics defined by the method."""
    prepared = prepare(trial)
    scenario = trial.scenario
    dataset = load_data(scenario.workload.data, data_folder(scenario))
    outcome = simulate(prepared, dataset)
    declared = prepared.method.declared
    values = metrics(outcome, trial.experiment, prepared.plan, declared)
    return outcome, values, declared


@pytest.mark.parametrize("file", SMOKE_SCENARIOS, ids=lambda file: file.stem)
def test_smoke_scenario_meets_expectations_in_simulation(file):
    for trial in trials(load(file)):
        expectations = trial.scenario.expect
        assert expectations
        outcome, values, declared = simulate_trial(trial)
        assert outcome.status == "finished", outcome.error
        results = evaluate(expectations, values, metrics_of(declared))
        assert [result for result in results if not result.holds] == []
        # In containers, a run must take less than a minute, including the set-up.
        assert values["duration"] < 45


# The loss falls slowly with these seeds.
@pytest.mark.parametrize("seed", [3, 8])
def test_quickstart_trains_well_with_difficult_seeds(seed):
    changes = [f"seed={seed}", "faults=[]", "workload.method={name: single}"]
    (trial,) = trials(load("quickstart", changes))
    outcome, _, _ = simulate_trial(trial)
    # The scenario itself expects 90 %.
    assert fields_of(outcome, "evaluate")[-1]["accuracy"] >= 0.93


def test_accuracy_of_versatile_rises_after_late_loss_of_device():
    # With this seed, the accuracy is high already when the device is killed.
    (trial,) = trials(load("smoke/versatile", ["seed=31"]))
    _, values, _ = simulate_trial(trial)
    assert values["accuracy_gain"] >= 0.1
