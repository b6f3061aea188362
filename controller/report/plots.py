"""Plots by matplotlib: inline in a page, whose colours they take on, and as SVG and PDF files for one or two columns.

What is drawn is the same at every width; letters and lines keep their size.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from testbed.common import formats
from testbed.common.formats import FigureKind

COLOURS = {
    "ink": "#1b2330",
    "soft": "#5b6675",
    "line": "#e1e5eb",
    "card": "#ffffff",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "violet": "#cc79a7",
    "teal": "#56b4e9",
    "grey": "#4d4d4d",
    "fault": "#d6404f",
    "recovery": "#d99a1c",
}
"""Those of style.css by its names; inline, each becomes the page's own, in a dark page too. The series are after Okabe
and Ito (Color Universal Design, 2008): colour-blind readers can distinguish them."""
SERIES = ("blue", "orange", "green", "violet", "teal", "grey")
"""Colours of the series of a plot, in this order; it has no more series than that."""
MARKS = ("o", "s", "^", "D", "v", "P")
"""Of the series, in the same order: they can be distinguished without colours, too."""
WIDTH, HEIGHT = 4.2, 2.4
"""Inches, on a page."""
PRINT = {"": 3.5, "-wide": 7.16}
"""What follows the name of a file -> its width in inches: one column of a paper and two (those of IEEE)."""
LOG_FROM = 10.0
"""How many times the lowest value the highest is, from which on the y axis of lines is logarithmic."""
LOG_BARS_FROM = 100.0
"""The same of bars, whose lengths no longer compare then."""
LOG_X_FROM = 20.0
"""The same of the places of points on the x axis."""
LETTER, ROW = 0.075, 0.17
"""Inches: about the width of a letter and the height of a row of text."""
_STEPS = (1, 2, 2.5, 5, 10)
"""Between the ticks of an axis, times a power of ten."""
MOST_POINTS = 1500
"""Points drawn of a line: more than pixels across add weight, not detail."""
FEW = 60
"""Points of a line that can be distinguished: each gets a mark."""
MOST_LETTERS = 60
"""Of a name in the legend."""
AXIS_LETTERS, BESIDE_LETTERS = 9, 16
"""Room that the axis takes beside a name, and it and a mark, in letters."""
PRINTED = 0.45
"""Opacity of what is as a publication has it."""
STYLE: Any = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "edge-testbed",
    "text.color": COLOURS["ink"],
    "axes.edgecolor": COLOURS["soft"],
    "axes.labelcolor": COLOURS["soft"],
    "xtick.color": COLOURS["soft"],
    "ytick.color": COLOURS["soft"],
    "grid.color": COLOURS["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "ytick.left": False,
}


@dataclass(frozen=True)
class Line:
    """One line of a plot: (x, y) in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    """One of `COLOURS`."""
    marks: bool = False
    """Draw a dot at every point, for few of them."""
    joined: bool = True
    """Join the points."""
    printed: bool = False
    """As a publication has it: drawn paler and dashed, and not in the legend."""
    half_widths: Sequence[float | None] = ()
    """Of the intervals around the values, one a point: error bars where there are marks, else a band."""


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, one for each group of a plot; None where there is nothing to draw."""

    name: str
    values: Sequence[float | None]
    colour: str
    half_widths: Sequence[float | None] = ()
    """Of the intervals around the values."""
    printed: bool = False
    """As a publication has it: drawn paler, and not in the legend."""


@dataclass(frozen=True)
class Axis:
    """What is on an axis."""

    name: str
    kind: FigureKind = "number"

    @property
    def most(self) -> float:
        """What a value, and the interval around one, can be at most: a share is no more than all."""
        return 1.0 if self.kind == "share" else math.inf

    def scale(self, highest: float) -> tuple[float, str]:
        """Return what values are divided by where this is the highest, and the title with its unit."""
        factor, unit = formats.unit(self.kind, highest)
        return factor, f"{self.name} ({unit})" if unit else self.name


class Draw(Protocol):
    """Draws a plot at a width in inches."""

    def __call__(self, *, width: float = WIDTH) -> Figure: ...  # noqa: D102 - the class says it


@dataclass(frozen=True)
class Window:
    """A stretch of x to be shaded."""

    start: float
    end: float
    label: str
    style: str = "fault"
    """fault, which is labelled, or recovery."""


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most ``most`` points, keeping the lowest and the highest of every stretch."""
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


@mpl.rc_context(STYLE)
def line_plot(
    lines: Sequence[Line],
    windows: Sequence[Window] = (),
    *,
    range_: tuple[float, float],
    y: Axis,
    x: str = "time (s)",
    at: Sequence[float] | None = None,
    width: float = WIDTH,
) -> Figure:
    """Draw lines, windows behind them.

    The y axis begins at 0, or is logarithmic where values are far apart. The x axis goes over ``range_``, is called
    ``x``, and has a figure at each of ``at``, or at round numbers.
    """
    figure, axes = _axes(width, x)
    low, high = range_[0], range_[1] if range_[1] > range_[0] else range_[0] + 1.0
    axes.set_xlim(low, high)
    drawn = [(line, list(line.points) if line.half_widths else thin(line.points)) for line in lines]
    if all(float(place).is_integer() for _, points in drawn for place, _ in points):
        axes.xaxis.set_major_locator(_round_numbers(width, whole=True))  # there is no epoch 1.5
    values = [value for _, points in drawn for _, value in points]
    factor = _measure(axes, y, values, LOG_FROM)
    if axes.get_yscale() == "linear":
        most = [
            value + (half or 0.0)
            for line, points in drawn
            for (_, value), half in zip(points, line.half_widths, strict=False)
        ]
        highest = min(max([*most, *values, 0.0]), y.most)
        axes.set_ylim(0.0, highest / factor * 1.06 or 1.0)
    several = sum(bool(points) and not (line.printed or _marked(line, points)) for line, points in drawn) > 1
    for line, points in drawn:
        if points:
            _draw_line(axes, line, points, factor, several, y.most)
    if at is not None:
        if low > 0 and high >= low * LOG_X_FROM:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.1, high * 1.1)
            axes.xaxis.set_minor_formatter(NullFormatter())
        marked = _apart(at, axes, width)
        axes.set_xticks(marked, [f"{place:g}" for place in marked])
        axes.minorticks_off()
    legend(figure, axes, above=_shade(axes, windows, high - low, width))
    return figure


def _apart(at: Sequence[float], axes: Axes, width: float) -> list[float]:
    """Return those of rising places on the x axis whose figures do not touch the one before."""
    kept: list[float] = []
    free = -math.inf
    for place in at:
        inches = axes.transAxes.inverted().transform(axes.transData.transform((place, 0.0)))[0] * width * 0.85
        if inches >= free:
            kept.append(place)
            free = inches + LETTER * (len(f"{place:g}") + 1)
    return kept


def _intervals(values: Sequence[float], halves: Sequence[float], most: float) -> list[Sequence[float]]:
    """Return how far down and up the intervals around values go: up no further than ``most``; NaN: there is none."""
    up = [half if value > most else min(half, most - value) for value, half in zip(values, halves, strict=True)]
    return [halves, up]


def _marked(line: Line, points: Sequence[tuple[float, float]]) -> bool:
    """Say whether a line has a mark at each of its points."""
    return line.marks or not line.joined or len(points) == 1


def _draw_line(
    axes: Axes, line: Line, points: Sequence[tuple[float, float]], factor: float, several: bool, most: float
) -> None:
    """Draw one line; among several without marks at their points it gets a few of its own."""
    xs, ys = [x for x, _ in points], [y / factor for _, y in points]
    number = SERIES.index(line.colour) if line.colour in SERIES else 0
    marked = _marked(line, points)
    colour = COLOURS[line.colour]
    halves = [math.nan if half is None else half / factor for half in line.half_widths]
    if halves:
        down, up = _intervals(ys, halves, most / factor)
        if marked:
            axes.errorbar(xs, ys, [down, up], fmt="none", ecolor=colour, elinewidth=1, capsize=2.5)
        else:
            axes.fill_between(xs, np.subtract(ys, down), np.add(ys, up), color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        xs,
        ys,
        color=colour,
        alpha=PRINTED if line.printed else 1.0,
        linestyle="none" if not line.joined else "dashed" if line.printed else "solid",
        linewidth=1.3,
        marker=MARKS[number] if marked or several else "",
        markevery=1 if marked else (0.04 + 0.04 * number, 0.28),
        markersize=3.5 if line.marks or not marked else 3,
        markeredgewidth=0,
        label=f"_{line.name}" if line.printed else line.name,
        clip_on=line.joined and not line.marks,
    )


@mpl.rc_context(STYLE)
def stacked_plot(lines: Sequence[Line], marks: Sequence[float], *, end: float, y: Axis, width: float = WIDTH) -> Figure:
    """Draw what each line adds to the whole, over the seconds from 0 to ``end``; a value holds until the next.

    ``marks`` are seconds at which something happened to the whole.
    """
    figure, axes = _axes(width, "time (s)")
    axes.set_xlim(0.0, end)
    times = sorted({0.0, end, *(x for line in lines for x, _ in line.points)})
    held = [_held(line.points, times) for line in lines]
    factor = _measure(axes, y, [0.0, *(sum(values) for values in zip(*held, strict=True))], math.inf)
    parts = [[value / factor for value in values] for values in held]
    colours = [COLOURS[line.colour] for line in lines]
    axes.stackplot(times, parts, step="post", colors=colours, alpha=0.75, labels=[line.name for line in lines])
    for mark in marks:
        axes.axvline(mark, color=COLOURS["ink"], linewidth=0.8, linestyle="dotted")
    axes.set_ylim(bottom=0.0)
    legend(figure, axes)
    return figure


def _held(points: Sequence[tuple[float, float]], times: Sequence[float]) -> list[float]:
    """Return the value at each of some rising times: that of the last point until then, 0 before the first."""
    found, value, following = [], 0.0, list(points)
    for time in times:
        while following and following[0][0] <= time:
            value = following.pop(0)[1]
        found.append(value)
    return found


@mpl.rc_context(STYLE)
def bar_plot(groups: Sequence[str], kinds: Sequence[Bars], *, y: Axis, x: str = "", width: float = WIDTH) -> Figure:
    """Draw bars side by side in groups, each with its figure above it if there is room for all of them.

    The y axis begins at 0, or is logarithmic where values are far apart. ``x`` says what the groups are.
    """
    figure, axes = _axes(width, x)
    room = width * 0.85 / max(1, len(groups))
    bar = 0.8 / max(1, len(kinds))
    values = [value for kind in kinds for value in kind.values if value is not None]
    factor = _measure(axes, y, values, LOG_BARS_FROM)
    labelled = all(len(formats.number(value / factor)) * LETTER <= room * bar for value in values)
    for index, kind in enumerate(kinds):
        places = [group - 0.4 + (index + 0.5) * bar for group in range(len(groups))]
        halves = kind.half_widths or [None] * len(kind.values)
        found = [
            (place, value / factor, math.nan if half is None else half / factor)
            for place, value, half in zip(places, kind.values, halves, strict=True)
            if value is not None
        ]
        at, heights, around = zip(*found, strict=True) if found else ((), (), ())
        bars = axes.bar(
            at,
            heights,
            bar * 0.94,
            yerr=_intervals(heights, around, y.most / factor) if any(half > 0 for half in around) else None,
            color=COLOURS[kind.colour],
            alpha=PRINTED if kind.printed else 1.0,
            error_kw={"ecolor": COLOURS["ink"], "elinewidth": 1, "capsize": 3},
            label=f"_{kind.name}" if kind.printed else kind.name,
        )
        if labelled:
            texts = [formats.number(float(f"{value:.3g}")) for value in heights]
            axes.bar_label(bars, texts, padding=2, color=COLOURS["soft"], fontsize=7.5)
    wrapped = ["\n".join(textwrap.wrap(group, max(6, int(room / LETTER)))) for group in groups]
    axes.set_xticks(range(len(groups)), wrapped)
    axes.tick_params(axis="x", length=0)
    figure.set_figheight(HEIGHT + ROW * max((text.count("\n") for text in wrapped), default=0))
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0.0, auto=True)
        axes.margins(y=0.1)
    legend(figure, axes)
    return figure


def _axes(width: float, x: str) -> tuple[Figure, Axes]:
    figure = Figure((width, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", linewidth=0.8)
    axes.xaxis.set_major_locator(_round_numbers(width))
    axes.set_xlabel(x)
    return figure, axes


def _round_numbers(width: float, *, whole: bool = False) -> MaxNLocator:
    return MaxNLocator(max(4, int(width * 1.4)), steps=_STEPS, integer=whole)


def _measure(axes: Axes, y: Axis, values: Sequence[float], log_from: float) -> float:
    """Give the y axis its title, limits and figures; return what values are divided by."""
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    factor, title = y.scale(highest)
    axes.set_ylabel(title)
    if y.kind != "share" and lowest > 0 and highest >= lowest * log_from:
        axes.set_yscale("log")
        near = highest < lowest * 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if near else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(lowest / factor / 1.2, highest / factor * 1.2)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.number(float(value))))
    return factor


def _shade(axes: Axes, windows: Sequence[Window], span: float, width: float) -> bool:
    """Shade windows and say above the axes what they are; a label is left out where it would lie on the one before.

    Returns whether there is any label.
    """
    free = -math.inf
    for window in windows:
        colour = COLOURS[window.style]
        axes.axvspan(window.start, max(window.end, window.start + span * 0.002), color=colour, alpha=0.15, linewidth=0)
        length = span * len(window.label) * LETTER / width
        late = window.start > axes.get_xlim()[0] + span * 0.75
        begin = min(window.end, axes.get_xlim()[1]) - length if late else window.start
        if window.style == "fault" and begin >= free:
            where = (window.end if late else window.start, 1.01)
            across = "right" if late else "left"
            transform = axes.get_xaxis_transform()
            axes.text(*where, window.label, color=colour, ha=across, va="bottom", fontsize=7.5, transform=transform)
            free = begin + length
    return free > -math.inf


def legend(figure: Figure, axes: Axes, *, above: bool = False) -> None:
    """Put the names of all series over the plot, ``above`` a row of other words there; it grows with their rows."""
    figure.set_figheight(figure.get_figheight() + ROW * above)
    handles, names = axes.get_legend_handles_labels()
    if not handles:
        return
    most = min(MOST_LETTERS, int(figure.get_figwidth() / LETTER) - BESIDE_LETTERS)
    short = [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]
    # Left of the plot stands its axis; beside a name its mark, and the gap to the next.
    room = figure.get_figwidth() / LETTER - AXIS_LETTERS
    columns = max(1, int(room / (max(map(len, short)) + BESIDE_LETTERS - AXIS_LETTERS)))
    figure.set_figheight(figure.get_figheight() + ROW * (math.ceil(len(short) / columns) - 1))
    axes.legend(
        handles,
        short,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        handlelength=1.6,
        borderaxespad=1.8 if above else 0.5,
    )


@mpl.rc_context(STYLE)
def save(draw: Draw, path: Path) -> None:
    """Write ``<path>.svg`` and ``.pdf`` for one column and ``<path>-wide`` for two, the same bytes each time."""
    for end, width in PRINT.items():
        figure = draw(width=width)
        name = path.with_name(path.name + end)
        figure.savefig(f"{name}.svg", metadata={"Date": None}, facecolor="white")
        figure.savefig(f"{name}.pdf", metadata={"CreationDate": None}, facecolor="white")


def save_all(folder: Path, charts: Iterable[tuple[str, str, Draw | None]]) -> list[str]:
    """Save the plots of a page, given with title and note, in a folder; return the names of their files."""
    names = []
    for number, (title, _, draw) in enumerate(charts, 1):
        names.append(f"{number}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}")
        if draw is not None:
            save(draw, folder / names[-1])
    return names


@mpl.rc_context(STYLE)
def inline(draw: Draw, title: str) -> Markup:
    """Return the plot as an SVG element for a page with style.css, which gives it colours and font."""
    buffer = io.StringIO()
    draw().savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    drawn = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    # Matplotlib numbers its elements; on a page with several plots the numbers would not be unique.
    drawn = re.sub(r' id="[a-z]+[\w.]*_\d+"', "", drawn)
    for name, colour in COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    drawn = drawn.replace("'DejaVu Sans'", "system-ui, sans-serif")
    size = re.search(r'viewBox="[^"]*"', drawn)
    assert size is not None
    label = Markup('<svg class="chart" role="img" aria-label="{}" ').format(title)
    return label + Markup(size[0]) + Markup(drawn[drawn.index(">") :])
