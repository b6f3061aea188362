"""What a method declares, as the report shows it: lines at its head, tables, curves."""

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
from testbed_controller.report.declared import curves, fill, head, tables
from testbed_controller.results import files
from testbed_controller.results.run import Run
from tests.helpers import recorded

SPREAD = [
    {"time": 1.0, "layer": 0, "share": 0.25},
    {"time": 1.0, "layer": 1, "share": 0.5},
    {"time": 2.0, "layer": 0, "share": 0.75},
    {"time": 3.0, "layer": 0, "share": None},
]


def losses(record: RunView) -> float | None:
    return max(
        (step.loss for step in record.steps if step.loss is not None), default=None
    )


def laps(metrics: Metrics) -> str:
    return "in {steps} steps" if metrics["steps"] > 1 else "in one step"


DECLARED = MetricsSpec(
    metrics=(
        Metric("worst_loss", "number", "of any step", losses),
        Metric("never", "seconds", "none", lambda _: None),
    ),
    lists={"spread": lambda _: SPREAD, "nothing": lambda _: []},
    rows=(
        Row("Worst", "{worst_loss}", laps),
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
    return files.load(
        recorded.write_run(
            tmp_path / "run",
            recorded.make_trial(),
            recorded.make_plan(),
            recorded.make_outcome(),
        )
    )


def test_lines_name_figures_and_stand_only_where_there_are_some(run: Run) -> None:
    lines = {label: (text, note) for label, text, note in head(run)}
    assert lines["Worst"] == ("2", "in 5 steps")
    assert not {"Never", "Unsaid"} & set(lines)
    assert list(lines)[-1] == "Duration"


def test_a_template_is_filled_with_figures_of_devices_too(run: Run) -> None:
    assert fill("{devices.b.bytes_sent} in {duration}", run) == "600 kB in 8.6 s"
    assert fill("{devices.c.bytes_sent}", run) is None


def test_lists_are_kept_and_shown(run: Run) -> None:
    assert run.metrics["spread"] == SPREAD
    assert "nothing" not in run.metrics
    *_, table = tables(run)
    assert [[cell.text for cell in row] for row in table.rows[:2]] == [
        ["1.00 s", "25.0%"],
        ["1.00 s", "50.0%"],
    ]
    assert "<h2>Spread" in html.render(run)


def test_curves_have_a_line_of_each_kind(run: Run) -> None:
    drawn, stacked = curves(run)
    assert drawn.lines == [("0", [(1.0, 0.25), (2.0, 0.75)]), ("1", [(1.0, 0.5)])]
    assert (stacked.lines, stacked.stacked, sorted(stacked.marks)) == (
        drawn.lines,
        True,
        [1.0, 1.0, 2.0, 3.0],
    )


def test_the_page_draws_them(run: Run) -> None:
    page = html.render(run)
    assert "Shares over time" in page
    assert "Together" in page


def test_a_value_holds_until_the_next_where_lines_are_stacked() -> None:
    lines = [
        Line("a", [(1.0, 2.0), (3.0, 1.0)], "blue"),
        Line("b", [(2.0, 4.0)], "orange"),
    ]
    (axes,) = drawing.draw(StackedPlot(lines, [2.0], end=4.0, y=Axis("neurons"))).axes
    tops = [
        max(y for _, y in area.get_paths()[0].vertices) for area in axes.collections
    ]
    assert tops == [2.0, 6.0]
    assert [line.get_xdata()[0] for line in axes.lines] == [2.0]
