"""A publication's plots over our runs: what is drawn, what is refused, and what a run does not give."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recorded
from matplotlib.figure import Figure

from controller.report.comparison import curve
from controller.report.paper import draw, render
from controller.report.plots import Bars, Line, bar_plot, inline, line_plot, save
from controller.results import files, recorder, reproduction
from controller.results.run import Run, run_name
from testbed.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.schema import PaperPart, Scenario

SCHEDULE = "workload.method.schedule"
SWEEP = {SCHEDULE: ["gpipe", "1f1b"]}
ROWS = [
    {"name": "gpipe", "figure": "step_time", "at": {SCHEDULE: "gpipe"}, "value": "2s"},
    {"name": "1f1b", "figure": "step_time", "at": {SCHEDULE: "1f1b"}},
    {"name": "sent", "figure": "bytes_sent", "at": {SCHEDULE: "gpipe"}},
]
BARS = {
    "title": "Time",
    "what": "bars",
    "x": ["GPipe", "1F1B"],
    "series": [{"label": "ours", "rows": ["gpipe", "1f1b"]}],
}
LINES = {**BARS, "what": "lines", "x": [1, 4], "axis": "schedule"}
STEPS = {
    "title": "Steps",
    "what": "steps",
    "axis": "batch",
    "range": [1, 3],
    "series": [{"label": name, "at": {SCHEDULE: name}} for name in SWEEP[SCHEDULE]],
}


def made(folder: Path) -> list[Run]:
    """Write runs of both schedules, twice each."""
    runs = []
    for schedule, repetition, time in (("gpipe", 0, 1.0), ("gpipe", 1, 3.0), ("1f1b", 0, 1.0), ("1f1b", 1, 1.0)):
        trial = replace(recorded.trial(), point={SCHEDULE: schedule}, repetition=repetition)
        path = folder / run_name(trial)
        run = files.load(recorder.write(path, trial, recorded.plan(), recorded.outcome(), command="x"))
        runs.append(replace(run, metrics=run.metrics | {"step_time": time}))
    return runs


def part(*charts: dict[str, Any]) -> PaperPart:
    return PaperPart.model_validate({"source": "Somebody, Figure 1", "rows": ROWS, "charts": charts})


def drawn(folder: Path, chart: dict[str, Any]) -> tuple[str, Figure]:
    """Return the note and the plot of one chart."""
    runs, whole = made(folder), part(chart)
    title, note, plot = draw(whole.charts[0], reproduction.reproduce(whole, runs), runs)
    assert title == chart["title"]
    assert plot is not None
    return note, plot


def points(plot: Figure) -> dict[str, list[tuple[float, float]]]:
    """Return the points of every line of a plot; the names of what is printed begin with an underscore."""
    return {str(line.get_label()): [(x, y) for x, y in line.get_xydata()] for line in plot.axes[0].lines}


def test_bars_stand_at_the_height_of_the_rows_with_their_intervals(tmp_path: Path) -> None:
    note, plot = drawn(tmp_path, BARS)
    heights = {str(bars.get_label()): [bar.get_height() for bar in bars] for bars in plot.axes[0].containers[:1]}
    assert heights == {"_ours, printed": [2.0]}
    assert [bar.get_height() for bar in plot.axes[0].patches] == [2.0, 2.0, 1.0]
    texts = [text.get_text() for text in plot.axes[0].texts]
    assert texts == ["2 s", "2 s", "1 s"], "a figure above each bar"
    assert "Pale" in note
    assert "Whiskers" in note


def test_lines_hold_ours_and_what_is_printed(tmp_path: Path) -> None:
    note, plot = drawn(tmp_path, LINES)
    assert "Dashed" in note
    assert points(plot) == {"ours": [(1.0, 2.0), (4.0, 1.0)], "_ours, printed": [(1.0, 2.0)]}
    axes = plot.axes[0]
    assert (axes.get_xlim(), axes.get_xlabel()) == ((1.0, 4.0), "schedule")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4"]
    assert axes.yaxis.get_major_formatter()(2.0) == "2 s"


def test_steps_are_those_of_the_first_repetition_within_the_range(tmp_path: Path) -> None:
    _, plot = drawn(tmp_path, STEPS)
    expected = curve(made(tmp_path / "again")[0], "steps", begin=1, end=3)
    assert [step for step, _ in expected] == [1, 2, 3]
    assert all([x for x, _ in line] == [1, 2, 3] for line in points(plot).values())
    runs, whole = made(tmp_path / "late"), part(STEPS | {"range": [190, 220]})
    nothing = "Nothing from step 190 on: the runs ended with step 4."
    assert draw(whole.charts[0], reproduction.reproduce(whole, runs), runs)[1:] == (nothing, None)


@pytest.mark.parametrize("over", ["steps", "seconds"])
def test_loss_is_drawn_over_steps_or_over_time(tmp_path: Path, over: str) -> None:
    chart = {key: value for key, value in STEPS.items() if key != "range"} | {"what": "loss", "over": over}
    _, plot = drawn(tmp_path, chart)
    last = {row["step"]: row for row in made(tmp_path / "again")[0].metrics["series"]["steps"]}
    expected = sorted((row["step" if over == "steps" else "time"], row["loss"]) for row in last.values())
    assert len(expected) > 2
    for line in points(plot).values():
        assert line == expected


def test_accuracy_is_drawn_as_it_was_evaluated(tmp_path: Path) -> None:
    chart = {key: value for key, value in STEPS.items() if key != "range"} | {"what": "accuracy"}
    runs, whole = made(tmp_path), part(chart)
    evaluations = [{"step": 2, "accuracy": 0.25}, {"step": 4, "accuracy": 0.5}]
    runs = [
        replace(run, metrics=run.metrics | {"series": run.metrics["series"] | {"evaluations": evaluations}})
        for run in runs
    ]
    _, note, plot = draw(whole.charts[0], reproduction.reproduce(whole, runs), runs)
    assert plot is not None
    assert list(points(plot).values()) == [[(2, 0.25), (4, 0.5)]] * 2
    assert plot.axes[0].yaxis.get_major_formatter()(0.25) == "25.0%"
    assert note == "On the test data."


def test_the_page_has_all_and_loads_nothing(tmp_path: Path) -> None:
    runs, whole = made(tmp_path), part(STEPS, BARS, LINES)
    rows = reproduction.reproduce(whole, runs)
    page = render(tmp_path, whole, rows, runs)
    assert page.count('<svg class="chart"') == 3
    for name in ("Somebody, Figure 1", "2 s", "1.00×"):
        assert name in page
    links = re.findall(r'(?<!xlink:)href="([^"]+)"', page)
    assert len(links) == 4 + 3 * 2
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        f"{name}.{kind}" for name in ("1-steps", "2-time", "3-time") for kind in ("svg", "pdf")
    }
    assert not any(link.startswith(("http", "/")) for link in links)
    assert not re.search(r'src="|url\((?!#)', page)
    evil = "</script><script>alert(1)</script>"
    assert evil not in render(tmp_path, whole.model_copy(update={"source": evil}), rows, runs)


def test_a_chart_without_any_run_says_so(tmp_path: Path) -> None:
    whole = part(BARS)
    runs = [replace(run, metrics=run.metrics | {"step_time": None}) for run in made(tmp_path)]
    assert draw(whole.charts[0], reproduction.reproduce(whole, runs), runs)[1:] == (
        "None of the runs gave one of its figures.",
        None,
    )


@pytest.mark.parametrize(
    ("chart", "told"),
    [
        (BARS | {"series": [{"label": "x", "rows": ["gpip", "1f1b"]}]}, "did you mean 'gpipe'"),
        (BARS | {"series": [{"label": "x", "rows": ["gpipe"]}]}, "names 1 rows for 2 of `x`"),
        (BARS | {"series": [{"label": "x", "rows": ["gpipe", "sent"]}]}, "cannot show bytes and seconds"),
        (BARS | {"x": []}, "says where the rows stand"),
        (LINES | {"x": [4, 1]}, "rising numbers"),
        (LINES | {"x": ["few", "many"]}, "rising numbers"),
        (STEPS | {"series": [{"label": "x", "at": {}}]}, "2 points of the sweep have no value"),
        (STEPS | {"series": [{"label": "x", "at": {SCHEDULE: "pipe"}}]}, "0 points of the sweep have"),
        (
            STEPS | {"series": [{"label": "x", "at": {SCHEDULE: "gpipe"}, "rows": ["gpipe"]}]},
            "belongs to lines and bars",
        ),
    ],
)
def test_charts_that_cannot_come_out_are_refused_before_anything_runs(chart: dict[str, Any], told: str) -> None:
    paper = {"source": "x", "rows": ROWS, "charts": [chart]}
    with pytest.raises(InputError, match=told):
        prepare(trials(Scenario.model_validate(recorded.SCENARIO | {"sweep": SWEEP, "paper": paper}))[0])


def test_a_range_has_to_rise() -> None:
    with pytest.raises(ValueError, match=r"write \[190, 220\]"):
        part(STEPS | {"range": [220, 190]})


def test_figures_above_bars_stand_above_all_or_none() -> None:
    kinds = [Bars(f"kind {index}", [0.123] * 4, "blue") for index in range(6)]
    assert not bar_plot(list("abcd"), kinds, write=str).axes[0].texts
    assert len(bar_plot(list("abcd"), kinds[:2], write=str).axes[0].texts) == 8


@pytest.mark.parametrize("count", [1, 6])
def test_a_legend_stays_within_the_plot(count: int) -> None:
    names = [f"a rather long name of series {index}" * (4 if index == 3 else 1) for index in range(count)]
    for plot in (
        line_plot([Line(name, [(0, 1)], "blue") for name in names], range_=(0, 1), write=str),
        bar_plot(["one"], [Bars(name, [1.0], "blue") for name in names], write=str),
    ):
        plot.draw_without_rendering()
        legend = plot.axes[0].get_legend()
        assert legend is not None
        assert len(legend.get_texts()) == count
        box, whole = legend.get_window_extent(), plot.bbox
        assert box.x0 >= whole.x0
        assert box.x1 <= whole.x1
        assert box.y1 <= whole.y1 + 1


def test_a_plot_is_the_same_each_time_and_its_text_is_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plot = line_plot([Line("one & <all>", [(0, 1), (1, 2)], "blue")], range_=(0, 1), write=str)
        save(plot, tmp_path / name)
    for kind in ("svg", "pdf"):
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()
    assert ">one &amp; &lt;all&gt;</text>" in (tmp_path / "a.svg").read_text()
    shown = inline(plot, "x")
    assert "var(--blue)" in shown
    assert "#3273dc" not in shown


def test_the_scenarios_of_papers_name_rows_and_points_that_are_there() -> None:
    for path in sorted((Path(__file__).parents[2] / "scenarios" / "papers").glob("*.yaml")):
        assert trials(load(path)), path


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "scenarios" / "papers").glob("*-figure-*.yaml")))
def test_a_scenario_of_a_figure_draws_it(file: Path) -> None:
    part = load(file).paper
    assert part is not None
    assert part.charts
