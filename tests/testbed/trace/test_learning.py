"""How well the model learned."""

from __future__ import annotations

import math
from typing import Any

import pytest

from testbed.common.formats import number
from testbed.trace.events import Event
from testbed.trace.learning import METRICS, ROWS
from tests.helpers import recorded
from tests.helpers.recorded import calm_metrics, recorded_metrics


def test_a_loss_that_is_no_number_is_told_as_diverged() -> None:
    assert (
        "diverged" not in recorded_metrics() or recorded_metrics()["diverged"] is None
    )
    found = recorded.make_events(faulty=False)
    last = max(index for index, event in enumerate(found) if event.event == "evaluate")
    event = found[last]
    found[last] = Event(
        event.time, event.device, event.event, {**event.fields, "loss": float("nan")}
    )
    assert calm_metrics(events=found)["diverged"] is True


def values(*evaluations: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    events = [
        event
        for event in recorded.make_events(faulty=False)
        if event.event != "evaluate"
    ]
    events += [Event(time, "a", "evaluate", fields) for time, fields in evaluations]
    record = recorded.make_calm_record(
        events=sorted(events, key=lambda event: event.time)
    )
    return {figure.name: figure.compute(record) for figure in METRICS}


def test_the_last_evaluation_counts_and_not_the_best() -> None:
    found = values(
        (1.2, {"accuracy": 0.9, "loss": 0.2}), (3.2, {"accuracy": 0.7, "loss": 0.6})
    )
    assert (found["accuracy"], found["test_loss"], found["diverged"]) == (
        0.7,
        0.6,
        None,
    )


def test_an_evaluation_after_the_leads_end_does_not_count() -> None:
    found = values(
        (3.2, {"accuracy": 0.7, "loss": 0.6}), (5.7, {"accuracy": 0.9, "loss": 0.2})
    )
    assert found["accuracy"] == 0.7


def test_a_run_without_evaluations_has_losses_of_its_steps_alone() -> None:
    found = values()
    assert (
        found["accuracy"],
        found["test_loss"],
        found["metrics.<metric>"],
        found["diverged"],
    ) == (None,) * 4
    # The recorded run's step n has a loss of 2 / (n + 1), and has five.
    assert (found["loss_first"], found["loss"]) == (2.0, pytest.approx(2 / 5))


@pytest.mark.parametrize(
    ("loss", "diverged"),
    [(math.nan, True), (math.inf, True), (1e30, None), (0.0, None)],
)
def test_only_what_is_no_finite_number_has_diverged(
    loss: float, diverged: bool | None
) -> None:
    assert values((3.2, {"accuracy": 0.1, "loss": loss}))["diverged"] is diverged


def test_metrics_that_the_scenario_names_are_a_figure_each_and_one_row() -> None:
    found = values(
        (3.2, {"accuracy": 0.7, "loss": 0.6, "metrics": {"f1": 0.65, "rmse": 1.25}})
    )
    assert found["metrics.<metric>"] == {"f1": 0.65, "rmse": 1.25}
    [row] = [row for row in ROWS if row.label == "Metrics"]
    assert callable(row.text)
    assert (
        row.text({"metrics": found["metrics.<metric>"]})
        == f"f1 {number(0.65)}, rmse {number(1.25)}"
    )
    assert row.when is not None
    assert not row.when({})
