"""Presentation of a comparison of runs, on the terminal and as an HTML page, and the mean curves of repetitions.

The comparison itself is computed by `testbed_controller.results.comparison`: ``grouped`` are the runs by label, and
``compared`` is the result of its function `compare`.
"""

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
    MAX_MARKED_POINTS,
    STYLES,
    Axis,
    Chart,
    Dash,
    Line,
    LinePlot,
)
from testbed_controller.report.tables import (
    BAR_ACTIVITIES,
    Cell,
    Column,
    Section,
    draw_section,
    number_columns,
)
from testbed_controller.report.terminal import VERDICT_SIGNS
from testbed_controller.results.run import Run

BAND_NOTE = "Mean of the repetitions; pale band: 95% confidence interval."
RATIO_NOTE = "×: ratio to the first column"
MAX_MEAN_POINTS = 200
"""Maximum number of points at which a mean is drawn; more are indistinguishable."""
HEADING_WIDTH = 24
"""Maximum number of characters in a line of a column heading."""
STEPS_AFTER_FAULT = 20
"""Number of steps drawn after the first step that any run resumed; half as many are drawn before this step."""
Points = list[tuple[float, float]]
"""Points (x, value) of a curve."""


def show(console: Console, compared: Mapping[str, Any]) -> None:
    """Print a comparison: the metrics of all groups, the agreement of both runtimes, and warnings."""
    console.print(draw_section(metrics_of(compared), console.width))
    if compared["clocks"]:
        style = "green" if compared["clocks"]["agree"] else "yellow"
        console.print(Text("  " + clocks_text(compared["clocks"]), style=style))
    for warning in compared["warnings"]:
        console.print(Text(f"  ! {warning}", style="yellow"))


def metrics_of(compared: Mapping[str, Any]) -> Section:
    """Return a table with a row for each metric, and a column for each run or group of repetitions."""
    rows = [_metric_row(row) for row in compared["metrics"]]
    note = "Small print: ratio to the first column."
    brief = RATIO_NOTE
    if any(run["count"] > 1 for run in compared["runs"]):
        mean_note = "mean ± half width of the 95% confidence interval (Student)"
        note += f" Values of several runs: {mean_note}."
        brief = f"{mean_note}; {RATIO_NOTE}"
    columns = _table_columns("Metric", compared)
    return Section("Runs side by side", note, brief, columns, rows)


def _metric_row(row: Mapping[str, Any]) -> list[Cell]:
    """Return the cells of one metric, all in one unit."""
    scale = Scale.of(row["kind"], row["values"])
    cells = [Cell(scale.title(row["name"].replace("_", " ")), hint=row["about"])]
    for number, value in enumerate(row["values"]):
        cells.append(Cell(scale.write(value), _cell_note(row, number, scale)))
    return cells


def _cell_note(row: Mapping[str, Any], number: int, scale: Scale) -> str:
    """Return the half width of a metric's interval, and the ratio to the first column; empty if both are unknown."""
    half_width = row["half_widths"][number]
    ratio = row["ratios"][number]
    parts = []
    if half_width:
        parts.append(f"± {scale.write(half_width)}")
    # In the first column, the ratio is always 1.
    if number > 0 and ratio is not None:
        parts.append(formats.ratio(ratio))
    return " ".join(parts)


def _table_columns(first: str, compared: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return a column with heading ``first``, and one per group headed by label, runtime, verdict and run count."""
    headings = []
    for run in compared["runs"]:
        lines = []
        for part in run["label"].split(","):
            lines += textwrap.wrap(part, HEADING_WIDTH) or [""]
        sign, _ = VERDICT_SIGNS[run["verdict"]]
        # Non-breaking spaces keep the sign and the count in the line of the runtime.
        last = f"{run['runtime']}d\u00a0{sign}"
        if run["count"] > 1:
            last += f"\u00a0×\u00a0{run['count']}"
        headings.append("\n".join([*lines, last]))
    return Column(first, "name"), *number_columns(*headings)


def _other_sections(compared: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections of the page besides the metrics."""
    rows = []
    for name, shares in compared["devices"].items():
        rows.append([Cell(name), *map(_share_cell, shares)])
    note = "Share of the run in which a device computes / communicates without computing; red: down."
    yield Section("Devices", note, "", _table_columns("Device", compared), rows)
    if compared["differences"]:
        rows = []
        for key, values in compared["differences"].items():
            row = [Cell(key)]
            for value in values:
                row.append(Cell("–" if value is None else str(value)))
            rows.append(row)
        columns = _table_columns("Key", compared)
        yield Section("Differences between the scenarios", "", "", columns, rows)


def _share_cell(share: Mapping[str, float] | None) -> Cell:
    if share is None:
        return Cell("–")
    text = " / ".join(formats.whole_share(share[kind]) for kind in BAR_ACTIVITIES[:2])
    return Cell(text, shares=share)


def clocks_text(clocks: Mapping[str, Any]) -> str:
    """Describe the agreement of both runtimes."""
    metric = clocks["metric"].replace("_", " ")
    verb = "agree" if clocks["agree"] else "do not agree"
    emulated = formats.seconds(clocks["emulated"])
    simulated = formats.seconds(clocks["simulated"])
    return (
        f"emulated and simulated {verb}: {metric} {emulated} against {simulated}, "
        f"{clocks['ratio'] - 1:+.1%}"
    )


def render(grouped: Mapping[str, Sequence[Run]], compared: Mapping[str, Any]) -> str:
    """Return a comparison as one self-contained HTML page."""
    runs = compared["runs"]
    chips = []
    for run in runs:
        sign, _ = VERDICT_SIGNS[run["verdict"]]
        chips.append(f"{sign} {run['label']}, {run['runtime']}d")
    return html.page(
        f"{sum(run['count'] for run in runs)} runs side by side",
        chips=chips,
        warnings=compared["warnings"],
        notice=clocks_text(compared["clocks"]) if compared["clocks"] else "",
        charts=list(plots(grouped)),
        top_section=metrics_of(compared),
        sections=list(_other_sections(compared)),
    )


CURVES = (
    ("Loss over time", "loss", Axis("training loss")),
    # Disturbed steps take so long that all others would look alike; the recovery time is a metric of its own.
    ("Time per undisturbed step", "steps", Axis("time per step", "seconds")),
    ("Accuracy over time", "accuracy", Axis("accuracy", "share")),
    ("Latency over time", "latency", Axis("latency", "seconds")),
)
"""Title, name in `curve` and y axis of each plot over time."""


def plots(grouped: Mapping[str, Sequence[Run]]) -> Iterator[Chart]:
    """Yield the charts of runs over time, with a line for each group, up to the number of line styles."""
    runs = list(chain.from_iterable(grouped.values()))
    notes = [BAND_NOTE] if len(runs) > len(grouped) else []
    left_out = len(grouped) - len(STYLES)
    if left_out > 0:
        notes.append(f"{left_out} more are not drawn: select with --series.")
    note = " ".join(notes)
    end = max(run.metrics["duration"] for run in runs)
    for title, name, y in CURVES:
        lines = _mean_lines(grouped, name, x_axis="seconds", steady=name == "steps")
        # A single evaluation at the end of a run is a value, not a curve.
        has_curve = any(len(line.points) > 1 for line in lines)
        if lines and (has_curve or name != "accuracy"):
            yield Chart(title, note, LinePlot(lines, x_range=(0.0, end), y=y))
    resumed_steps = []
    for run in runs:
        for recovery in run.metrics["recovery_list"]:
            if recovery["step"] is not None:
                resumed_steps.append(recovery["step"])
    if resumed_steps:
        first_resumed = min(resumed_steps)
        begin = max(0, first_resumed - STEPS_AFTER_FAULT // 2)
        end_step = first_resumed + STEPS_AFTER_FAULT
        lines = _mean_lines(grouped, "steps", begin=begin, end=end_step)
        y = Axis("time per step", "seconds")
        plot = LinePlot(lines, x_range=(begin, end_step), x="step", y=y)
        yield Chart("Time per step around the fault", note, plot)


def _mean_lines(
    grouped: Mapping[str, Sequence[Run]], name: str, **options: Any
) -> list[Line]:
    """Return the mean curve of each group with data; ``options`` are passed to `curve`."""
    lines = []
    for (label, runs), style in zip(grouped.items(), STYLES, strict=False):
        line = mean_line(label, [curve(run, name, **options) for run in runs], *style)
        if line.points:
            lines.append(line)
    return lines


def curve(
    run: Run,
    name: str,
    *,
    x_axis: str = "steps",
    begin: float = 0.0,
    end: float = float("inf"),
    steady: bool = False,
) -> Points:
    """Return the points (x, value) of a curve of a run, in order.

    ``name`` is ``steps`` (the time of each step in seconds), ``loss``, ``accuracy``, ``test_loss`` or ``latency``. x is
    the step, or with ``x_axis="seconds"`` the time of the run; only points from ``begin`` to ``end`` are returned. Of a
    step that was repeated after a fault, the last execution counts, so that the outage is part of the step that resumed
    the work. ``steady`` selects undisturbed steps.
    """
    series, key = _SERIES_OF[name]
    last_rows = {}
    number = 0
    for row in run.metrics["series"][series]:
        if row.get(key) is None or (steady and not row["steady"]):
            continue
        # Rows without a step, such as requests, are numbered instead.
        last_rows[row.get("step", number)] = row
        number += 1
    x_key = "step" if x_axis == "steps" else "time"
    points = []
    for row in last_rows.values():
        x = row[x_key]
        if begin <= x <= end:
            points.append((x, row[key]))
    return sorted(points)


_SERIES_OF = {
    "steps": ("steps", "seconds"),
    "loss": ("steps", "loss"),
    "accuracy": ("evaluations", "accuracy"),
    "test_loss": ("evaluations", "loss"),
    "latency": ("requests", "latency"),
}
"""Name of a curve -> series of `metrics.json`, and the key of its values."""


def mean_line(
    name: str, curves: Sequence[Points], colour: str, dash: Dash = "solid"
) -> Line:
    """Return the mean of curves over their common x range, with the 95% confidence interval (Student).

    The x values are those of the first curve; the other curves are interpolated linearly. Empty curves are ignored.

    >>> line = mean_line("loss", [[(0, 1.0), (1, 0.5)], [(0, 3.0), (1, 1.5)]], "blue")
    >>> line.points
    [(0.0, 2.0), (1.0, 1.0)]
    """
    non_empty = [points for points in curves if points]
    if len(non_empty) < 2:
        points = non_empty[0] if non_empty else []
        has_marks = len(points) <= MAX_MARKED_POINTS
        return Line(name, points, colour, dash, mark_points=has_marks)
    # Shape of each array: (points, 2), with x and value.
    arrays = [np.array(points) for points in non_empty]
    low = max(each[0, 0] for each in arrays)
    high = min(each[-1, 0] for each in arrays)
    xs = arrays[0][:, 0]
    xs = xs[(xs >= low) & (xs <= high)]
    # At least 1, also if the curves have no common range.
    stride = math.ceil(len(xs) / MAX_MEAN_POINTS) or 1
    xs = xs[::stride]
    # Values of each curve at all xs.
    sampled = [np.interp(xs, each[:, 0], each[:, 1]).tolist() for each in arrays]
    points = []
    half_widths = []
    for x, values in zip(xs.tolist(), zip(*sampled, strict=True), strict=True):
        mean, half_width = interval(list(values))
        points.append((x, mean))
        half_widths.append(half_width)
    return Line(name, points, colour, dash, half_widths=half_widths)
