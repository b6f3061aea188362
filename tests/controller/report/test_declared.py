"""User-defined metrics of a method in the report: lines at its summary_rows, tables and curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.ml.methods.pipeline import Pipeline
from testbed.trace.metrics_spec import (
    Column,
    Metric,
    Metrics,
    MetricsSpec,
    Row,
    Table,
    TimeSeries,
)
from testbed.trace.record import RunView
from testbed_controller.report import drawing, html
from testbed_controller.report.charts import Axis, Line, StackedPlot
from testbed_controller.report.declared import (
    curves,
    fill_template,
    summary_rows,
    tables,
)
from testbed_controller.results.run import Run
from tests.controller.report.recorded_runs import load_recorded

SPREAD = [
    {"time": 1.0, "layer": 0, "share": 0.25},
    {"time": 1.0, "layer": 1, "share": 0.5},
    {"time": 2.0, "layer": 0, "share": 0.75},
    # A moment without a value has no point on a curve.
    {"time": 3.0, "layer": 0, "share": None},
]


def worst_loss(record: RunView) -> float | None:
    losses = [step.loss for step in record.steps if step.loss is not None]
    return max(losses, default=None)


def note_of_steps(metrics: Metrics) -> str:
    return "in {steps} steps" if metrics["steps"] > 1 else "in one step"


DECLARED = MetricsSpec(
    metrics=(
        Metric("worst_loss", "number", "of any step", worst_loss),
        Metric("never", "seconds", "none", lambda _: None),
    ),
    lists={"spread": lambda _: SPREAD, "nothing": lambda _: []},
    rows=(
        Row("Worst", "{worst_loss}", note_of_steps),
        Row("Never", "{never}"),
        Row("Unsaid", "{worst_loss}", when=lambda metrics: metrics["steps"] == 0),
    ),
    tables=(
        Table(
            "Spread",
            "Of each layer.",
            "spread",
            (Column("At", "moment", "time"), Column("Share", "share", "share")),
        ),
        Table("Empty", "", "nothing", (Column("At", "moment", "time"),)),
    ),
    curves=(
        TimeSeries(
            "Shares over time", "Of each layer.", "spread", "share", "share", by="layer"
        ),
        TimeSeries(
            "Together",
            "Of all.",
            "spread",
            "share",
            "share",
            by="layer",
            stacked=True,
            marks="spread",
        ),
    ),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(Pipeline, "declared", DECLARED)
    return load_recorded(tmp_path / "run")


def test_lines_at_head_appear_only_with_their_metrics(run: Run) -> None:
    lines = {label: (text, note) for label, text, note in summary_rows(run)}
    # The loss of step 0 is 2.0.
    assert lines["Worst"] == ("2", "in 5 steps")
    assert "Never" not in lines
    assert "Unsaid" not in lines
    # Lines of a method precede those of all runs.
    assert list(lines)[-1] == "Duration"


def test_template_is_filled_with_metrics_of_devices(run: Run) -> None:
    # Device b sends 100 kB in each of six completed steps.
    assert (
        fill_template("{devices.b.bytes_sent} in {duration}", run) == "600 kB in 8.6 s"
    )
    assert fill_template("{devices.c.bytes_sent}", run) is None


def test_lists_are_stored_and_shown_as_tables(run: Run) -> None:
    assert run.metrics["spread"] == SPREAD
    assert "nothing" not in run.metrics
    *_, table = tables(run)
    (first_time, first_share), (second_time, second_share), *_ = table.rows
    assert first_time.text == "1.00 s"
    assert first_share.text == "25.0%"
    assert second_time.text == "1.00 s"
    assert second_share.text == "50.0%"
    assert "<h2>Spread" in html.render(run)


def test_curves_have_line_for_each_group(run: Run) -> None:
    plain, stacked = curves(run)
    assert plain.lines == [("0", [(1.0, 0.25), (2.0, 0.75)]), ("1", [(1.0, 0.5)])]
    assert stacked.lines == plain.lines
    assert stacked.stacked
    # One mark for each entry of the list, with or without a value.
    assert sorted(stacked.marks) == [1.0, 1.0, 2.0, 3.0]


def test_page_draws_curves(run: Run) -> None:
    page = html.render(run)
    assert "Shares over time" in page
    assert "Together" in page


def test_stacked_values_last_until_next_value() -> None:
    lines = [
        Line("a", [(1.0, 2.0), (3.0, 1.0)], "blue"),
        Line("b", [(2.0, 4.0)], "orange"),
    ]
    plot = StackedPlot(lines, [2.0], end=4.0, y=Axis("neurons"))
    (axes,) = drawing.draw(plot).axes
    tops = []
    for area in axes.collections:
        tops.append(max(y for _, y in area.get_paths()[0].vertices))
    # a is still 2 when b becomes 4.
    assert tops == [2.0, 2.0 + 4.0]
    (mark,) = axes.lines
    assert mark.get_xdata()[0] == 2.0
