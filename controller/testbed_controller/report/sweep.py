"""The page of a sweep or of repetitions: means with intervals, as plots over the swept keys and as a table."""

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
from testbed_controller.report.terminal import where
from testbed_controller.results.comparison import side_by_side
from testbed_controller.results.run import Run

Point = Mapping[str, Any]
Names = Mapping[str, str]
"""Metrics and their headings, in the order of the columns."""


def write(folder: Path, summary: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Write ``sweep.html`` into the folder of the runs."""
    (folder / "sweep.html").write_text(render(summary, runs), encoding="utf-8")


def show(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print a sweep or a repeated run: a line a point, means with their confidence intervals."""
    console.print(
        Text(),
        tables.draw(section(summary), console.width),
        where(folder, "sweep.html"),
    )


def render(summary: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Render the page; ``summary`` is the result of `testbed_controller.results.summary` for these runs."""
    points = summary["points"]
    return html.page(
        runs[0].trial.scenario.name,
        runs=runs,
        lead=runs[0].trial.scenario.description,
        chips=[
            f"{len(points)} point{'' if len(points) == 1 else 's'}",
            f"{len(runs)} runs",
        ],
        charts=list(charts(summary, runs)),
        sections=[section(summary)],
    )


def section(summary: Mapping[str, Any], names: Names | None = None) -> Section:
    """Return a row for each point: swept values, metrics, and runs.

    ``names`` chooses the metrics and their headings; by default the most important metrics are shown. All values of a
    column have one unit, which its heading names.
    """
    points = summary["points"]
    keys = _varying_keys(points) or list(points[0]["point"])
    headings = names or _default_names(summary)
    metrics = [
        _MetricColumn.of(summary, name, heading) for name, heading in headings.items()
    ]
    places: list[Sequence[float | str]] = [
        _numeric_places(points, key) or [_value_label(point, key) for point in points]
        for key in keys
    ]
    columns = (
        *(Column(head, "name") for head in short_keys(keys).values()),
        *tables.figures("Runs", *(metric.heading for metric in metrics)),
    )
    rows = [
        [
            *(
                Cell(_value_label(point, key), order=place[number])
                for key, place in zip(keys, places, strict=True)
            ),
            _runs_cell(point),
            *(metric.cell(point) for metric in metrics),
        ]
        for number, point in enumerate(points)
    ]
    brief = f"{len(points)} points, " if keys else ""
    brief += "mean ± half width of the 95% confidence interval (Student)"
    note = (
        "Mean ± half width of the 95% confidence interval (Student). A click on a heading sorts. summary.csv beside "
        "this file has all figures; testbed export FOLDER --plots and --latex write plots and this table for papers."
    )
    return Section(summary["scenario"], note, brief, columns, rows, sortable=True)


def _runs_cell(point: Point) -> Cell:
    count = len(point["runs"])
    doubtful = (
        f"({count - point['trusted']} not trusted)" if point["trusted"] < count else ""
    )
    links = [
        (str(number), quote(f"{name}/report.html"))
        for number, name in enumerate(point["runs"], 1)
    ]
    return Cell(str(count), doubtful, order=count, links=links)


@dataclass(frozen=True)
class _MetricColumn:
    """A metric as a table column, in the unit of its largest value."""

    name: str
    heading: str
    scale: Scale

    @classmethod
    def of(cls, summary: Mapping[str, Any], name: str, heading: str) -> _MetricColumn:
        means = [
            point["figures"][name]["mean"]
            for point in summary["points"]
            if name in point["figures"]
        ]
        scale = Scale.of(summary["figures"][name]["kind"], means)
        return cls(name, scale.title(heading), scale)

    def cell(self, point: Point) -> Cell:
        metric = point["figures"].get(self.name)
        if metric is None:
            return Cell(formats.NONE)
        half = metric["ci95"]
        note = "" if half is None else f"± {self.scale.write(half)}"
        return Cell(self.scale.write(metric["mean"]), note, order=metric["mean"])


def choose_metrics(summary: Mapping[str, Any], chosen: Sequence[str]) -> Names:
    """Return the metrics given as ``NAME`` or ``NAME: HEADING``. Raises InputError for an unknown name."""
    names = {}
    for text in chosen:
        name, _, heading = text.partition(": ")
        if name not in summary["figures"]:
            raise InputError(
                f"--metric: {name}: unknown metric; available: {', '.join(summary['figures'])}"
            )
        names[name] = heading or _metric_heading(name)
    return names


def _default_names(summary: Mapping[str, Any]) -> Names:
    return {
        name: _metric_heading(name)
        for name, about in summary["figures"].items()
        if about["brief"]
    }


def _metric_heading(name: str) -> str:
    words = name.replace("_", " ")
    return words[0].upper() + words[1:]


def charts(
    summary: Mapping[str, Any], runs: Sequence[Run], names: Names | None = None
) -> Iterator[Chart]:
    """Yield (title, note, plot) of each metric over the sweep, and of the courses of few points over time.

    ``names`` chooses the metrics and their titles, without the courses over time.
    """
    points = summary["points"]
    keys = _varying_keys(points)
    for name, title in (names or _default_names(summary)).items():
        if len(points) > 1:
            yield _chart_over(
                name, title, summary["figures"][name]["kind"], points, keys
            )
    if names is None and len(points) <= len(STYLES):
        yield from comparison.plots(side_by_side(runs))


def _varying_keys(points: Sequence[Point]) -> list[str]:
    """Return the keys with varying values."""
    keys = dict.fromkeys(key for point in points for key in point["point"])
    return [
        key for key in keys if len({_value_label(point, key) for point in points}) > 1
    ]


def _chart_over(
    name: str,
    title: str,
    kind: MetricKind,
    points: Sequence[Point],
    keys: Sequence[str],
) -> Chart:
    """Draw a figure over the key with most numbers, a line for each value of the others; over words as bars."""
    numbers = [key for key in keys if _numeric_places(points, key)]
    chosen = max(
        numbers or keys,
        key=lambda key: len({_value_label(point, key) for point in points}),
    )
    along = _dependent_keys(points, keys, chosen)
    others = [key for key in keys if key not in (chosen, *along)]
    series: dict[str, list[Point]] = {}
    for point in points:
        label = point_text({key: point["point"].get(key) for key in others})
        series.setdefault(label or title, []).append(point)
    notes = []
    if any(len(point["runs"]) > 1 for point in points):
        notes.append("Mean; whiskers: 95% confidence interval.")
    if along:
        notes.append(f"Along with it: {', '.join(map(_short_key, along))}.")
    if len(series) > len(STYLES):
        notes.append(f"{len(series) - len(STYLES)} more lines are in the table.")
    draw = _line_chart if chosen in numbers else _bar_chart
    axis = Axis(
        title[0].lower() + title[1:] if title == _metric_heading(name) else title, kind
    )
    return title, " ".join(notes), draw(name, chosen, points, series, axis)


def _dependent_keys(
    points: Sequence[Point], keys: Sequence[str], chosen: str
) -> list[str]:
    """Return the other keys whose values always change together with the chosen one."""
    values = {_value_label(point, chosen) for point in points}
    pairs = {
        key: {
            (_value_label(point, chosen), _value_label(point, key)) for point in points
        }
        for key in keys
        if key != chosen
    }
    return [
        key for key, combinations in pairs.items() if len(combinations) == len(values)
    ]


def _line_chart(
    name: str,
    key: str,
    points: Sequence[Point],
    series: Mapping[str, list[Point]],
    y: Axis,
) -> LinePlot:
    values, unit = on_one_scale([point["point"].get(key) for point in points]) or (
        [],
        "",
    )
    place = dict(
        zip((_value_label(point, key) for point in points), values, strict=True)
    )
    lines = []
    for (label, some), style in zip(series.items(), STYLES, strict=False):
        ordered = sorted(
            (
                place[_value_label(point, key)],
                point["figures"][name]["mean"],
                point["figures"][name]["ci95"],
            )
            for point in some
            if name in point["figures"]
        )
        halves = [half for *_, half in ordered]
        drawn = [(x, mean) for x, mean, _ in ordered]
        lines.append(
            Line(
                label,
                drawn,
                *style,
                marks=True,
                half_widths=halves if any(halves) else (),
            )
        )
    unit += "/s" if unit in RATE_UNITS else ""
    x = f"{_short_key(key)} ({unit})" if unit else _short_key(key)
    return LinePlot(lines, range_=(min(values), max(values)), x=x, y=y, swept=True)


def _bar_chart(
    name: str,
    key: str,
    points: Sequence[Point],
    series: Mapping[str, list[Point]],
    y: Axis,
) -> BarPlot:
    groups = list(dict.fromkeys(_value_label(point, key) for point in points))
    kinds = []
    for (label, some), style in zip(series.items(), STYLES, strict=False):
        statistics = {
            _value_label(point, key): point["figures"].get(name, {}) for point in some
        }
        rows = [statistics.get(group, {}) for group in groups]
        values, halves = (
            [row.get("mean") for row in rows],
            [row.get("ci95") for row in rows],
        )
        kinds.append(Bars(label, values, style[0], halves, style[1]))
    return BarPlot(groups, kinds, x=_short_key(key), y=y)


def _numeric_places(points: Sequence[Point], key: str) -> list[float] | None:
    """Return the values of a key as numbers; None if not numeric."""
    scaled = on_one_scale([point["point"].get(key) for point in points])
    return None if scaled is None else scaled[0]


def _value_label(point: Point, key: str) -> str:
    return value_text(point["point"].get(key, "–"))


def _short_key(key: str) -> str:
    return short_keys([key])[key]
