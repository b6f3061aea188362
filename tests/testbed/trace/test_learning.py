"""Metrics of learning: accuracy, losses, divergence and named metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest

from testbed.common.formats import number
from testbed.trace.events import Event
from testbed.trace.learning import METRICS, ROWS
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics
from tests.testbed.trace.records import in_order, metric_values, with_fields, without


def test_nan_loss_is_reported_as_divergence() -> None:
    assert recorded_metrics().get("diverged") is None
    events = with_fields(
        recorded.make_events(faulty=False),
        lambda event: event.event == "evaluate",
        loss=math.nan,
    )
    assert calm_metrics(events=events)["diverged"] is True


def learning_metrics(*evaluations: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of the recorded run with other evaluations, given by time and fields."""
    events = without(recorded.make_events(faulty=False), "evaluate")
    evaluated = []
    for time, fields in evaluations:
        evaluated.append(Event(time, "a", "evaluate", fields))
    record = recorded.make_calm_record(events=in_order(events, evaluated))
    return metric_values(METRICS, record)


def test_last_evaluation_counts_and_not_best() -> None:
    metrics = learning_metrics(
        (1.2, {"accuracy": 0.9, "loss": 0.2}), (3.2, {"accuracy": 0.7, "loss": 0.6})
    )
    assert metrics["accuracy"] == 0.7
    assert metrics["test_loss"] == 0.6
    assert metrics["diverged"] is None


def test_evaluation_after_end_of_coordinator_does_not_count() -> None:
    # The coordinator ends at 5.6 s.
    metrics = learning_metrics(
        (3.2, {"accuracy": 0.7, "loss": 0.6}), (5.7, {"accuracy": 0.9, "loss": 0.2})
    )
    assert metrics["accuracy"] == 0.7


def test_run_without_evaluations_has_only_losses_of_steps() -> None:
    metrics = learning_metrics()
    for name in ("accuracy", "test_loss", "metrics.<metric>", "diverged"):
        assert metrics[name] is None
    # Step n of the recorded run has a loss of 2 / (n + 1); there are five.
    assert metrics["loss_first"] == 2.0
    assert metrics["loss"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("loss", "diverged"),
    [(math.nan, True), (math.inf, True), (1e30, None), (0.0, None)],
)
def test_only_loss_that_is_not_finite_is_divergence(
    loss: float, diverged: bool | None
) -> None:
    metrics = learning_metrics((3.2, {"accuracy": 0.1, "loss": loss}))
    assert metrics["diverged"] is diverged


def test_named_metrics_are_single_metrics_and_one_row() -> None:
    named = {"f1": 0.65, "rmse": 1.25}
    metrics = learning_metrics((3.2, {"accuracy": 0.7, "loss": 0.6, "metrics": named}))
    assert metrics["metrics.<metric>"] == named
    [row] = [row for row in ROWS if row.label == "Metrics"]
    assert callable(row.text)
    text = row.text({"metrics": named})
    assert text == f"f1 {number(0.65)}, rmse {number(1.25)}"
    # A run without such metrics has no row.
    assert row.when is not None
    assert not row.when({})
