from __future__ import annotations

import json

import pytest

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.metrics_spec import Metric, MetricsSpec
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics


def test_a_run_that_finished_says_which_steps_it_is_without_and_what_else() -> None:
    events = [
        each
        for each in recorded.make_events(faulty=False)
        if each.event != "step" or each.fields["step"] != 1
    ]
    assert calm_metrics()["verdict"]["trusted"]
    assert calm_metrics(events=events)["verdict"]["reasons"] == [
        "the run finished without 1 step (1)"
    ]
    fidelity = recorded.make_outcome().fidelity | {"lost": ["the weights"]}
    (reason,) = calm_metrics(events=events, fidelity=fidelity)["verdict"]["reasons"]
    assert reason == "the run finished without 1 step (1) and the weights"
    ended = calm_metrics(events=events, status="interrupted", error="stopped")[
        "verdict"
    ]["reasons"]
    assert ended == ["the run was interrupted: stopped"]


def test_learning_and_pace_of_the_recorded_run() -> None:
    found = recorded_metrics()
    assert found["accuracy"] == 0.95
    assert found["test_loss"] == 0.25
    assert found["loss_first"] == 2.0
    assert found["loss"] == pytest.approx(0.4)
    assert (found["steps"], found["steps_repeated"], found["samples"]) == (5, 1, 160)
    assert found["duration"] == 8.6
    assert found["samples_per_second"] == pytest.approx(160 / 8.6)
    assert found["predicted_step_time"] == 0.9


def test_steady_steps_leave_out_the_first_and_the_disturbed() -> None:
    found = recorded_metrics()
    # Six step events: the first is warm-up, the third ends after the recovery and holds the fault.
    assert [row["steady"] for row in found["series"]["steps"]] == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]
    assert found["series"]["steps"][2]["seconds"] == pytest.approx(3.0)
    assert found["step_time"] == pytest.approx(1.0)
    assert found["step_time_mean"] == pytest.approx(1.0)
    assert found["steady_steps"] == 4


def test_steps_with_an_evaluation_or_an_odd_batch_are_not_steady() -> None:
    events = recorded.make_events(faulty=False)
    events.append(
        Event(1.5, "a", "evaluate", {"step": 0, "accuracy": 0.1, "loss": 2.0})
    )
    last = next(event for event in reversed(events) if event.event == "step")
    events[events.index(last)] = Event(
        last.time, "a", "step", {**last.fields, "samples": 7}
    )
    found = calm_metrics(events=sorted(events, key=lambda event: event.time))
    assert [row["steady"] for row in found["series"]["steps"]] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_without_any_steady_step_all_count() -> None:
    found = calm_metrics(
        events=[Event(0.5, "a", "step", {"step": 0, "loss": 1.0, "samples": 8})]
    )
    assert found["steady_steps"] == 0
    assert found["step_time"] == 0.5


def test_a_run_that_failed_before_anything_happened() -> None:
    found = recorded_metrics(
        events=[], status="failed", error="no image", links=[], fidelity={}
    )
    assert found["duration"] == 0
    assert found["steps"] == 0
    assert "accuracy" not in found
    json.dumps(found, allow_nan=False)


def test_a_diverged_loss_is_still_json() -> None:
    events = [Event(1.0, "a", "step", {"step": 0, "loss": float("nan"), "samples": 8})]
    assert calm_metrics(events=events)["loss"] is None
    json.dumps(recorded_metrics(), allow_nan=False)


def test_mapping_of_a_plain_name_becomes_a_group() -> None:
    laps = Metric("laps", "number", "laps by device", lambda _: {"a": 1, "b": 2})
    outcome, experiment = recorded.make_outcome(), recorded.make_trial().experiment
    computed = metrics(outcome, experiment, recorded.make_plan(), MetricsSpec((laps,)))
    assert computed["laps"] == {"a": 1, "b": 2}
