"""A publication's figures beside ours as one HTML page: the table, and plots as the publication draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from testbed.common import formats
from testbed.scenario.paper import is_at
from testbed.scenario.points import point_text, value_text
from testbed.scenario.schema import PaperChart, PaperPart, PaperSeries
from testbed_controller.report import html, tables
from testbed_controller.report.charts import FEW, SERIES, Axis, BarPlot, Bars, Chart, Line, LinePlot, thin
from testbed_controller.report.comparison import BAND, curve, mean_line
from testbed_controller.report.tables import Cell, Column, Section, figures
from testbed_controller.report.terminal import VERDICTS, where
from testbed_controller.results.reproduction import ReproducedRow, table
from testbed_controller.results.run import Run

MOST_KEPT = 200
"""Points of a line that are kept, as many as a mean over repetitions has at most."""


def keep(part: PaperPart, runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each chart that draws single runs, by its title, as little as `kept` needs of them."""
    return {
        chart.title: [
            {
                "name": line.name,
                "points": [[_short(each) for each in point] for point in thin(line.points, MOST_KEPT)],
                "half_widths": [half and _short(half) for half in line.half_widths],
            }
            for line in lines_of(chart, runs)
        ]
        for chart in part.charts
        if chart.of_runs
    }


def kept(lines: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the lines of a chart that `keep` made these of."""
    return [
        Line(each["name"], each["points"], colour, marks=len(each["points"]) <= FEW, half_widths=each["half_widths"])
        for each, colour in zip(lines, SERIES, strict=False)
    ]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def write(folder: Path, part: PaperPart, rows: Sequence[ReproducedRow], runs: Sequence[Run]) -> None:
    """Write ``paper.md``, ``paper.html`` and each plot as SVG and PDF into the folder of the runs."""
    (folder / "paper.md").write_text(markdown(part, rows), encoding="utf-8")
    (folder / "paper.html").write_text(render(folder, part, rows, runs), encoding="utf-8")


def markdown(part: PaperPart, rows: Sequence[ReproducedRow]) -> str:
    """Return the table as Markdown."""
    return "\n".join([f"# {part.source}", "", *table(rows)]) + "\n"


def show(console: Console, source: str, rows: Sequence[ReproducedRow], folder: Path) -> None:
    """Print a publication's figures beside ours."""
    console.print(Text(), tables.draw(section(source, rows), console.width), where(folder, "paper.html"))


def render(folder: Path, part: PaperPart, rows: Sequence[ReproducedRow], runs: Sequence[Run]) -> str:
    """Return the page, which is to lie in the folder of the runs; its plots are written there as SVG and PDF."""
    scenario = runs[0].trial.scenario
    drawn = [draw(chart, rows, runs) for chart in part.charts]
    pages = [[Cell(_name(run), links=[(_name(run), _link(folder, run))]), _verdict(run)] for run in runs]
    columns = (Column("Run", "name"), Column("Verdict"))
    return html.page(
        part.source,
        runs=runs,
        lead=scenario.description,
        chips=[scenario.name, f"{len(runs)} run{'' if len(runs) == 1 else 's'}"],
        charts=drawn,
        files=_save(folder, drawn),
        sections=[
            section(
                "The paper's figures beside ours" if any(row.printed != formats.NONE for row in rows) else "Figures",
                rows,
            ),
            Section("Runs", "Each with its own report.", "", columns, pages),
        ],
    )


def _save(folder: Path, charts: Sequence[Chart]) -> list[str]:
    """Save the plots of a page and return the names of their files; none where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return []
    from testbed_controller.report.drawing import save_all

    return save_all(folder, charts)


def section(title: str, rows: Sequence[ReproducedRow]) -> Section:
    """Return what is printed and what came out here, a row each; columns without a cell are left out."""
    printed, expected = any(row.printed != formats.NONE for row in rows), any(row.condition for row in rows)
    columns = (
        Column("Figure", "name"),
        *figures(*(["Paper"] if printed else []), "Ours", *(["Ours / paper"] if printed else []), "Runs"),
        *([Column("Expected")] if expected else []),
    )
    note = "mean ± half width of the 95% confidence interval (Student)"
    cells = [
        [
            Cell(row.name, row.remark),
            *([Cell(row.printed)] if printed else []),
            Cell(
                formats.of_kind(row.kind, row.ours),
                "" if row.half_width is None else f"± {formats.of_kind(row.kind, row.half_width)}",
            ),
            *([Cell(formats.ratio(row.ratio))] if printed else []),
            Cell(str(row.runs), f"({row.untrusted} not trusted)" if row.untrusted else ""),
            *([_held(row)] if expected else []),
        ]
        for row in rows
    ]
    return Section(title, f"Ours: {note}.", note, columns, cells)


def _held(row: ReproducedRow) -> Cell:
    if row.holds is None:
        return Cell("")
    return Cell(f"{'✔' if row.holds else '✘'} {row.condition}", tone="yes" if row.holds else "no")


def _verdict(run: Run) -> Cell:
    kind = run.metrics["verdict"]["kind"]
    return Cell(f"{VERDICTS[kind][0]} {kind}")


def _name(run: Run) -> str:
    point = point_text(run.trial.point)
    again = f"repetition {run.trial.repetition + 1}" if run.trial.repetition else ""
    return ", ".join(part for part in (point, again) if part) or run.path.name


def _link(folder: Path, run: Run) -> str:
    below = run.path.relative_to(folder) if run.path.is_relative_to(folder) else run.path.absolute()
    return quote((below / "report.html").as_posix())


def draw(chart: PaperChart, rows: Sequence[ReproducedRow], runs: Sequence[Run]) -> Chart:
    """Return (title, note, plot) of a chart; None, and the reason in the note, where no run gives anything to draw."""
    title, note, plot = draw_lines(chart, rows, lines_of(chart, runs))
    if plot is None and chart.of_runs:
        last = max((row["step"] for run in runs for row in run.metrics["series"]["steps"]), default=None)
        note += ": " + ("no run trained a step." if last is None else f"the runs ended with step {last}.")
    return title, note, plot


def lines_of(chart: PaperChart, runs: Sequence[Run]) -> list[Line]:
    """Return the lines of a chart that draws single runs; none of another."""
    begin, end = chart.range or (0.0, float("inf"))
    found = []
    for series, colour in zip(chart.series if chart.of_runs else (), SERIES, strict=False):
        chosen = [run for run in runs if is_at(run.trial.point, series.at)]
        curves = [curve(run, chart.what, over=chart.over, begin=begin, end=end) for run in chosen]
        found.append(mean_line(series.label, curves, colour))
    return found


def draw_lines(chart: PaperChart, rows: Sequence[ReproducedRow], lines: Sequence[Line]) -> Chart:
    """Return what `draw` does, given the `lines_of` the chart."""
    found = {row.name: row for row in rows}
    if chart.of_runs:
        return _of_runs(chart, lines)
    if not any(found[name].ours is not None for series in chart.series for name in series.rows):
        return chart.title, "None of the runs gave one of its figures.", None
    return _bars(chart, found) if chart.what == "bars" else _lines(chart, found)


def _of_runs(chart: PaperChart, lines: Sequence[Line]) -> Chart:
    unit = "step" if chart.over == "steps" else "seconds"
    places = [x for line in lines for x, _ in line.points]
    if not places:
        return chart.title, f"Nothing from {unit} {chart.range[0] if chart.range else 0:g} on", None
    low, high = chart.range or (min(places), max(places))
    y, note = {
        "steps": (Axis("time per step", "seconds"), "From the step before; a step done again as it was done last."),
        "loss": (Axis("training loss"), "A step done again as it was done last."),
        "accuracy": (Axis("accuracy", "share"), "On the test data."),
        "test_loss": (Axis("loss"), "On the test data."),
    }[chart.what]
    if any(line.half_widths for line in lines):
        note += f" {BAND}"
    x = chart.axis if chart.axis not in ("", "seconds") else "time (s)" if unit == "seconds" else unit
    return chart.title, note, LinePlot(lines, range_=(low, high), x=x, y=y)


def _lines(chart: PaperChart, found: Mapping[str, ReproducedRow]) -> Chart:
    places = [float(x) for x in chart.x]
    begin, end = chart.range or (places[0], places[-1])
    lines = []
    for series, colour in zip(chart.series, SERIES, strict=False):
        rows = [
            (float(x), found[name]) for x, name in zip(chart.x, series.rows, strict=True) if begin <= float(x) <= end
        ]
        ours = [(x, row.ours) for x, row in rows if row.ours is not None]
        halves = [row.half_width for _, row in rows if row.ours is not None]
        theirs = [(x, row.paper) for x, row in rows if row.paper is not None]
        lines.append(Line(f"{series.label}, printed", theirs, colour, marks=True, printed=True))
        lines.append(Line(series.label, ours, colour, marks=True, half_widths=halves if any(halves) else ()))
    plot = LinePlot(lines, range_=(begin, end), x=chart.axis, y=_axis(chart, found), swept=True)
    note = "Dashed and pale: as printed." if any(line.printed and line.points for line in lines) else ""
    if any(line.half_widths for line in lines):
        note = f"{note} Whiskers: 95% confidence interval.".strip()
    return chart.title, note, plot


def _axis(chart: PaperChart, found: Mapping[str, ReproducedRow]) -> Axis:
    """Return what the rows of a chart have in common, else its title."""
    rows = [found[name] for series in chart.series for name in series.rows]
    measures = {row.measure for row in rows}
    return Axis(measures.pop() if len(measures) == 1 else chart.title, rows[0].kind)


def _bars(chart: PaperChart, found: Mapping[str, ReproducedRow]) -> Chart:
    kinds = []
    for series, colour in zip(chart.series, SERIES, strict=False):
        kinds += _pair(series, [found[name] for name in series.rows], colour)
    note = "Pale: as printed." if any(bars.printed for bars in kinds) else ""
    if any(half is not None for bars in kinds for half in bars.half_widths):
        note = f"{note} Whiskers: 95% confidence interval.".strip()
    groups = [value_text(x) if isinstance(x, str) else f"{x:g}" for x in chart.x]
    return chart.title, note, BarPlot(groups, kinds, x=chart.axis, y=_axis(chart, found))


def _pair(series: PaperSeries, rows: Sequence[ReproducedRow], colour: str) -> list[Bars]:
    """Return what is printed, if anything is, and beside it what came out here."""
    ours = Bars(series.label, [row.ours for row in rows], colour, [row.half_width for row in rows])
    theirs = Bars(f"{series.label}, printed", [row.paper for row in rows], colour, printed=True)
    return [theirs, ours] if any(value is not None for value in theirs.values) else [ours]
