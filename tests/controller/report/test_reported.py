"""From a scenario file over the simulator to a folder of results, with nothing made up in between."""

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


def test_the_figures_of_a_pipeline_that_lost_a_stage(run: Run) -> None:
    metrics = run.metrics
    assert metrics["steps"] == 22
    assert metrics["recoveries"] == 1
    assert metrics["verdict"]["kind"] == "prediction"
    assert metrics["detection_time"] + metrics["resume_time"] == pytest.approx(
        metrics["recovery_time"]
    )
    assert metrics["step_time"] == pytest.approx(
        metrics["predicted_step_time"], rel=0.02
    )
    assert metrics["devices"]["worker2"]["down"] > 3
    for device in metrics["devices"].values():
        parts = (
            device["compute"] + device["communicate"] + device["down"] + device["idle"]
        )
        assert parts == pytest.approx(metrics["duration"])


def test_almost_every_reception_has_its_arrow_in_the_trace(run: Run) -> None:
    trace = json.loads((run.path / "trace.json").read_text())
    kinds = Counter(record["ph"] for record in trace["traceEvents"])
    received = sum(event.event == "receive" for event in run.outcome.events)
    assert kinds["s"] == kinds["f"]
    # What was on its way when a device died has one end only.
    assert received - 20 <= kinds["f"] <= received


def test_the_resolved_scenario_plans_and_runs_the_same(run: Run) -> None:
    again = prepare(trials(load(run.path / "scenario.yaml"))[0])
    assert again.plan.model_dump() == run.plan.model_dump()
    assert again.experiment.links == run.experiment.links
    assert again.experiment.devices == run.experiment.devices


def test_a_run_compared_with_itself_differs_in_nothing(run: Run) -> None:
    compared = compare(side_by_side([run, run]))
    assert compared["warnings"] == []
    assert {
        ratio
        for row in compared["metrics"]
        for ratio in row["ratios"]
        if ratio is not None
    } == {1.0}


def test_the_report_holds_the_run(run: Run) -> None:
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
