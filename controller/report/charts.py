"""Line charts as inline SVG whose colours come from the page's style sheet, so that they follow its colour scheme."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 28, 36
MOST_POINTS = 1500
"""Points drawn per line: more than pixels across add weight, not detail."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: (x, y) in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    """CSS class."""
    marks: bool = False
    """Draw a dot at every point, for few of them."""
    joined: bool = True
    """Join the points."""


@dataclass(frozen=True)
class Window:
    """A stretch of x to be shaded."""

    start: float
    end: float
    label: str
    style: str = "fault"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about so many as wanted."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    # Multiples, not running sums: those drift away from round numbers.
    return [(first + index) * step for index in range(count)]


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points, keeping the lowest and the highest of every stretch."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    size = math.ceil(len(finite) / (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(finite), size):
        stretch = finite[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 2)


def line_chart(
    lines: Sequence[Line],
    windows: Sequence[Window],
    *,
    end: float,
    title: str,
    write: Callable[[float], str],
    top: float | None = None,
    begin: float = 0.0,
    unit: str = "seconds",
) -> Markup:
    """Draw lines over the seconds of a run, or whatever ``unit`` is, from ``begin`` to ``end``, windows behind them.

    The y axis begins at 0 and ends at ``top``, or above the highest point; ``write`` formats its figures.
    """
    drawn = [(line, thin(line.points)) for line in lines]
    highest = max((point[1] for _, points in drawn for point in points), default=0.0)
    x = _Scale(begin, end or 1.0, LEFT, WIDTH - RIGHT)
    y = _Scale(0.0, top if top is not None else highest * 1.06 or 1.0, HEIGHT - BOTTOM, TOP)
    body = Markup("").join(
        [
            *_grid(x, y, write, unit),
            *(_window(window, x) for window in windows),
            *(_line(line, points, x, y) for line, points in drawn),
            *_legend([line for line, points in drawn if points]),
        ]
    )
    data = {
        "begin": x.low,
        "end": x.high,
        "unit": unit,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": HEIGHT - BOTTOM,
        "lines": [
            {
                "name": line.name,
                "style": line.style,
                "points": [[round(px, 4), y(py), write(py)] for px, py in points],
            }
            for line, points in drawn
            if points
        ],
    }
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-chart="{}">'
        '{}<g class="cursor"></g></svg>'
    ).format(WIDTH, HEIGHT, title, json.dumps(data), body)


def _grid(x: _Scale, y: _Scale, write: Callable[[float], str], unit: str) -> Iterator[Markup]:
    for value in ticks(y.low, y.high, 4):
        yield Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            LEFT, WIDTH - RIGHT, y(value), y(value)
        )
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 8, y(value) + 4, write(value)
        )
    for value in ticks(x.low, x.high, 6):
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{:g}</text>').format(
            x(value), HEIGHT - BOTTOM + 18, value
        )
    yield Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, y.start, y.start)
    yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(WIDTH - RIGHT, HEIGHT - 3, unit)


def _window(window: Window, x: _Scale) -> Markup:
    start, end = x(window.start), x(window.end)
    width = max(end - start, 1.5)
    # The label stays inside the chart even for a window at its right edge.
    anchor, place = ("end", end - 4) if start > WIDTH * 0.75 else ("start", start + 4)
    return Markup(
        '<g class="window {}"><rect x="{}" y="{}" width="{:.2f}" height="{}"/>'
        '<text x="{}" y="{}" text-anchor="{}">{}</text></g>'
    ).format(window.style, start, TOP, width, HEIGHT - BOTTOM - TOP, place, TOP + 13, anchor, window.label)


def _line(line: Line, points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> Markup:
    parts = []
    if line.joined and len(points) > 1:
        path = " ".join(f"{x(px)},{y(py)}" for px, py in points)
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(line.style, path))
    if line.marks or not line.joined or len(points) == 1:
        parts += [
            Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>').format(
                line.style, x(px), y(py), 3 if line.marks else 2
            )
            for px, py in points
        ]
    return Markup("").join(parts)


def _legend(lines: Sequence[Line]) -> Iterator[Markup]:
    place = float(LEFT)
    for line in lines:
        yield Markup('<circle class="{}" cx="{}" cy="12" r="4"/><text class="legend" x="{}" y="16">{}</text>').format(
            line.style, place + 4, place + 13, escape(line.name)
        )
        place += 30 + 7.2 * len(line.name)
