"""The page of a sweep or of repetitions: its points as means with intervals, over what was swept, and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from controller.report import comparison
from controller.report.html import environment
from controller.report.plots import SERIES, Axis, Bars, Draw, Line, bar_plot, inline, line_plot
from controller.results.comparison import compare
from controller.results.run import Run, point_text, short_keys, value_text
from testbed.common import formats
from testbed.common.formats import FigureKind
from testbed.common.quantities import RATE_UNITS, on_one_scale

MOST_MARKED = 12
"""Places on the x axis that each have their figure."""

Point = Mapping[str, Any]


def write(folder: Path, summary: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """Write ``sweep.html`` into the folder of the runs."""
    (folder / "sweep.html").write_text(render(summary, runs), encoding="utf-8")


def render(summary: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the page; ``summary`` is that of `controller.results.summary` over these runs."""
    points = summary["points"]
    keys = _keys(points)
    figures = {name: about for name, about in summary["figures"].items() if about["brief"]}
    scenario = runs[0].trial.scenario
    orders: list[Sequence[float | str]] = [
        _places(points, key) or [_text(point, key) for point in points] for key in keys
    ]
    runtimes = sorted({run.outcome.runtime for run in runs})
    return (
        environment()
        .get_template("sweep.html")
        .render(
            scenario=scenario,
            chips=[
                f"{len(points)} point{'' if len(points) == 1 else 's'}",
                f"{len(runs)} runs",
                *(f"{name}d" for name in runtimes),
            ],
            charts=[(title, note, inline(plot, title)) for title, note, plot in charts(summary, runs)],
            keys=list(short_keys(keys).values()),
            figures=[name.replace("_", " ") for name in figures],
            rows=[_row(point, order, keys, figures) for point, *order in zip(points, *orders, strict=True)],
            version=runs[0].manifest["versions"]["testbed"],
            date=max(run.manifest["date"] for run in runs),
        )
    )


def _row(
    point: Point, places: Sequence[float | str], keys: Sequence[str], figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the cells of a point, each with what it is sorted by, and its runs with their pages."""
    cells = [(place, _text(point, key), "") for place, key in zip(places, keys, strict=True)]
    for name, about in figures.items():
        found = point["figures"].get(name, {"mean": None, "ci95": None})
        mean, half = (formats.of_kind(about["kind"], found[part]) for part in ("mean", "ci95"))
        place = "" if found["mean"] is None else found["mean"]
        cells.append((place, mean, "" if found["ci95"] is None else f"± {half}"))
    runs = [(number, quote(f"{name}/report.html")) for number, name in enumerate(point["runs"], 1)]
    return {"cells": cells, "runs": runs, "doubtful": len(runs) - point["trusted"]}


def charts(summary: Mapping[str, Any], runs: Sequence[Run]) -> Iterator[tuple[str, str, Draw]]:
    """Yield (title, note, plot) of the figures that runs are compared by, and of what few points went through."""
    points = summary["points"]
    keys = _keys(points)
    for name, about in summary["figures"].items():
        if about["brief"] and len(points) > 1:
            yield _over(name, about["kind"], points, keys)
    if len(points) <= len(SERIES):
        yield from comparison.plots(runs, compare(runs))


def _keys(points: Sequence[Point]) -> list[str]:
    """Return the keys that differ from point to point."""
    keys = dict.fromkeys(key for point in points for key in point["point"])
    return [key for key in keys if len({_text(point, key) for point in points}) > 1]


def _over(name: str, kind: FigureKind, points: Sequence[Point], keys: Sequence[str]) -> tuple[str, str, Draw]:
    """Draw a figure over the key with most numbers, a line for each value of the others; over words as bars."""
    numbers = [key for key in keys if _places(points, key)]
    chosen = max(numbers or keys, key=lambda key: len({_text(point, key) for point in points}))
    along = _along(points, keys, chosen)
    others = [key for key in keys if key != chosen and key not in along]
    series: dict[str, list[Point]] = {}
    for point in points:
        label = point_text({key: point["point"].get(key) for key in others})
        series.setdefault(label or name.replace("_", " "), []).append(point)
    left_out = max(0, len(series) - len(SERIES))
    note = "Mean; whiskers: 95% confidence interval." if any(len(point["runs"]) > 1 for point in points) else ""
    note += f" Along with it: {', '.join(map(_short, along))}." if along else ""
    note += f" {left_out} more lines are in the table." if left_out else ""
    title = name.replace("_", " ")
    draw = _lines if chosen in numbers else _bars
    return title[0].upper() + title[1:], note.strip(), draw(name, chosen, points, series, Axis(title, kind))


def _along(points: Sequence[Point], keys: Sequence[str], chosen: str) -> list[str]:
    """Return the other keys whose values change with those of the chosen one, never by themselves."""
    values = {_text(point, chosen) for point in points}
    pairs = {key: {(_text(point, chosen), _text(point, key)) for point in points} for key in keys if key != chosen}
    return [key for key, found in pairs.items() if len(found) == len(values)]


def _lines(name: str, key: str, points: Sequence[Point], series: Mapping[str, list[Point]], y: Axis) -> Draw:
    values, unit = on_one_scale([point["point"].get(key) for point in points]) or ([], "")
    place = dict(zip((_text(point, key) for point in points), values, strict=True))
    lines = []
    for (label, some), colour in zip(series.items(), SERIES, strict=False):
        found = sorted(
            (place[_text(point, key)], point["figures"][name]["mean"], point["figures"][name]["ci95"])
            for point in some
            if name in point["figures"]
        )
        halves = [half for *_, half in found]
        drawn = [(x, mean) for x, mean, _ in found]
        lines.append(Line(label, drawn, colour, marks=True, half_widths=halves if any(halves) else ()))
    at = sorted(set(values))
    unit += "/s" if unit in RATE_UNITS else ""
    x = f"{_short(key)} ({unit})" if unit else _short(key)
    return partial(line_plot, lines, range_=(at[0], at[-1]), x=x, y=y, at=at if len(at) <= MOST_MARKED else None)


def _bars(name: str, key: str, points: Sequence[Point], series: Mapping[str, list[Point]], y: Axis) -> Draw:
    groups = list(dict.fromkeys(_text(point, key) for point in points))
    kinds = []
    for (label, some), colour in zip(series.items(), SERIES, strict=False):
        found = {_text(point, key): point["figures"].get(name, {}) for point in some}
        rows = [found.get(group, {}) for group in groups]
        kinds.append(Bars(label, [row.get("mean") for row in rows], colour, [row.get("ci95") for row in rows]))
    return partial(bar_plot, groups, kinds, x=_short(key), y=y)


def _places(points: Sequence[Point], key: str) -> list[float] | None:
    """Return the values of a key as numbers, None where they are none."""
    found = on_one_scale([point["point"].get(key) for point in points])
    return None if found is None else found[0]


def _text(point: Point, key: str) -> str:
    return value_text(point["point"].get(key, "–"))


def _short(key: str) -> str:
    return short_keys([key])[key]
