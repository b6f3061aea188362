"""Lines, stacks and bars drawn by matplotlib.

A plot has the same content at every width; letters and lines keep their size.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation

from testbed.common import formats
from testbed_controller.report.charts import (
    COLOURS,
    SERIES,
    Axis,
    BarPlot,
    Dash,
    Line,
    LinePlot,
    Numbers,
    Points,
    StackedPlot,
    Window,
    thin,
)

MARKS = ("o", "s", "^", "D", "v", "P")
"""Marks of the series, in the order of their colours: they can be distinguished without colours, too."""
HATCHES: dict[Dash, str] = {"solid": "", "dashed": "////", "dotted": "...."}
WIDTH, HEIGHT = 4.2, 2.2
"""Inches, on a page; a legend adds to the height."""
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


@mpl.rc_context(STYLE)
def draw_lines(plot: LinePlot, width: float) -> Figure:
    """Draw lines, windows behind them."""
    figure, axes = _axes(width, plot.x)
    low, high = plot.range_
    if high <= low:
        high = low + 1.0
    axes.set_xlim(low, high)
    y = plot.y
    drawn = [line for line in plot.lines if line.points]
    if all(float(place).is_integer() for line in drawn for place, _ in line.points):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))  # there is no epoch 1.5
    if plot.at is not None:
        if low > 0 and high >= low * LOG_X_FROM:
            axes.set_xscale("log")
            axes.set_xlim(low / 1.1, high * 1.1)
        marked = _apart(plot.at, axes, width)
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
    _shade(axes, plot.windows, high - low, width)
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
def draw_stack(plot: StackedPlot, width: float) -> Figure:
    """Draw the part of each line in the whole, over time."""
    lines, end = plot.lines, plot.end
    figure, axes = _axes(width, "time (s)")
    axes.set_xlim(0.0, end)
    times = sorted({0.0, end, *(x for line in lines for x, _ in line.points)})
    held = np.array([_held(line.points, times) for line in lines])
    whole = held.sum(axis=0)
    factor = _measure(axes, plot.y, whole, whole, math.inf)
    colours = [COLOURS[line.colour] for line in lines]
    axes.stackplot(times, held / factor, step="post", colors=colours, alpha=0.75, labels=[line.name for line in lines])
    for mark in plot.marks:
        axes.axvline(mark, color=COLOURS["ink"], linewidth=0.8, linestyle="dotted")
    legend(figure, axes)
    return figure


def _held(points: Points, times: Sequence[float]) -> np.ndarray[Any, Any]:
    """Return the value at each of some rising times: that of the last point until then, 0 before the first."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    return np.array([0.0, *ys])[np.searchsorted(xs, times, side="right")]


@mpl.rc_context(STYLE)
def draw_bars(plot: BarPlot, width: float) -> Figure:
    """Draw bars side by side in groups, each with its figure above it if there is room for all of them."""
    groups, kinds, y = plot.groups, plot.kinds, plot.y
    figure, axes = _axes(width, plot.x)
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
