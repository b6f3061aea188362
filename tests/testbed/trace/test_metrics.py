"""Metrics of the recorded run: learning, pace, undisturbed steps and incomplete runs."""

from __future__ import annotations

import json
import math

import pytest

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.metrics_spec import Metric, MetricsSpec
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics
from tests.testbed.trace.records import in_order, steadiness


def events_without_step_1() -> list[Event]:
    events = []
    for event in recorded.make_events(faulty=False):
        if event.event != "step" or event.fields["step"] != 1:
            events.append(event)
    return events


def reasons_of_untrusted_run(**changes) -> list[str]:
    reasons: list[str] = calm_metrics(**changes)["verdict"]["reasons"]
    return reasons


def test_finished_run_names_missing_steps_and_lost_results() -> None:
    assert calm_metrics()["verdict"]["trusted"]
    events = events_without_step_1()
    reasons = reasons_of_untrusted_run(events=events)
    assert reasons == ["the run finished without 1 step (1)"]
    fidelity = recorded.make_outcome().fidelity | {"lost": ["the weights"]}
    reasons = reasons_of_untrusted_run(events=events, fidelity=fidelity)
    assert reasons == ["the run finished without 1 step (1) and the weights"]


def test_interrupted_run_does_not_name_missing_steps() -> None:
    reasons = reasons_of_untrusted_run(
        events=events_without_step_1(), status="interrupted", error="stopped"
    )
    assert reasons == ["the run was interrupted: stopped"]


def test_learning_and_pace_of_recorded_run() -> None:
    values = recorded_metrics()
    assert values["accuracy"] == 0.95
    assert values["test_loss"] == 0.25
    # The loss of step n is 2 / (n + 1).
    assert values["loss_first"] == 2.0
    assert values["loss"] == pytest.approx(2 / 5)
    # Step 1 is repeated after the recovery; a step has 32 samples.
    assert values["steps"] == 5
    assert values["steps_repeated"] == 1
    assert values["samples"] == 5 * 32
    assert values["duration"] == 8.6
    assert values["samples_per_second"] == pytest.approx(160 / 8.6)
    assert values["predicted_step_time"] == 0.9


def test_first_and_disturbed_steps_are_not_steady() -> None:
    values = recorded_metrics()
    # The first step is warm-up; the third ends after the recovery, with the fault in between.
    assert steadiness(values) == [False, True, False, True, True, True]
    assert values["series"]["steps"][2]["seconds"] == pytest.approx(3.0)
    assert values["step_time"] == pytest.approx(1.0)
    assert values["step_time_mean"] == pytest.approx(1.0)
    assert values["steady_steps"] == 4


def test_steps_with_evaluation_or_unusual_batch_size_are_not_steady() -> None:
    events = recorded.make_events(faulty=False)
    last = max(index for index, event in enumerate(events) if event.event == "step")
    events[last] = events[last]._replace(fields={**events[last].fields, "samples": 7})
    evaluation = Event(1.5, "a", "evaluate", {"step": 0, "accuracy": 0.1, "loss": 2.0})
    values = calm_metrics(events=in_order(events, [evaluation]))
    assert steadiness(values) == [False, False, True, True, False]


def test_all_steps_count_if_none_is_steady() -> None:
    step = Event(0.5, "a", "step", {"step": 0, "loss": 1.0, "samples": 8})
    values = calm_metrics(events=[step])
    assert values["steady_steps"] == 0
    assert values["step_time"] == 0.5


def test_metrics_of_run_that_failed_without_events() -> None:
    values = recorded_metrics(
        events=[], status="failed", error="no image", links=[], fidelity={}
    )
    assert values["duration"] == 0
    assert values["steps"] == 0
    assert "accuracy" not in values
    # Also valid JSON, which has no nan.
    json.dumps(values, allow_nan=False)


def test_nan_loss_is_none_in_metrics() -> None:
    events = [Event(1.0, "a", "step", {"step": 0, "loss": math.nan, "samples": 8})]
    assert calm_metrics(events=events)["loss"] is None


def test_metrics_of_recorded_run_are_json() -> None:
    json.dumps(recorded_metrics(), allow_nan=False)


def test_mapping_of_metric_becomes_group() -> None:
    laps = Metric("laps", "number", "laps by device", lambda _: {"a": 1, "b": 2})
    outcome, experiment = recorded.make_outcome(), recorded.make_trial().experiment
    computed = metrics(outcome, experiment, recorded.make_plan(), MetricsSpec((laps,)))
    assert computed["laps"] == {"a": 1, "b": 2}
