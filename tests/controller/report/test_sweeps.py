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


def draw_charts(runs: list[Run]) -> dict[str, Any]:
    """Return a drawn figure for each title of the charts of a sweep."""
    figures = {}
    for title, _, plot in sweep.charts(summary_of(runs), runs):
        figures[title] = drawing.draw(plot)
    return figures


def labelled_lines(axes: Any) -> list[Any]:
    # Matplotlib names lines without a label with a leading underscore.
    return [line for line in axes.lines if not str(line.get_label()).startswith("_")]


def labels_of(compared: dict[str, Any]) -> list[str]:
    return [run["label"] for run in compared["runs"]]


def test_runs_of_sweep_are_labelled_by_their_differences(tmp_path: Path) -> None:
    names = ("sweep,rate=10mbit,loss=0", "sweep,rate=10mbit,loss=1")
    runs = [load_recorded(tmp_path / name) for name in names]
    assert labels_of(compare(side_by_side(runs))) == ["loss=0", "loss=1"]
    # Commas of other names separate no keys.
    runs = [load_recorded(tmp_path / name) for name in ("one", "one,more")]
    assert labels_of(compare(side_by_side(runs))) == ["one", "one,more"]


def test_repetitions_are_compared_as_one_column(tmp_path: Path) -> None:
    compared = compare(side_by_side(load_two_rates(tmp_path)))
    columns = [(run["label"], run["count"]) for run in compared["runs"]]
    assert columns == [("rate=5mbit", 2), ("rate=500kbit", 2)]
    [step_time] = [row for row in compared["metrics"] if row["name"] == "step_time"]
    # Means of 2 and 4 s, and of 4 and 8 s.
    assert step_time["values"] == pytest.approx([3.0, 6.0])
    # Student's 97.5 % quantile of one degree of freedom is 12.706; values lie 1 and 2 s from their means.
    assert step_time["half_widths"] == pytest.approx([12.706, 25.412], rel=1e-4)
    assert step_time["ratios"] == pytest.approx([1.0, 2.0])
    warnings = [warning.partition(" are")[0] for warning in compared["warnings"]]
    assert warnings == ["rate=5mbit: 2 of 2 runs", "rate=500kbit: 2 of 2 runs"]


def test_metrics_of_scenario_are_compared_and_summarized(tmp_path: Path) -> None:
    runs = []
    for number, value in enumerate((0.5, 0.25)):
        run = load_recorded(tmp_path / str(number))
        runs.append(replace(run, metrics={**run.metrics, "metrics": {"f1": value}}))
    compared = compare(side_by_side(runs))
    [row] = [row for row in compared["metrics"] if row["name"] == "metrics.f1"]
    assert row["values"] == [0.5, 0.25]
    assert row["ratios"] == [1.0, 0.5]
    [point] = summary_of(runs)["points"]
    # The mean of 0.5 and 0.25.
    assert point["metrics"]["metrics.f1"]["mean"] == 0.375


def test_sweep_has_page_with_charts_over_swept_key(tmp_path: Path) -> None:
    runs = load_two_rates(tmp_path)
    axes = draw_charts(runs)["Step time"].axes[0]
    assert axes.get_xlabel() == "rate (mbit/s)"
    assert axes.get_ylabel() == "step time (s)"
    [line] = labelled_lines(axes)
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
    [line] = labelled_lines(drawing.draw(plot).axes[0])
    assert len(line.get_xdata()) == 2, title
    assert note == "Varied together: seed."


def test_sweep_over_names_is_drawn_as_bars(tmp_path: Path) -> None:
    first_repetitions = load_two_rates(tmp_path)[::2]
    runs = []
    for name, run in zip(("gpipe", "1f1b"), first_repetitions, strict=True):
        runs.append(with_point(run, {METHOD: {"name": name}}))
    axes = draw_charts(runs)["Step time"].axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["gpipe", "1f1b"]
    assert [bar.get_height() for bar in axes.patches] == [2.0, 4.0]


def test_points_are_drawn_in_order_of_scenario(tmp_path: Path) -> None:
    rates = [f"{rate}mbit" for rate in (5, 500, 50, 1, 7, 3, 20, 9)]
    summarize(tmp_path, [load_point(tmp_path, {RATE: rate}) for rate in rates])
    # Folders are listed in the order of their names, unless a summary has another.
    reloaded = [files.load_metrics(folder) for folder in files.places(tmp_path)]
    _, _, plot = next(iter(plots(side_by_side(reloaded))))
    figure = drawing.draw(plot)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [f"rate={rate}" for rate in rates]
    styles = set()
    for line in figure.axes[0].lines:
        styles.add((line.get_color(), line.get_linestyle()))
    assert len(styles) == len(rates), "all lines look different"


def test_option_selects_and_renames_series(tmp_path: Path) -> None:
    runs = [load_point(tmp_path, {RATE: rate}) for rate in ("5mbit", "500mbit")]
    series = ["--series", "rate=500mbit: Fast", "--series", "rate=5mbit"]
    result = CliRunner().invoke(compare_command, [str(tmp_path), "--json", *series])
    assert labels_of(json.loads(result.stdout)) == ["Fast", "rate=5mbit"]
    problem = (
        "--series: unknown group 'rate=6mbit': choose one of rate=5mbit; rate=500mbit"
    )
    with pytest.raises(InputError, match=problem):
        side_by_side(runs, ["rate=6mbit"])


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
    [legend] = draw_charts(runs)["Step time"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["FedAvg", "SCAFFOLD"]
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
