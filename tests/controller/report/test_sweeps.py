"""Sweeps: summaries of repetitions, charts over swept keys, labels of points, and their tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed_controller.cli.export import export as export_command
from testbed_controller.cli.report import compare as compare_command
from testbed_controller.report import drawing, sweep
from testbed_controller.report.comparison import plots
from testbed_controller.report.tables import latex
from testbed_controller.results import files
from testbed_controller.results.comparison import compare, side_by_side
from testbed_controller.results.run import Run
from testbed_controller.results.summary import summarize, summary_of
from tests.controller.report.drawn_charts import draw_axes, texts_of
from tests.controller.report.recorded_runs import load_point, load_recorded
from tests.helpers import recorded

RATE = "network.link.rate"
METHOD = "workload.method"


def load_two_rates(results: Path) -> list[Run]:
    """Return two repetitions at each of two rates; second repetitions take twice the time of first ones."""
    runs = []
    for rate, factor in (("5mbit", 2.0), ("500kbit", 4.0)):
        for repetition in (0, 1):
            slowdown = factor * (1 + repetition)
            events = recorded.slow_down(recorded.make_events(), slowdown)
            runs.append(load_point(results, {RATE: rate}, repetition, events=events))
    return runs


def load_labelled_methods(results: Path) -> list[Run]:
    """Return runs of two labelled methods at two rates each."""
    runs = []
    for label in ("FedAvg", "SCAFFOLD"):
        for rate in ("5mbit", "50mbit"):
            value = {"name": "single", "file": f"../{label}.py"}
            method = {"label": label, "value": value}
            runs.append(load_point(results, {METHOD: method, RATE: rate}))
    return runs


def with_point(run: Run, point: dict[str, Any]) -> Run:
    return replace(run, trial=replace(run.trial, point=point, repetition=0))


def draw_step_times(runs: list[Run]) -> Any:
    """Draw the chart of step times of a sweep and return the figure."""
    for title, _, plot in sweep.charts(summary_of(runs), runs):
        if title == "Step time":
            return drawing.draw(plot)
    raise AssertionError("no chart of step times")


def only_labelled_line(axes: Any) -> Any:
    labelled = []
    for line in axes.lines:
        # Matplotlib names lines without a label with a leading underscore.
        if not str(line.get_label()).startswith("_"):
            labelled.append(line)
    (line,) = labelled
    return line


def labels_of(compared: dict[str, Any]) -> list[str]:
    return [run["label"] for run in compared["runs"]]


def row_of(compared: dict[str, Any], metric: str) -> dict[str, Any]:
    rows = {row["name"]: row for row in compared["metrics"]}
    row: dict[str, Any] = rows[metric]
    return row


def test_runs_of_sweep_are_labelled_by_their_differences(tmp_path: Path) -> None:
    names = ("sweep,rate=10mbit,loss=0", "sweep,rate=10mbit,loss=1")
    runs = [load_recorded(tmp_path / name) for name in names]
    assert labels_of(compare(side_by_side(runs))) == ["loss=0", "loss=1"]
    # Commas of other names separate no keys.
    first = load_recorded(tmp_path / "one")
    second = load_recorded(tmp_path / "one,more")
    compared = compare(side_by_side([first, second]))
    assert labels_of(compared) == ["one", "one,more"]


def test_repetitions_are_compared_as_one_column(tmp_path: Path) -> None:
    compared = compare(side_by_side(load_two_rates(tmp_path)))
    assert labels_of(compared) == ["rate=5mbit", "rate=500kbit"]
    for column in compared["runs"]:
        assert column["count"] == 2
    step_time = row_of(compared, "step_time")
    # Means of 2 and 4 s, and of 4 and 8 s.
    assert step_time["values"] == pytest.approx([3.0, 6.0])
    # Student's 97.5 % quantile of one degree of freedom is 12.706; values lie 1 and 2 s from their means.
    assert step_time["half_widths"] == pytest.approx([12.706, 25.412], rel=1e-4)
    assert step_time["ratios"] == pytest.approx([1.0, 2.0])
    first, second = compared["warnings"]
    assert first.startswith("rate=5mbit: 2 of 2 runs are")
    assert second.startswith("rate=500kbit: 2 of 2 runs are")


def test_metrics_of_scenario_are_compared_and_summarized(tmp_path: Path) -> None:
    runs = []
    for number, value in enumerate((0.5, 0.25)):
        run = load_recorded(tmp_path / str(number))
        runs.append(replace(run, metrics={**run.metrics, "metrics": {"f1": value}}))
    compared = compare(side_by_side(runs))
    row = row_of(compared, "metrics.f1")
    assert row["values"] == [0.5, 0.25]
    assert row["ratios"] == [1.0, 0.5]
    [point] = summary_of(runs)["points"]
    # The mean of 0.5 and 0.25.
    assert point["metrics"]["metrics.f1"]["mean"] == 0.375


def test_sweep_has_page_with_charts_over_swept_key(tmp_path: Path) -> None:
    runs = load_two_rates(tmp_path)
    (axes,) = draw_step_times(runs).axes
    assert axes.get_xlabel() == "rate (mbit/s)"
    assert axes.get_ylabel() == "step time (s)"
    line = only_labelled_line(axes)
    # Means of both repetitions, in the order of the rates.
    assert line.get_xydata().tolist() == [[0.5, 6.0], [5.0, 3.0]]
    assert axes.containers, "whiskers"
    page = sweep.render(summary_of(runs), runs)
    # The heading and two points.
    assert page.count("<tr>") == 3
    # Columns are sorted by numbers rather than by texts.
    assert 'data-value="0.5">500kbit' in page
    assert f'href="{quote(runs[0].path.name)}/report.html"' in page


def test_keys_that_vary_together_are_drawn_as_one_line(tmp_path: Path) -> None:
    first_repetitions = load_two_rates(tmp_path)[::2]
    runs = []
    for step, run in enumerate(first_repetitions, 1):
        runs.append(with_point(run, {RATE: f"{step}mbit", "seed": step}))
    title, note, plot = next(iter(sweep.charts(summary_of(runs), runs)))
    line = only_labelled_line(draw_axes(plot))
    assert len(line.get_xdata()) == 2, title
    assert note == "Varied together: seed."


def test_sweep_over_names_is_drawn_as_bars(tmp_path: Path) -> None:
    first_repetitions = load_two_rates(tmp_path)[::2]
    runs = []
    for name, run in zip(("gpipe", "1f1b"), first_repetitions, strict=True):
        runs.append(with_point(run, {METHOD: {"name": name}}))
    (axes,) = draw_step_times(runs).axes
    assert texts_of(axes.get_xticklabels()) == ["gpipe", "1f1b"]
    gpipe, one_f_one_b = axes.patches
    # Step times of the first repetitions at both rates.
    assert gpipe.get_height() == 2.0
    assert one_f_one_b.get_height() == 4.0


def test_points_are_drawn_in_order_of_scenario(tmp_path: Path) -> None:
    rates = ["5mbit", "500mbit", "50mbit", "1mbit", "7mbit", "3mbit", "20mbit", "9mbit"]
    runs = []
    for rate in rates:
        runs.append(load_point(tmp_path, {RATE: rate}))
    summarize(tmp_path, runs)
    # Folders are listed in the order of their names, unless a summary has another.
    reloaded = [files.load_metrics(folder) for folder in files.run_folders(tmp_path)]
    _, _, plot = next(iter(plots(side_by_side(reloaded))))
    figure = drawing.draw(plot)
    (legend,) = figure.legends
    labels = texts_of(legend.get_texts())
    assert labels == [f"rate={rate}" for rate in rates]
    styles = set()
    for line in figure.axes[0].lines:
        styles.add((line.get_color(), line.get_linestyle()))
    assert len(styles) == len(rates), "all lines look different"


def test_option_selects_and_renames_series(tmp_path: Path) -> None:
    slow = load_point(tmp_path, {RATE: "5mbit"})
    fast = load_point(tmp_path, {RATE: "500mbit"})
    series = ["--series", "rate=500mbit: Fast", "--series", "rate=5mbit"]
    result = CliRunner().invoke(compare_command, [str(tmp_path), "--json", *series])
    assert labels_of(json.loads(result.stdout)) == ["Fast", "rate=5mbit"]
    problem = (
        "--series: unknown group 'rate=6mbit': choose one of rate=5mbit; rate=500mbit"
    )
    with pytest.raises(InputError, match=problem):
        side_by_side([slow, fast], ["rate=6mbit"])


def test_tables_of_sweeps_and_comparisons_are_written_for_latex(tmp_path: Path) -> None:
    runs = load_two_rates(tmp_path)
    table = latex(sweep.section(summary_of(runs)))
    assert table.startswith("\\begin{tabular}{lrr")
    assert "& Accuracy (\\%) &" in table
    assert "5mbit & 2 (2 not trusted) & 95 $\\pm$ 0 &" in table
    file = tmp_path / "table.tex"
    result = CliRunner().invoke(compare_command, [str(tmp_path), "--latex", str(file)])
    assert result.exit_code == 0, result.output
    step_times = "3 $\\pm$ 12.7 & 6 $\\pm$ 25.4 2.00$\\times$ \\\\"
    assert f"step time (s) & {step_times}" in file.read_text()


def test_labels_of_sweep_values_name_series_folders_and_columns(tmp_path: Path) -> None:
    runs = load_labelled_methods(tmp_path)
    assert runs[0].path.name == "recorded,method=FedAvg,rate=5mbit"
    assert next(iter(side_by_side(runs))) == "method=FedAvg,rate=5mbit"
    (legend,) = draw_step_times(runs).legends
    assert texts_of(legend.get_texts()) == ["FedAvg", "SCAFFOLD"]
    assert "FedAvg & 5mbit &" in latex(sweep.section(summary_of(runs)))


def test_export_selects_metrics_with_headings(tmp_path: Path) -> None:
    load_labelled_methods(tmp_path)
    metrics = ["--metric", "step_time: Time per step", "--metric", "accuracy"]
    arguments = ["run", str(tmp_path), "--latex", *metrics]
    result = CliRunner().invoke(export_command, arguments)
    assert result.exit_code == 0, result.output
    heading = (tmp_path / "export" / "points.tex").read_text().splitlines()[2]
    assert heading == r"method & rate & Runs & Time per step (s) & Accuracy (\%) \\"
    arguments = ["run", str(tmp_path), "--plots", "--metric", "speed"]
    result = CliRunner().invoke(export_command, arguments)
    assert "unknown metric" in str(result.exception)
