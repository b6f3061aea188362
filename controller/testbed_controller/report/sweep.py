"""The page of a sweep or of repetitions: means with intervals, as plots over the swept keys and as a table.

``summary`` is the result of `testbed_controller.results.summary.summary_of`, and a point is an entry of its ``points``:
one combination of swept values, with the statistics of its repetitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.common.formats import MetricKind, Scale
from testbed.common.quantities import RATE_UNITS, on_one_scale
from testbed.scenario.points import point_text, short_keys, value_text
from testbed_controller.report import comparison, html, tables
from testbed_controller.report.charts import (
    STYLES,
    Axis,
    BarPlot,
    Bars,
    Chart,
    Line,
    LinePlot,
)
from testbed_controller.report.tables import Cell, Column, Section
from testbed_controller.report.terminal import report_location
from testbed_controller.results.comparison import side_by_side
from testbed_controller.results.run import Run

Point = Mapping[str, Any]
Headings = Mapping[str, str]
"""Heading of each shown metric by name, in the order of the columns."""


def write(folder: Path, summary: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Write ``sweep.html`` into the folder of the runs."""
    (folder / "sweep.html").write_text(render(summary, runs), encoding="utf-8")


def show(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print a sweep or a repeated run: one line per point, means with their confidence intervals.

    A table too wide for the terminal is divided into a table of the swept values of each numbered point, and tables of
    the metrics by the number of the point.
    """
    console.print(Text())
    for part in tables.split_wide(section(summary), "Point", console.width):
        console.print(tables.draw_section(part, console.width))
        if not part.title:
            console.print(Text())
    console.print(report_location(folder, "sweep.html"))


def render(summary: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    scenario = runs[0].trial.scenario
    points = summary["points"]
    plural = "" if len(points) == 1 else "s"
    return html.page(
        scenario.name,
        runs=runs,
        description=scenario.description,
        chips=[f"{len(points)} point{plural}", f"{len(runs)} runs"],
        charts=list(charts(summary, runs)),
        sections=[section(summary)],
    )


def section(summary: Mapping[str, Any], headings: Headings | None = None) -> Section:
    """Return a table with a row for each point: swept values, number of runs, and metrics.

    ``headings`` selects the metrics; by default the most important metrics are shown. All values of a column have the
    unit in its heading.
    """
    points = summary["points"]
    keys = _varying_keys(points) or list(points[0]["point"])
    metrics = []
    for name, heading in (headings or _default_headings(summary)).items():
        metrics.append(_MetricColumn.of(summary, name, heading))
    columns = [Column(head, "name") for head in short_keys(keys).values()]
    columns += tables.number_columns("Runs", *(metric.heading for metric in metrics))
    sort_keys = {key: _sort_keys(points, key) for key in keys}
    # The cells of a row have the order of the columns above.
    rows = []
    for number, point in enumerate(points):
        row = []
        for key in keys:
            row.append(Cell(_value_label(point, key), sort_key=sort_keys[key][number]))
        row.append(_runs_cell(point))
        row += [metric.cell(point) for metric in metrics]
        rows.append(row)
    brief = f"{len(points)} points, " if keys else ""
    brief += "mean ± half width of the 95% confidence interval (Student)"
    note = (
        "Mean ± half width of the 95% confidence interval (Student). Click on a heading to sort. summary.csv beside "
        "this file has all metrics; testbed export FOLDER --plots and --latex write plots and this table for papers."
    )
    return Section(
        summary["scenario"], note, brief, tuple(columns), rows, sortable=True
    )


def _sort_keys(points: Sequence[Point], key: str) -> Sequence[float | str]:
    """Return the sort key of each point on a page: the value of a key as a number, or else as text.

    As texts, ``100mbit`` would come before ``5mbit``.
    """
    numbers = _numeric_values(points, key)
    return numbers or [_value_label(point, key) for point in points]


def _runs_cell(point: Point) -> Cell:
    """Return the number of runs of a point, with a link to the report of each."""
    count = len(point["runs"])
    untrusted = count - point["trusted"]
    note = f"({untrusted} not trusted)" if untrusted else ""
    links = []
    for number, name in enumerate(point["runs"], 1):
        links.append((str(number), quote(f"{name}/report.html")))
    return Cell(str(count), note, sort_key=count, links=links)


@dataclass(frozen=True)
class _MetricColumn:
    """A metric as a table column, in the unit of the largest value."""

    name: str
    heading: str
    scale: Scale

    @classmethod
    def of(cls, summary: Mapping[str, Any], name: str, heading: str) -> _MetricColumn:
        means = []
        for point in summary["points"]:
            if name in point["metrics"]:
                means.append(point["metrics"][name]["mean"])
        scale = Scale.of(summary["metrics"][name]["kind"], means)
        return cls(name, scale.title(heading), scale)

    def cell(self, point: Point) -> Cell:
        metric = point["metrics"].get(self.name)
        if metric is None:
            return Cell(formats.NONE)
        half_width = metric["ci95"]
        note = "" if half_width is None else f"± {self.scale.write(half_width)}"
        return Cell(self.scale.write(metric["mean"]), note, sort_key=metric["mean"])


def choose_metrics(summary: Mapping[str, Any], selection: Sequence[str]) -> Headings:
    """Return the metrics given as ``NAME`` or ``NAME: HEADING``. Raises InputError for an unknown name."""
    headings = {}
    for text in selection:
        name, _, heading = text.partition(": ")
        if name not in summary["metrics"]:
            known = ", ".join(summary["metrics"])
            raise InputError(f"--metric: {name}: unknown metric; available: {known}")
        headings[name] = heading or _metric_heading(name)
    return headings


def _default_headings(summary: Mapping[str, Any]) -> Headings:
    """Return the metrics of brief summaries, which are the most important ones."""
    headings = {}
    for name, description in summary["metrics"].items():
        if description["brief"]:
            headings[name] = _metric_heading(name)
    return headings


def _metric_heading(name: str) -> str:
    words = name.replace("_", " ")
    return words[0].upper() + words[1:]


def charts(
    summary: Mapping[str, Any], runs: Sequence[Run], headings: Headings | None = None
) -> Iterator[Chart]:
    """Yield a chart of each metric over the sweep, and for few points the curves over time.

    ``headings`` selects the metrics and their titles, and omits the curves over time.
    """
    points = summary["points"]
    keys = _varying_keys(points)
    if len(points) > 1:
        for name, title in (headings or _default_headings(summary)).items():
            kind = summary["metrics"][name]["kind"]
            yield _sweep_chart(name, title, kind, points, keys)
    if headings is None and len(points) <= len(STYLES):
        yield from comparison.plots(side_by_side(runs))


def _varying_keys(points: Sequence[Point]) -> list[str]:
    """Return the swept keys with more than one value among the points."""
    # Points may have different keys, as in a scenario with a list of points.
    keys: dict[str, None] = {}
    for point in points:
        keys |= dict.fromkeys(point["point"])
    return [key for key in keys if len(_values_of(points, key)) > 1]


def _values_of(points: Sequence[Point], key: str) -> set[str]:
    return {_value_label(point, key) for point in points}


def _sweep_chart(
    name: str,
    title: str,
    kind: MetricKind,
    points: Sequence[Point],
    keys: Sequence[str],
) -> Chart:
    """Return a chart of a metric over one swept key, with a line for each combination of the other keys.

    The x axis has the numeric key with the most values. Without a numeric key, the chart has groups of bars.
    """
    numeric_keys = [key for key in keys if _numeric_values(points, key)]
    x_key = max(numeric_keys or keys, key=lambda key: len(_values_of(points, key)))
    dependent_keys = _dependent_keys(points, keys, x_key)
    # A key whose values change together with those of the x axis would give each line a single point.
    series_keys = [key for key in keys if key not in (x_key, *dependent_keys)]
    series: dict[str, list[Point]] = {}
    for point in points:
        series_values = {key: point["point"].get(key) for key in series_keys}
        label = point_text(series_values) or title
        series.setdefault(label, []).append(point)
    # A title chosen by the user is kept as written.
    axis_name = title
    if title == _metric_heading(name):
        axis_name = title[0].lower() + title[1:]
    make_plot = _line_plot if x_key in numeric_keys else _bar_plot
    plot = make_plot(name, x_key, points, series, Axis(axis_name, kind))
    return Chart(title, _chart_note(points, dependent_keys, len(series)), plot)


def _chart_note(
    points: Sequence[Point], dependent_keys: Sequence[str], series_count: int
) -> str:
    notes = []
    if any(len(point["runs"]) > 1 for point in points):
        notes.append("Mean; whiskers: 95% confidence interval.")
    if dependent_keys:
        names = ", ".join(_short_key(key) for key in dependent_keys)
        notes.append(f"Varied together: {names}.")
    if series_count > len(STYLES):
        notes.append(f"{series_count - len(STYLES)} more lines are in the table.")
    return " ".join(notes)


def _dependent_keys(
    points: Sequence[Point], keys: Sequence[str], x_key: str
) -> list[str]:
    """Return the keys other than ``x_key`` whose value is determined by the value of ``x_key`` at each point."""
    x_count = len(_values_of(points, x_key))
    dependent_keys = []
    for key in keys:
        pairs = set()
        for point in points:
            pairs.add((_value_label(point, x_key), _value_label(point, key)))
        # As many pairs as values of x: each value of x occurs with one value of the other key.
        if key != x_key and len(pairs) == x_count:
            dependent_keys.append(key)
    return dependent_keys


def _line_plot(
    name: str,
    key: str,
    points: Sequence[Point],
    series: Mapping[str, list[Point]],
    y: Axis,
) -> LinePlot:
    """Return a plot with a line for each series over the values of a numeric key, in one unit."""
    values, unit = _on_one_scale(points, key) or ([], "")
    labels = [_value_label(point, key) for point in points]
    x_of_label = dict(zip(labels, values, strict=True))
    lines = []
    for (label, members), style in zip(series.items(), STYLES, strict=False):
        statistics = []
        for point in members:
            metric = point["metrics"].get(name)
            if metric is not None:
                x = x_of_label[_value_label(point, key)]
                statistics.append((x, metric["mean"], metric["ci95"]))
        # A line needs its points in the order of x, not in the order of the scenario.
        statistics.sort()
        means = []
        half_widths = []
        for x, mean, half_width in statistics:
            means.append((x, mean))
            half_widths.append(half_width)
        if not any(half_widths):
            half_widths = []
        lines.append(
            Line(label, means, *style, mark_points=True, half_widths=half_widths)
        )
    # A scenario writes a rate as `10mbit`, and an axis needs the unit of a rate.
    if unit in RATE_UNITS:
        unit += "/s"
    title = f"{_short_key(key)} ({unit})" if unit else _short_key(key)
    return LinePlot(lines, x_range=(min(values), max(values)), x=title, y=y, swept=True)


def _bar_plot(
    name: str,
    key: str,
    points: Sequence[Point],
    series: Mapping[str, list[Point]],
    y: Axis,
) -> BarPlot:
    """Return a plot with a group of bars for each value of a key, and a bar in each group for each series."""
    groups = list(dict.fromkeys(_value_label(point, key) for point in points))
    bars = []
    for (label, members), style in zip(series.items(), STYLES, strict=False):
        statistics = {}
        for point in members:
            statistics[_value_label(point, key)] = point["metrics"].get(name, {})
        # A series may lack a group, whose place then stays empty.
        values = []
        half_widths = []
        for group in groups:
            row = statistics.get(group, {})
            values.append(row.get("mean"))
            half_widths.append(row.get("ci95"))
        colour, dash = style
        bars.append(Bars(label, values, colour, half_widths, dash))
    return BarPlot(groups, bars, x=_short_key(key), y=y)


def _numeric_values(points: Sequence[Point], key: str) -> list[float] | None:
    """Return the values of a key as numbers; None if not numeric."""
    scaled = _on_one_scale(points, key)
    return None if scaled is None else scaled[0]


def _on_one_scale(points: Sequence[Point], key: str) -> tuple[list[float], str] | None:
    """Return the values of a key as numbers in one unit, and the unit; None if not numeric."""
    return on_one_scale([point["point"].get(key) for point in points])


def _value_label(point: Point, key: str) -> str:
    return value_text(point["point"].get(key, "–"))


def _short_key(key: str) -> str:
    return short_keys([key])[key]
