"""Line and bar charts as inline SVG, coloured by the style sheet of the page so that they follow its colour scheme."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 28, 36
MOST_POINTS = 1500
"""Points drawn per line: more than pixels across add weight, not detail."""
ROW, LINE, LETTER = 18, 14, 6.4
"""Height of a row of the legend and of a line of words below the axis, and about the width of a letter."""
MOST_LETTERS = 60
"""Of a name in the legend: that many fit across."""


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
    printed: bool = False
    """As a publication has it: drawn paler and dashed, and not in the legend."""


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, one for each group of a bar chart; None where there is nothing to draw."""

    name: str
    values: Sequence[float | None]
    style: str
    """CSS class."""
    half_widths: Sequence[float | None] = ()
    """Of the intervals around the values."""
    printed: bool = False
    """As a publication has it: drawn paler, and not in the legend."""


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
    at: Sequence[float] | None = None,
) -> Markup:
    """Draw lines over the seconds of a run, or whatever ``unit`` is, from ``begin`` to ``end``, windows behind them.

    The y axis begins at 0 and ends at ``top``, or above the highest point; ``write`` formats its figures. The x axis
    has a figure at each of ``at``, or at round numbers.
    """
    drawn = [(line, thin(line.points)) for line in lines]
    highest = max((point[1] for _, points in drawn for point in points), default=0.0)
    x = _Scale(begin, end if end > begin else begin + 1.0, LEFT, WIDTH - RIGHT)
    y = _Scale(0.0, top if top is not None else highest * 1.06 or 1.0, HEIGHT - BOTTOM, TOP)
    body = Markup("").join(
        [
            *_grid(x, y, write),
            *_across(x, ticks(x.low, x.high, 6) if at is None else at, unit),
            *(_window(window, x) for window in windows),
            *(_line(line, points, x, y) for line, points in drawn),
        ]
    )
    legend, rows = _legend([(line.style, line.name) for line, points in drawn if points and not line.printed])
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
        '<svg class="chart" viewBox="0 {} {} {}" role="img" aria-label="{}" data-chart="{}">'
        '{}{}<g class="cursor"></g></svg>'
    ).format(-ROW * (rows - 1), WIDTH, HEIGHT + ROW * (rows - 1), title, json.dumps(data), body, legend)


def bar_chart(
    groups: Sequence[str], kinds: Sequence[Bars], *, title: str, write: Callable[[float], str], unit: str = ""
) -> Markup:
    """Draw bars side by side in groups, each with its figure above it if there is room for all of them.

    The y axis begins at 0; ``write`` formats its figures. ``unit`` says what the groups are.
    """
    wide = (WIDTH - RIGHT - LEFT) / max(1, len(groups))
    words = [textwrap.wrap(group, max(6, int(wide / LETTER))) or [""] for group in groups]
    # Words of more than one line and the unit need room below each other.
    extra = LINE * (max((len(lines) for lines in words), default=1) - 1)
    ends = [
        value + (half or 0.0)
        for kind in kinds
        for value, half in zip(kind.values, kind.half_widths or [None] * len(kind.values), strict=True)
        if value is not None
    ]
    y = _Scale(0.0, max(ends, default=0.0) * 1.12 or 1.0, HEIGHT - BOTTOM, TOP)
    body = list(_grid(_Scale(0.0, 1.0, LEFT, WIDTH - RIGHT), y, write))
    width = wide * 0.8 / max(1, len(kinds))
    figures = [write(value) for kind in kinds for value in kind.values if value is not None]
    labelled = all(len(figure) * LETTER <= width for figure in figures)
    for index, lines in enumerate(words):
        left = LEFT + wide * (index + 0.1)
        for place, kind in enumerate(kinds):
            body += _bar(kind, index, left + width * place, width, y, write, labelled=labelled)
        for number, line in enumerate(lines):
            body.append(
                Markup('<text class="tick" x="{:.2f}" y="{}" text-anchor="middle">{}</text>').format(
                    LEFT + wide * (index + 0.5), HEIGHT - BOTTOM + 18 + LINE * number, line
                )
            )
    body.append(
        Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            WIDTH - RIGHT, HEIGHT - 3 + extra, unit
        )
    )
    legend, rows = _legend([(kind.style, kind.name) for kind in kinds if not kind.printed])
    return Markup('<svg class="chart" viewBox="0 {} {} {}" role="img" aria-label="{}">{}{}</svg>').format(
        -ROW * (rows - 1), WIDTH, HEIGHT + extra + ROW * (rows - 1), title, Markup("").join(body), legend
    )


def _bar(
    kind: Bars, index: int, left: float, width: float, y: _Scale, write: Callable[[float], str], *, labelled: bool
) -> Iterator[Markup]:
    value = kind.values[index]
    if value is None:
        return
    middle, top, text = left + width / 2, y(value), write(value)
    style = f"{kind.style} printed" if kind.printed else kind.style
    yield Markup(
        '<rect class="{}" x="{:.2f}" y="{}" width="{:.2f}" height="{:.2f}"><title>{}: {}</title></rect>'
    ).format(style, left + 1, top, width - 2, y.start - top, kind.name, text)
    half = kind.half_widths[index] if kind.half_widths else None
    if half:
        low, high = y(max(0.0, value - half)), y(value + half)
        yield Markup('<path class="whisker" d="M{0:.2f} {1}V{2}M{3:.2f} {1}h8M{3:.2f} {2}h8"/>').format(
            middle, low, high, middle - 4
        )
        top = high
    if labelled:
        yield Markup('<text class="tick" x="{:.2f}" y="{}" text-anchor="middle">{}</text>').format(
            middle, top - 5, text
        )


def _grid(x: _Scale, y: _Scale, write: Callable[[float], str]) -> Iterator[Markup]:
    for value in ticks(y.low, y.high, 4):
        yield Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            LEFT, WIDTH - RIGHT, y(value), y(value)
        )
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 8, y(value) + 4, write(value)
        )
    yield Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(x.start, x.end, y.start, y.start)


def _across(x: _Scale, marked: Sequence[float], unit: str) -> Iterator[Markup]:
    for value in marked:
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{:g}</text>').format(
            x(value), HEIGHT - BOTTOM + 18, value
        )
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
    style = f"{line.style} printed" if line.printed else line.style
    if line.joined and len(points) > 1:
        path = " ".join(f"{x(px)},{y(py)}" for px, py in points)
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(style, path))
    if line.marks or not line.joined or len(points) == 1:
        parts += [
            Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>').format(style, x(px), y(py), 3 if line.marks else 2)
            for px, py in points
        ]
    return Markup("").join(parts)


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[Markup, int]:
    """Return the legend of (CSS class, name) and its number of rows, the last of which is right above the chart."""
    placed: list[tuple[int, float, str, str]] = []
    row, place = 0, float(LEFT)
    for style, name in entries:
        shown = textwrap.shorten(name, MOST_LETTERS, placeholder="…")
        shown = shown if shown != "…" else f"{name[: MOST_LETTERS - 1]}…"
        width = 30 + 7.2 * len(shown)
        if placed and place + width - 17 > WIDTH:
            row, place = row + 1, float(LEFT)
        placed.append((row, place, style, shown))
        place += width
    drawn = Markup("").join(
        Markup('<circle class="{}" cx="{}" cy="{}" r="4"/><text class="legend" x="{}" y="{}">{}</text>').format(
            style, left + 4, 12 - ROW * (row - line), left + 13, 16 - ROW * (row - line), escape(name)
        )
        for line, left, style, name in placed
    )
    return drawn, row + 1
