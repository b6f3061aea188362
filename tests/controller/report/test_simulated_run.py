"""A scenario file, simulated, written as results and reported: all stages together."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from testbed.ml.data import load as load_data
from testbed.ml.preparation import data_folder
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed_controller.report import html
from testbed_controller.results import files
from testbed_controller.results.comparison import compare, side_by_side
from testbed_controller.results.run import Run
from tests.helpers import recorded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    overrides = ["workload.epochs=2", "faults.0.when.batch=20"]
    prepared = prepare(trials(load("quickstart", overrides))[0])
    scenario = prepared.trial.scenario
    dataset = load_data(scenario.workload.data, data_folder(scenario))
    outcome = simulate(prepared, dataset)
    folder = tmp_path_factory.mktemp("results") / "quickstart"
    return files.load(
        recorded.write_run(folder, prepared.trial, prepared.plan, outcome)
    )


def test_metrics_of_recovered_pipeline_are_consistent(run: Run) -> None:
    metrics = run.metrics
    # Two epochs of 11 batches.
    assert metrics["steps"] == 22
    assert metrics["recoveries"] == 1
    # A simulation measures nothing that could be trusted or not.
    assert metrics["verdict"]["kind"] == "prediction"
    recovery_time = metrics["detection_time"] + metrics["resume_time"]
    assert recovery_time == pytest.approx(metrics["recovery_time"])
    predicted = metrics["predicted_step_time"]
    assert metrics["step_time"] == pytest.approx(predicted, rel=0.02)
    assert metrics["devices"]["worker2"]["down"] > 3
    for device in metrics["devices"].values():
        total = sum(
            device[state] for state in ("compute", "communicate", "down", "idle")
        )
        assert total == pytest.approx(metrics["duration"])


def test_almost_every_reception_has_arrow_in_trace(run: Run) -> None:
    trace = json.loads((run.path / "trace.json").read_text())
    phases = Counter(record["ph"] for record in trace["traceEvents"])
    receptions = sum(event.event == "receive" for event in run.outcome.events)
    # Arrows have a start (s) and an end (f).
    assert phases["s"] == phases["f"]
    # Messages in transit when a device was killed have no second end.
    assert receptions - 20 <= phases["f"] <= receptions


def test_resolved_scenario_has_same_plan_and_experiment(run: Run) -> None:
    prepared = prepare(trials(load(run.path / "scenario.yaml"))[0])
    assert prepared.plan.model_dump() == run.plan.model_dump()
    assert prepared.experiment.links == run.experiment.links
    assert prepared.experiment.devices == run.experiment.devices


def test_run_equals_itself_in_comparison(run: Run) -> None:
    compared = compare(side_by_side([run, run]))
    assert compared["warnings"] == []
    ratios = set()
    for row in compared["metrics"]:
        ratios.update(row["ratios"])
    # Values that are not numbers have no ratio.
    assert ratios - {None} == {1.0}


def test_report_shows_run_and_weights_are_stored(run: Run) -> None:
    page = html.render(run)
    for part in (
        "quickstart",
        "Prediction",
        "kill worker2",
        "two steps",
        "raspberry-pi-4b",
    ):
        assert part in page
    assert (run.path / "weights.safetensors").stat().st_size > 10_000
