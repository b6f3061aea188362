"""What a scenario says of a publication's figures: which runs rows and charts are about, and whether there are such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from testbed.common.conditions import parse_condition, parse_target
from testbed.common.errors import Diagnostic, Key, nearest
from testbed.common.formats import FigureKind
from testbed.scenario.points import plain_value
from testbed.scenario.schema import PaperChart, PaperPart, PaperRow, PaperSeries
from testbed.trace.figures import Figure
from testbed.trace.registry import OF_DEVICES, kind_of

PLAN = "plan."
"""Prefix of figures that the plan holds."""
_NOTHING = object()


def is_at(point: Mapping[str, Any], at: Mapping[str, Any]) -> bool:
    """Say whether a point of a sweep has these values; keys may lie inside of what is swept."""
    return all(_value(point, key) == value for key, value in at.items())


def _value(point: Mapping[str, Any], key: str) -> object:
    if key in point:
        return plain_value(point[key])
    for swept, labelled in point.items():
        value = plain_value(labelled)
        if key.startswith(f"{swept}.") and isinstance(value, Mapping):
            return _value(value, key.removeprefix(f"{swept}."))
    return _NOTHING


def row_kind(row: PaperRow, figures: Mapping[str, Figure]) -> FigureKind:
    """Return what a row's value is measured in; raises KeyError for a figure that is none of the runs'."""
    if row.over is not None or row.over_figure is not None:
        return "number"
    if row.figure.startswith(PLAN):
        return "bytes" if row.figure.endswith("_bytes") else "number"
    return kind_of(row.figure, figures)


def paper_value(row: PaperRow, kind: FigureKind) -> float | None:
    """Return the paper's figure, of that kind, in base units; raises ValueError saying what would be right."""
    if row.value is None:
        return None
    value = parse_target(str(row.value), kind)
    if isinstance(value, str | bool):
        raise ValueError(f"'{row.value}' is no number")
    return value


def problems(part: PaperPart | None, points: Sequence[Mapping[str, Any]] | None) -> Iterator[Diagnostic]:
    """Yield what is wrong with rows and charts, given all points of the scenario, if it has any."""
    for index, row in enumerate(part.rows if part else ()):
        if row.claim == "ranking" and row.over is None and row.over_figure is None and row.minus is None:
            text = "'ranking' says which of two is larger: give `over`, `over_figure` or `minus`"
            yield Diagnostic(("paper", "rows", index, "claim"), text)
        if row.minus is not None and (row.over is not None or row.over_figure is not None):
            text = "a figure is divided by another or less another, not both: leave one out"
            yield Diagnostic(("paper", "rows", index, "minus"), text)
        for name in ("at", "over", "minus"):
            wanted = getattr(row, name)
            if wanted and points is not None and not any(is_at(point, wanted) for point in points):
                shown = ", ".join(f"{inner}: {value}" for inner, value in wanted.items())
                key: Key = ("paper", "rows", index, name)
                yield Diagnostic(key, f"no point of the sweep has {shown}: name values that are swept")
    for index, chart in enumerate(part.charts if part else ()):
        yield from _chart_problems(chart, part.rows if part else (), points, ("paper", "charts", index))


def figure_problems(
    part: PaperPart | None, point: Mapping[str, Any], figures: Mapping[str, Figure]
) -> Iterator[Diagnostic]:
    """Yield what is wrong with the figures that rows ask of the run at a point, given those that the run has."""
    for index, row in enumerate(part.rows if part else ()):
        if not any(is_at(point, wanted) for wanted in (row.at, row.over, row.minus) if wanted is not None):
            continue
        key: Key = ("paper", "rows", index)
        wrong = [item for name in ("figure", "over_figure") for item in _figure_problems(row, name, key, figures)]
        yield from wrong or _value_problems(row, key, figures)
    for index, chart in enumerate(part.charts if part else ()):
        drawn = {name for series in chart.series for name in series.rows}
        rows = [row for row in part.rows if row.name in drawn] if part else []
        # Rows about other points may be about figures that this run does not have.
        kinds = {kind for row in rows if (kind := _kind_or_none(row, figures)) is not None}
        if len(kinds) > 1:
            text = f"one axis cannot show {' and '.join(sorted(kinds))}: make a chart of each"
            yield Diagnostic(("paper", "charts", index, "series"), text)


def _chart_problems(
    chart: PaperChart, rows: Sequence[PaperRow], points: Sequence[Mapping[str, Any]] | None, key: Key
) -> Iterator[Diagnostic]:
    if chart.of_runs:
        for number, series in enumerate(chart.series):
            yield from _point_problems(series, points, (*key, "series", number))
        return
    numbers = [x for x in chart.x if isinstance(x, float)]
    rising = len(numbers) == len(chart.x) and all(one < two for one, two in pairwise(numbers))
    if not chart.x or (chart.what == "lines" and not rising):
        wanted = "rising numbers, such as [1, 2, 4]" if chart.what == "lines" else "a word for each of a series' rows"
        yield Diagnostic((*key, "x"), f"says where the rows stand: write {wanted}")
    known = {row.name: row for row in rows}
    for number, series in enumerate(chart.series):
        place: Key = (*key, "series", number, "rows")
        if len(series.rows) != len(chart.x):
            yield Diagnostic(place, f"names {len(series.rows)} rows for {len(chart.x)} of `x`: name one for each")
        for name in series.rows:
            if name not in known:
                yield Diagnostic(place, f"there is no row '{name}': {nearest(name, list(known))}")


def _point_problems(series: PaperSeries, points: Sequence[Mapping[str, Any]] | None, key: Key) -> Iterator[Diagnostic]:
    if series.rows:
        yield Diagnostic((*key, "rows"), "belongs to lines and bars: name the point of the sweep with `at`")
    found = 1 if points is None else sum(is_at(point, series.at) for point in points)
    if found != 1:
        shown = ", ".join(f"{inner}: {value}" for inner, value in series.at.items()) or "no value"
        yield Diagnostic((*key, "at"), f"{found} points of the sweep have {shown}: name values that one of them has")


def _kind_or_none(row: PaperRow, figures: Mapping[str, Figure]) -> FigureKind | None:
    """Return what a row's value is measured in; None for a figure that there is not."""
    try:
        return row_kind(row, figures)
    except KeyError:
        return None


def _figure_problems(row: PaperRow, name: str, key: Key, figures: Mapping[str, Figure]) -> Iterator[Diagnostic]:
    figure = getattr(row, name)
    if figure is None or figure.startswith(PLAN):
        return
    try:
        kind = kind_of(figure, figures)
    except KeyError:
        text = f"there is no figure '{figure}': {nearest(figure.rpartition('.')[2], [*figures, *OF_DEVICES])}"
        yield Diagnostic((*key, name), f"{text}; what the plan holds is called {PLAN}<key>")
    else:
        if kind in ("bool", "text"):
            yield Diagnostic((*key, name), f"'{figure}' is no number: name a figure that can be compared by size")


def _value_problems(row: PaperRow, key: Key, figures: Mapping[str, Figure]) -> Iterator[Diagnostic]:
    kind = row_kind(row, figures)
    try:
        paper_value(row, kind)
    except ValueError as error:
        yield Diagnostic((*key, "value"), str(error))
    try:
        if row.expect is not None:
            parse_condition(row.expect, kind)
    except ValueError as error:
        yield Diagnostic((*key, "expect"), str(error))
