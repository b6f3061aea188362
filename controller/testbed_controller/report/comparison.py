"""Presentation of a comparison of runs, in the terminal and as HTML."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from testbed.common import formats
from testbed.common.formats import Scale
from testbed.common.intervals import interval
from testbed_controller.report import html
from testbed_controller.report.charts import (
    FEW,
    STYLES,
    Axis,
    Chart,
    Dash,
    Line,
    LinePlot,
)
from testbed_controller.report.tables import BARS, Cell, Column, Section, draw, figures
from testbed_controller.report.terminal import VERDICTS
from testbed_controller.results.run import Run

BAND = "Mean of the repetitions; pale band: 95% confidence interval."
MOST_PLACES = 200
"""Maximum number of points at which a mean is drawn; more are indistinguishable."""

Points = list[tuple[float, float]]
HEAD = 24
"""Characters per line of a column heading."""
AROUND = 20
"""Number of steps drawn after the resumption; half as many before."""


def show(console: Console, compared: Mapping[str, Any]) -> None:
    """Print a comparison: a row per metric, a column per run or group of repetitions, with ratios to the first."""
    console.print(draw(figures_of(compared), console.width))
    if compared["clocks"]:
        style = "green" if compared["clocks"]["agree"] else "yellow"
        console.print(Text("  " + clocks_text(compared["clocks"]), style=style))
    for warning in compared["warnings"]:
        console.print(Text(f"  ! {warning}", style="yellow"))


def figures_of(compared: Mapping[str, Any]) -> Section:
    """Return the figures of runs side by side."""
    rows = [_figure_row(row) for row in compared["figures"]]
    repeated = any(run["count"] > 1 for run in compared["runs"])
    brief = (
        "mean ± half width of the 95% confidence interval (Student)" if repeated else ""
    )
    note = "Small: how many times the first column's figure."
    note += f" Figures of several runs: {brief}." if brief else ""
    return Section(
        "Runs side by side", note, brief, _table_columns("Figure", compared), rows
    )


def _figure_row(row: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of one metric, all in one unit."""
    scale = Scale.of(row["kind"], row["values"])
    cells = [Cell(scale.title(row["name"].replace("_", " ")), hint=row["about"])]
    for at, value in enumerate(row["values"]):
        cells.append(Cell(scale.write(value), _cell_note(row, at, scale)))
    return cells


def _cell_note(row: Mapping[str, Any], at: int, scale: Scale) -> str:
    """Return a metric's interval and its ratio to the first column; empty if both are unknown."""
    half, ratio = row["half_widths"][at], row["ratios"][at]
    parts = [f"± {scale.write(half)}" if half else ""]
    return " ".join(
        filter(None, [*parts, formats.ratio(ratio) if at and ratio is not None else ""])
    )


def _table_columns(first: str, compared: Mapping[str, Any]) -> tuple[Column, ...]:
    heads = []
    for run in compared["runs"]:
        lines = [
            line
            for part in run["label"].split(",")
            for line in textwrap.wrap(part, HEAD) or [""]
        ]
        again = f"\u00a0×\u00a0{run['count']}" if run["count"] > 1 else ""
        heads.append(
            "\n".join(
                [*lines, f"{run['runtime']}d\u00a0{VERDICTS[run['verdict']][0]}{again}"]
            )
        )
    return Column(first, "name"), *figures(*heads)


def _other_sections(compared: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections of the page besides the metrics."""
    rows = [
        [
            Cell(name),
            *(
                Cell("–") if share is None else Cell(_format_share(share), shares=share)
                for share in shares
            ),
        ]
        for name, shares in compared["devices"].items()
    ]
    note = "Share of the run that a device spent computing / communicating without computing; red: down."
    yield Section("Devices", note, "", _table_columns("Device", compared), rows)
    if compared["differences"]:
        rows = [
            [
                Cell(key),
                *(Cell("–" if value is None else str(value)) for value in values),
            ]
            for key, values in compared["differences"].items()
        ]
        yield Section(
            "Where the scenarios differ", "", "", _table_columns("Key", compared), rows
        )


def _format_share(share: Mapping[str, float]) -> str:
    return " / ".join(formats.whole_share(share[kind]) for kind in BARS[:2])


def clocks_text(clocks: Mapping[str, Any]) -> str:
    """Describe the agreement of both runtimes."""
    what = clocks["figure"].replace("_", " ")
    verb = "agree" if clocks["agree"] else "do not agree"
    return (
        f"emulated and simulated {verb}: {what} {formats.seconds(clocks['emulated'])} against "
        f"{formats.seconds(clocks['simulated'])}, {clocks['ratio'] - 1:+.1%}"
    )


def render(grouped: Mapping[str, Sequence[Run]], compared: Mapping[str, Any]) -> str:
    """Return a comparison as one self-contained HTML page."""
    runs = compared["runs"]
    return html.page(
        f"{sum(run['count'] for run in runs)} runs side by side",
        chips=[
            f"{VERDICTS[run['verdict']][0]} {run['label']}, {run['runtime']}d"
            for run in runs
        ],
        warnings=compared["warnings"],
        notice=clocks_text(compared["clocks"]) if compared["clocks"] else "",
        charts=list(plots(grouped)),
        first=figures_of(compared),
        sections=list(_other_sections(compared)),
    )


COURSES = (
    ("Loss over time", "loss", Axis("training loss")),
    # Disturbed steps would flatten the rest; their time is the recovery time above.
    ("Time per undisturbed step", "steps", Axis("time per step", "seconds")),
    ("Accuracy over time", "accuracy", Axis("accuracy", "share")),
    ("Latency over time", "latency", Axis("latency", "seconds")),
)
"""Titles of plots over time, with curve name and y axis."""


def plots(grouped: Mapping[str, Sequence[Run]]) -> Iterator[Chart]:
    """Yield title, note and plot of runs over time; limited to the first groups."""
    everyone = list(chain.from_iterable(grouped.values()))
    notes = [BAND] if len(everyone) > len(grouped) else []
    left_out = len(grouped) - len(STYLES)
    if left_out > 0:
        notes.append(f"{left_out} more are not drawn: choose with --series.")
    note = " ".join(notes)
    end = max(run.metrics["duration"] for run in everyone)
    for title, what, y in COURSES:
        lines = _mean_lines(grouped, what, over="seconds", steady=what == "steps")
        # One evaluation at the end is a figure and no curve.
        if any(len(line.points) > 1 or what != "accuracy" for line in lines):
            yield title, note, LinePlot(lines, range_=(0.0, end), y=y)
    recoveries = chain.from_iterable(run.metrics["recovery_list"] for run in everyone)
    steps = [item["step"] for item in recoveries if item["step"] is not None]
    if steps:
        # Around the first step that any run had to resume with.
        first, last = max(0, min(steps) - AROUND // 2), min(steps) + AROUND
        lines, y = (
            _mean_lines(grouped, "steps", begin=first, end=last),
            Axis("time per step", "seconds"),
        )
        yield (
            "Time per step around the fault",
            note,
            LinePlot(lines, range_=(first, last), x="step", y=y),
        )


def _mean_lines(
    grouped: Mapping[str, Sequence[Run]], what: str, **options: Any
) -> list[Line]:
    """Return the mean curve of each group with data."""
    lines = []
    for (label, runs), style in zip(grouped.items(), STYLES, strict=False):
        line = mean_line(label, [curve(run, what, **options) for run in runs], *style)
        if line.points:
            lines.append(line)
    return lines


def curve(
    run: Run,
    what: str,
    *,
    over: str = "steps",
    begin: float = 0.0,
    end: float = float("inf"),
    steady: bool = False,
) -> Points:
    """Return (x, value) of a run's steps in order: the time for `steps`, or the value named by `PaperChart.what`.

    ``over`` says whether x, from ``begin`` to ``end``, is the step or its seconds. A step that was done again is there
    as it was done last, so the outage is within the step resumed with. With ``steady``, only undisturbed steps.
    """
    table, key = {
        "steps": ("steps", "seconds"),
        "loss": ("steps", "loss"),
        "accuracy": ("evaluations", "accuracy"),
        "test_loss": ("evaluations", "loss"),
        "latency": ("requests", "latency"),
    }[what]
    rows = [
        row
        for row in run.metrics["series"][table]
        if row.get(key) is not None and (not steady or row["steady"])
    ]
    last = {row.get("step", number): row for number, row in enumerate(rows)}
    x = "step" if over == "steps" else "time"
    return sorted((row[x], row[key]) for row in last.values() if begin <= row[x] <= end)


def mean_line(
    name: str, curves: Sequence[Points], colour: str, dash: Dash = "solid"
) -> Line:
    """Return the mean of curves over their common x range, with its 95% confidence interval (Student).

    Curves that do not stand at the same x are read in between, linearly. Those without a point do not count.
    """
    some = [points for points in curves if points]
    if len(some) < 2:
        points = some[0] if some else []
        return Line(name, points, colour, dash, marks=len(points) <= FEW)
    arrays = [np.array(points) for points in some]
    low, high = max(each[0, 0] for each in arrays), min(each[-1, 0] for each in arrays)
    places = arrays[0][:, 0]
    places = places[(places >= low) & (places <= high)]
    places = places[:: math.ceil(len(places) / MOST_PLACES) or 1]
    values = np.column_stack(
        [np.interp(places, each[:, 0], each[:, 1]) for each in arrays]
    )
    means, halves = (
        zip(*map(interval, values.tolist()), strict=True) if len(places) else ((), ())
    )
    return Line(
        name,
        list(zip(places.tolist(), means, strict=True)),
        colour,
        dash,
        half_widths=halves,
    )
