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
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

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
"""Colours of the series of a plot, in this order."""
MARKS = ("o", "s", "^", "D", "v", "P")
"""Marks of the series, in the same order: they can be distinguished without colours, too."""
Dash = Literal["solid", "dashed", "dotted"]
HATCHES: dict[Dash, str] = {"solid": "", "dashed": "////", "dotted": "...."}
STYLES: tuple[tuple[str, Dash], ...] = tuple((colour, dash) for dash, colour in product(HATCHES, SERIES))
"""Colour and dash of the series of a plot, in this order; it has no more series than that."""
WIDTH, HEIGHT = 4.2, 2.2
"""Inches, on a page; a legend adds to the height."""
PRINT = {"": 3.5, "-wide": 7.16}
"""What follows the name of a file -> its width in inches: one column of a paper and two (those of IEEE)."""
LOG_FROM = 10.0
"""How many times the lowest value the highest is, from which on the y axis of lines is logarithmic."""
LOG_BARS_FROM = 100.0
"""The same of bars, whose lengths no longer compare then."""
LOG_X_FROM = 20.0
"""The same of the places of points on the x axis."""
LETTER = 0.075
"""Inches: about the width of a letter."""
MARK_LETTERS = 6
"""Room that the mark beside a name in a legend takes, in letters."""
MOST_POINTS = 1500
"""Points drawn of a line: more than pixels across add weight, not detail."""
FEW = 60
"""Points of a line that can be distinguished: each gets a mark."""
APART = 3.0
"""Points of type between the marks of two series at the same place, so that their intervals can be distinguished."""
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
    "hatch.linewidth": 0.5,
}
Points = Sequence[tuple[float, float]]
Numbers = Sequence[float] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Line:
    """One line of a plot: (x, y) in the order of x."""

    name: str
    points: Points
    colour: str
    """One of `COLOURS`."""
    dash: Dash = "solid"
    marks: bool = False
    """Draw a dot at every point, for few of them."""
    joined: bool = True
    """Join the points."""
    printed: bool = False
    """As a publication has it: drawn paler and dashed, and not in the legend."""
    half_widths: Sequence[float | None] = ()
    """Half widths of the intervals around the values, one a point: error bars where there are marks, else a band."""

    @property
    def marked(self) -> bool:
        """Whether there is a mark at each point."""
        return self.marks or not self.joined or len(self.points) == 1


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, one for each group of a plot; None where there is nothing to draw."""

    name: str
    values: Sequence[float | None]
    colour: str
    half_widths: Sequence[float | None] = ()
    """Half widths of the intervals around the values."""
    dash: Dash = "solid"
    """Says how the bars are hatched."""
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

    def intervals(self, values: Numbers, halves: Sequence[float | None]) -> np.ndarray[Any, Any]:
        """Return how far down and up the intervals around values go, (2, values); NaN where there is none."""
        half = np.array([math.nan if each is None else each for each in halves], float)
        room = np.maximum(self.most - np.array(values), np.where(np.array(values) > self.most, math.inf, 0.0))
        return np.array([half, np.minimum(half, room)])


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


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
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

    The y axis begins at 0 or at the lowest negative value, or is logarithmic where values are far apart. The x axis
    goes over ``range_``, is called ``x``, and has a figure at each of ``at``, or at round numbers.
    """
    figure, axes = _axes(width, x)
    low, high = range_[0], range_[1] if range_[1] > range_[0] else range_[0] + 1.0
    axes.set_xlim(low, high)
    drawn = [line for line in lines if line.points]
    if all(float(place).is_integer() for line in drawn for place, _ in line.points):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # there is no epoch 1.5
    if at is not None:
        if low > 0 and high >= low * LOG_X_FROM:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.1, high * 1.1)
        marked = _apart(at, axes, width)
        axes.set_xticks(marked, [f"{place:g}" for place in marked])
        axes.minorticks_off()
    ends = [value for line in drawn for _, value in line.points]
    for line in drawn:
        values = [value for _, value in line.points]
        down, up = y.intervals(values, line.half_widths or [0.0] * len(values))
        ends += [*np.nan_to_num(values - down), *np.nan_to_num(values + up)] if line.half_widths else []
    factor = _measure(axes, y, [value for line in drawn for _, value in line.points], ends, LOG_FROM)
    spread = [line for line in drawn if line.marked and line.half_widths]
    several = sum(not (line.printed or line.marked) for line in drawn) > 1
    for line in drawn:
        aside = (spread.index(line) - (len(spread) - 1) / 2) * APART if line in spread else 0.0
        _draw_line(axes, line, y, factor, several, aside)
    _shade(axes, windows, high - low, width)
    legend(figure, axes)
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


def _draw_line(axes: Axes, line: Line, y: Axis, factor: float, several: bool, aside: float) -> None:
    """Draw one line; among several without marks at their points it gets a few of its own.

    ``aside`` are the points of type that it is moved to the right by.
    """
    points = list(line.points) if line.half_widths else thin(line.points)
    xs, ys = (np.array(part) for part in zip(*points, strict=True))
    number = SERIES.index(line.colour) if line.colour in SERIES else 0
    marked, colour = line.marked, COLOURS[line.colour]
    place = axes.transData
    if aside and (figure := axes.get_figure()):
        place = place + ScaledTranslation(aside / 72, 0.0, figure.dpi_scale_trans)
    if line.half_widths:
        down, up = y.intervals(ys, line.half_widths) / factor
        if marked:
            whiskers: Any = {"fmt": "none", "ecolor": colour, "elinewidth": 1, "capsize": 2.5}
            down = np.minimum(down, ys / factor - axes.get_ylim()[0])  # a logarithmic axis has no zero to reach
            drawn = axes.errorbar(xs, ys / factor, [down, up], transform=place, **whiskers)
            for artist in drawn.get_children():
                artist.set_clip_on(False)  # at the first and the last x, half of the whisker lies outside the axes
        else:
            axes.fill_between(xs, ys / factor - down, ys / factor + up, color=colour, alpha=0.2, linewidth=0)
    axes.plot(
        xs,
        ys / factor,
        transform=place,
        color=colour,
        alpha=PRINTED if line.printed else 1.0,
        linestyle="none" if not line.joined else "dashed" if line.printed else line.dash,
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
    held = np.array([_held(line.points, times) for line in lines])
    whole = held.sum(axis=0)
    factor = _measure(axes, y, whole, whole, math.inf)
    colours = [COLOURS[line.colour] for line in lines]
    axes.stackplot(times, held / factor, step="post", colors=colours, alpha=0.75, labels=[line.name for line in lines])
    for mark in marks:
        axes.axvline(mark, color=COLOURS["ink"], linewidth=0.8, linestyle="dotted")
    legend(figure, axes)
    return figure


def _held(points: Points, times: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the value at each of some rising times: that of the last point until then, 0 before the first."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    return np.array([0.0, *ys])[np.searchsorted(xs, times, side="right")]


@mpl.rc_context(STYLE)
def bar_plot(groups: Sequence[str], kinds: Sequence[Bars], *, y: Axis, x: str = "", width: float = WIDTH) -> Figure:
    """Draw bars side by side in groups, each with its figure above it if there is room for all of them.

    The y axis begins at 0 or at the lowest negative value, or is logarithmic where values are far apart. ``x`` says
    what the groups are.
    """
    figure, axes = _axes(width, x)
    room = width * 0.85 / max(1, len(groups))
    bar = 0.8 / max(1, len(kinds))
    values = [value for kind in kinds for value in kind.values if value is not None]
    factor = _measure(axes, y, values, values, LOG_BARS_FROM)
    labelled = all(len(formats.number(value / factor)) * LETTER <= room * bar for value in values)
    for index, kind in enumerate(kinds):
        found = [
            (group - 0.4 + (index + 0.5) * bar, value, half)
            for group, (value, half) in enumerate(
                zip(kind.values, kind.half_widths or [None] * len(kind.values), strict=True)
            )
            if value is not None
        ]
        at, heights, halves = zip(*found, strict=True) if found else ((), (), ())
        bars = axes.bar(
            at,
            np.array(heights) / factor,
            bar * 0.94,
            yerr=y.intervals(heights, halves) / factor if any(halves) else None,
            color=COLOURS[kind.colour],
            hatch=HATCHES[kind.dash],
            edgecolor=COLOURS["card"],
            linewidth=0,
            alpha=PRINTED if kind.printed else 1.0,
            error_kw={"ecolor": COLOURS["ink"], "elinewidth": 1, "capsize": 3},
            label=f"_{kind.name}" if kind.printed else kind.name,
        )
        if labelled:
            texts = [formats.number(float(f"{value / factor:.3g}")) for value in heights]
            axes.bar_label(bars, texts, padding=2, color=COLOURS["soft"], fontsize=7.5)
    wrapped = [textwrap.fill(group, max(6, int(room / LETTER))) for group in groups]
    axes.set_xticks(range(len(groups)), wrapped)
    axes.tick_params(axis="x", length=0)
    if axes.get_yscale() == "linear":
        axes.set_ylim(None if min(values, default=0.0) < 0 else 0.0, None, auto=True)
        axes.margins(y=0.1)
    legend(figure, axes)
    return figure


def _axes(width: float, x: str) -> tuple[Figure, Axes]:
    figure = Figure((width, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", linewidth=0.8)
    axes.set_xlabel(x)
    return figure, axes


def _measure(axes: Axes, y: Axis, values: Numbers, ends: Numbers, log_from: float) -> float:
    """Give the y axis its title, figures, and limits around the ``ends`` of intervals; return what values are over."""
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    factor, unit = formats.unit(y.kind, max(highest, -lowest))
    axes.set_ylabel(f"{y.name} ({unit})" if unit else y.name)
    if y.kind != "share" and lowest > 0 and highest >= lowest * log_from:
        axes.set_yscale("log")
        near = highest < lowest * 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if near else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(lowest / factor / 1.2, max(highest, *ends) / factor * 1.2)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        bottom, top = min(0.0, *ends, 0.0), max(0.0, *ends, 0.0)
        axes.set_ylim(bottom / factor * 1.06, top / factor * 1.06 if top > bottom or bottom else 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.number(float(value))))
    return factor


def _shade(axes: Axes, windows: Sequence[Window], span: float, width: float) -> None:
    """Shade windows and say above the axes what they are; a label is left out where it would lie on the one before."""
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


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names of all series above the plot, in as many columns as fit; the figure grows with their rows."""
    handles, names = axes.get_legend_handles_labels()
    letters = int(figure.get_figwidth() / LETTER) - MARK_LETTERS
    wrapped = [textwrap.fill(name, letters) for name in names]
    place: Any = {"loc": "outside upper left", "frameon": False, "handlelength": 2.4, "columnspacing": 1.0}
    made = figure.legend(handles, wrapped, **place)
    letter = figure.dpi * STYLE["font.size"] / 72  # between two columns, and on either side
    columns = int((figure.bbox.width - 2 * letter) // (made.get_window_extent().width + letter))
    if names and columns > 1:
        made.remove()
        made = figure.legend(handles, wrapped, ncols=columns, **place)
    figure.set_figheight(figure.get_figheight() + made.get_window_extent().height / figure.dpi)


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
