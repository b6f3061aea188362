"""A publication's figures beside ours as one HTML page: the table, and plots as the publication draws them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup
from matplotlib.figure import Figure

from controller.report.comparison import curve
from controller.report.html import environment
from controller.report.plots import SERIES, Bars, Line, bar_plot, inline, line_plot, save
from controller.report.terminal import VERDICTS
from controller.results.reproduction import ReproducedRow
from controller.results.run import Run, point_text, value_text
from testbed import formats
from testbed.scenario.paper import is_at
from testbed.scenario.schema import PaperChart, PaperPart, PaperSeries

MOST_MARKS = 12
"""Figures below the x axis, if each point is to have its own."""


def write(folder: Path, part: PaperPart, rows: Sequence[ReproducedRow], runs: Sequence[Run]) -> None:
    """Write ``paper.md``, ``paper.html`` and each plot as SVG and PDF into the folder of the runs."""
    (folder / "paper.md").write_text(markdown(part, rows), encoding="utf-8")
    (folder / "paper.html").write_text(render(folder, part, rows, runs), encoding="utf-8")


def markdown(part: PaperPart, rows: Sequence[ReproducedRow]) -> str:
    """Return the table as Markdown."""
    lines = [f"# {part.source}", "", "| | paper | ours | ± | ratio | runs | note |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [formats.of_kind(row.kind, value) for value in (row.paper, row.ours, row.half_width)]
        ratio = "–" if row.ratio is None else f"{row.ratio:.3g}"
        lines.append(f"| {' | '.join([row.name, *cells, ratio, str(row.runs), row.note])} |")
    return "\n".join(lines) + "\n"


def _plots(
    folder: Path, part: PaperPart, rows: Sequence[ReproducedRow], runs: Sequence[Run]
) -> Iterator[tuple[str, str, Markup | None, str]]:
    """Save every plot as SVG and PDF; yield title, note, the plot for the page, and the name of its files."""
    for number, chart in enumerate(part.charts, 1):
        title, note, plot = draw(chart, rows, runs)
        name = f"{number}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"
        if plot is not None:
            save(plot, folder / name)
        yield title, note, None if plot is None else inline(plot, title), name


def render(folder: Path, part: PaperPart, rows: Sequence[ReproducedRow], runs: Sequence[Run]) -> str:
    """Return the page, which is to lie in the folder of the runs; its plots are written there as SVG and PDF."""
    scenario = runs[0].trial.scenario
    runtimes = sorted({run.outcome.runtime for run in runs})
    return (
        environment()
        .get_template("paper.html")
        .render(
            source=part.source,
            description=scenario.description,
            chips=[
                scenario.name,
                f"{len(runs)} run{'' if len(runs) == 1 else 's'}",
                *(f"{name}d" for name in runtimes),
            ],
            rows=[_cells(row) for row in rows],
            charts=list(_plots(folder, part, rows, runs)),
            runs=[
                (
                    _name(run),
                    VERDICTS[run.metrics["verdict"]["kind"]][0],
                    run.metrics["verdict"]["kind"],
                    _link(folder, run),
                )
                for run in runs
            ],
            version=runs[0].manifest["versions"]["testbed"],
            date=max(run.manifest["date"] for run in runs),
        )
    )


def _cells(row: ReproducedRow) -> Mapping[str, str | bool | None]:
    half = "" if row.half_width is None else f"± {formats.of_kind(row.kind, row.half_width)}"
    return {
        "name": row.name,
        "note": row.note,
        "paper": formats.of_kind(row.kind, row.paper),
        "ours": formats.of_kind(row.kind, row.ours),
        "half": half,
        "ratio": formats.ratio(row.ratio),
        "runs": str(row.runs) + (f" ({row.untrusted} not trusted)" if row.untrusted else ""),
        "condition": row.condition,
        "holds": row.holds,
    }


def _name(run: Run) -> str:
    point = point_text(run.trial.point)
    again = f"repetition {run.trial.repetition + 1}" if run.trial.repetition else ""
    return ", ".join(part for part in (point, again) if part) or run.path.name


def _link(folder: Path, run: Run) -> str:
    below = run.path.relative_to(folder) if run.path.is_relative_to(folder) else run.path.absolute()
    return quote((below / "report.html").as_posix())


def draw(chart: PaperChart, rows: Sequence[ReproducedRow], runs: Sequence[Run]) -> tuple[str, str, Figure | None]:
    """Return (title, note, plot) of a chart; None, and the reason in the note, where no run gives anything to draw."""
    found = {row.name: row for row in rows}
    if chart.of_runs:
        return _of_runs(chart, runs)
    if not any(found[name].ours is not None for series in chart.series for name in series.rows):
        return chart.title, "None of the runs gave one of its figures.", None
    return _bars(chart, found) if chart.what == "bars" else _lines(chart, found)


def _of_runs(chart: PaperChart, runs: Sequence[Run]) -> tuple[str, str, Figure | None]:
    unit = "step" if chart.over == "steps" else "seconds"
    begin, end = chart.range or (0.0, float("inf"))
    lines = []
    for series, colour in zip(chart.series, SERIES, strict=False):
        chosen = sorted((run for run in runs if is_at(run.trial.point, series.at)), key=_repetition)
        points = curve(chosen[0], chart.what, over=chart.over, begin=begin, end=end) if chosen else []
        # Marks can be told from each other only as long as they are few.
        lines.append(Line(series.label, points, colour, marks=len(points) <= 60))
    found = [x for line in lines for x, _ in line.points]
    if not found:
        last = max((row["step"] for run in runs for row in run.metrics["series"]["steps"]), default=None)
        reached = "no run trained a step" if last is None else f"the runs ended with step {last}"
        return chart.title, f"Nothing from {unit} {begin:g} on: {reached}.", None
    low, high = chart.range or (min(found), max(found))
    write, note = {
        "steps": (formats.seconds, "Seconds from the step before; a step done again as it was done last."),
        "loss": (formats.number, "Of the training; a step done again as it was done last."),
        "accuracy": (formats.share, "On the test data."),
        "test_loss": (formats.number, "On the test data."),
    }[chart.what]
    return chart.title, note, line_plot(lines, range_=(low, high), axis=chart.axis or unit, write=write)


def _repetition(run: Run) -> int:
    return run.trial.repetition


def _lines(chart: PaperChart, found: Mapping[str, ReproducedRow]) -> tuple[str, str, Figure | None]:
    places = [float(x) for x in chart.x]
    begin, end = chart.range or (places[0], places[-1])
    places = [x for x in places if begin <= x <= end]
    lines = []
    for series, colour in zip(chart.series, SERIES, strict=False):
        rows = [
            (float(x), found[name]) for x, name in zip(chart.x, series.rows, strict=True) if begin <= float(x) <= end
        ]
        ours = [(x, row.ours) for x, row in rows if row.ours is not None]
        theirs = [(x, row.paper) for x, row in rows if row.paper is not None]
        lines.append(Line(f"{series.label}, printed", theirs, colour, marks=True, printed=True))
        lines.append(Line(series.label, ours, colour, marks=True))
    kind = found[chart.series[0].rows[0]].kind
    plot = line_plot(
        lines,
        range_=(begin, end),
        axis=chart.axis,
        write=lambda value: formats.of_kind(kind, value),
        at=places if len(places) <= MOST_MARKS else None,
    )
    note = "Dashed and pale: as printed." if any(line.printed and line.points for line in lines) else ""
    return chart.title, note, plot


def _bars(chart: PaperChart, found: Mapping[str, ReproducedRow]) -> tuple[str, str, Figure | None]:
    kinds = []
    for series, colour in zip(chart.series, SERIES, strict=False):
        kinds += _pair(series, [found[name] for name in series.rows], colour)
    kind = found[chart.series[0].rows[0]].kind
    note = "Pale: as printed." if any(bars.printed for bars in kinds) else ""
    if any(half is not None for bars in kinds for half in bars.half_widths):
        note = f"{note} Whiskers: 95 % confidence interval.".strip()
    groups = [value_text(x) if isinstance(x, str) else f"{x:g}" for x in chart.x]
    plot = bar_plot(groups, kinds, axis=chart.axis, write=lambda value: formats.of_kind(kind, value))
    return chart.title, note, plot


def _pair(series: PaperSeries, rows: Sequence[ReproducedRow], colour: str) -> list[Bars]:
    """Return what is printed, if anything is, and beside it what came out here."""
    ours = Bars(series.label, [row.ours for row in rows], colour, [row.half_width for row in rows])
    theirs = Bars(f"{series.label}, printed", [row.paper for row in rows], colour, printed=True)
    return [theirs, ours] if any(value is not None for value in theirs.values) else [ours]
