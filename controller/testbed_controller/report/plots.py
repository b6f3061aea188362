"""Lines, stacks and bars drawn by matplotlib.

A plot has the same content at every width; letters and lines keep their size.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator
from matplotlib.transforms import ScaledTranslation, Transform

from testbed.common import formats
from testbed_controller.report.charts import (
    COLOURS,
    SERIES,
    Axis,
    BarPlot,
    Bars,
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
"""Marks of the series in the order of their colours, distinguishable without colours."""
HATCHES: dict[Dash, str] = {"solid": "", "dashed": "////", "dotted": "...."}
WIDTH, HEIGHT = 4.2, 2.2
"""Size on a page in inches, without the legend."""
LOG_FROM = 10.0
"""Minimum ratio of the highest to the lowest value for a logarithmic y axis of lines."""
LOG_BARS_FROM = 100.0
"""The same ratio for bars: larger, as lengths on a logarithmic axis cannot be compared."""
LOG_X_FROM = 20.0
"""The same ratio for the x axis."""
LETTER_WIDTH = 0.075
"""Approximate width of a letter in inches."""
MARK_LETTERS = 6
"""Width of the mark beside a name in a legend, in letters."""
MOST_LABELLED = 10
"""Maximum number of bars with value labels."""
APART = 3.0
"""Distance in points between marks of different series at equal x, to keep their intervals distinguishable."""
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
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.3,
    "lines.markeredgewidth": 0,
    "errorbar.capsize": 2.5,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.0,
    "ytick.left": False,
    "hatch.linewidth": 0.5,
}


@mpl.rc_context(STYLE)
def draw_lines(plot: LinePlot, width: float) -> Figure:
    """Draw lines with background windows."""
    figure, axes = _make_axes(width, plot.x)
    drawn = [line for line in plot.lines if line.points]
    values = [value for line in drawn for _, value in line.points]
    scale = _scale_axis(axes, plot.y, values, _interval_ends(drawn, plot.y), LOG_FROM)
    _set_range(axes, plot, drawn)
    several = sum(not line.marked for line in drawn) > 1
    spread = [line for line in drawn if line.marked and line.half_widths]
    for line in drawn:
        place = _line_offset(axes, line, spread)
        _draw_line(axes, line, scale, place, several=several)
    _shade_windows(axes, plot.windows, width)
    legend(figure, axes)
    return figure


def _set_range(axes: Axes, plot: LinePlot, drawn: Sequence[Line]) -> None:
    """Set the limits and the scale of the x axis."""
    low, high = plot.range_
    if high <= low:
        high = low + 1.0
    axes.set_xlim(low, high)
    if plot.swept and low > 0 and high >= low * LOG_X_FROM:
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(_tick_locator(low, high, 100.0))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
        axes.set_xlim(low / 1.1, high * 1.1)
    elif all(float(place).is_integer() for line in drawn for place, _ in line.points):
        # There is no epoch 1.5.
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _interval_ends(drawn: Sequence[Line], y: Axis) -> list[float]:
    """Return the ends of all intervals."""
    ends: list[float] = []
    for line in drawn:
        if line.half_widths:
            values = np.array([value for _, value in line.points])
            down, up = np.nan_to_num(y.intervals(values, line.half_widths))
            ends += [*(values - down), *(values + up)]
    return ends


def _line_offset(axes: Axes, line: Line, spread: Sequence[Line]) -> Transform:
    """Return the x offset of a line, so that error bars do not overlap."""
    figure = axes.get_figure()
    if line not in spread or len(spread) == 1 or figure is None:
        return axes.transData
    aside = (spread.index(line) - (len(spread) - 1) / 2) * APART
    return axes.transData + ScaledTranslation(aside / 72, 0.0, figure.dpi_scale_trans)


def _draw_line(
    axes: Axes, line: Line, scale: _Scale, place: Transform, *, several: bool
) -> None:
    """Draw one line; several unmarked lines get a few marks each to distinguish them."""
    points = line.points if line.half_widths else thin(line.points)
    xs, ys = (np.array(part) for part in zip(*points, strict=True))
    number = SERIES.index(line.colour) if line.colour in SERIES else 0
    colour = COLOURS[line.colour]
    if line.half_widths:
        _draw_intervals(axes, line, xs, ys, scale, place)
    # Marks of different lines at different shares of the length, so that they do not hide each other.
    mark_places: Any = 1 if line.marked else (0.04 + 0.04 * number, 0.28)
    axes.plot(
        xs,
        scale(ys),
        transform=place,
        color=colour,
        linestyle=line.dash if line.joined else "none",
        marker=MARKS[number] if line.marked or several else "",
        markevery=mark_places,
        markersize=3.5,
        label=line.name,
        clip_on=line.joined and not line.marks,
    )


def _draw_intervals(
    axes: Axes, line: Line, xs: Numbers, ys: Numbers, scale: _Scale, place: Transform
) -> None:
    """Draw the confidence intervals of a line: error bars at marks, else a band."""
    colour = COLOURS[line.colour]
    halves = line.half_widths
    if line.marked:
        _draw_whiskers(axes, xs, ys, halves, scale, transform=place, ecolor=colour)
        return
    down, up = scale.intervals(ys, halves)
    low = scale(ys) - down
    high = scale(ys) + up
    axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_whiskers(
    axes: Axes,
    xs: Numbers,
    ys: Numbers,
    halves: Sequence[float | None],
    scale: _Scale,
    **looks: Any,
) -> None:
    """Draw intervals around values as error bars."""
    down, up = scale.intervals(ys, halves)
    # A logarithmic axis has no zero that a whisker could reach.
    down = np.minimum(down, scale(ys) - axes.get_ylim()[0])
    drawn = axes.errorbar(
        xs, scale(ys), [down, up], fmt="none", elinewidth=1, capthick=1, **looks
    )
    for artist in drawn.get_children():
        # At the first and the last x, half of the whisker is outside the axes.
        artist.set_clip_on(False)


@mpl.rc_context(STYLE)
def draw_stack(plot: StackedPlot, width: float) -> Figure:
    """Draw the shares of a whole over time."""
    lines = plot.lines
    figure, axes = _make_axes(width, "time (s)")
    axes.set_xlim(0.0, plot.end)
    changes = {0.0, plot.end}
    for line in lines:
        changes.update(x for x, _ in line.points)
    times = sorted(changes)
    parts = np.array([_sample_steps(line.points, times) for line in lines])
    whole = parts.sum(axis=0)
    scale = _scale_axis(axes, plot.y, whole, whole, math.inf)
    colours = [COLOURS[line.colour] for line in lines]
    axes.stackplot(
        times,
        scale(parts),
        step="post",
        colors=colours,
        alpha=0.75,
        labels=[line.name for line in lines],
    )
    for mark in plot.marks:
        axes.axvline(mark, color=COLOURS["ink"], linewidth=0.8, linestyle="dotted")
    legend(figure, axes)
    return figure


def _sample_steps(points: Points, times: Sequence[float]) -> np.ndarray[Any, Any]:
    """Sample a step function at rising times: the last point so far, or 0 before the first."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    return np.array([0.0, *ys])[np.searchsorted(xs, times, side="right")]


@mpl.rc_context(STYLE)
def draw_bars(plot: BarPlot, width: float) -> Figure:
    """Draw grouped bars, with value labels for few bars."""
    groups, kinds = plot.groups, plot.kinds
    figure, axes = _make_axes(width, plot.x)
    bar = 0.8 / max(1, len(kinds))
    values: list[float] = []
    for kind in kinds:
        values += [value for value in kind.values if value is not None]
    scale = _scale_axis(axes, plot.y, values, values, LOG_BARS_FROM)
    for index, kind in enumerate(kinds):
        first = (index + 0.5) * bar - 0.4
        _draw_kind(axes, kind, first, bar, scale, labelled=len(values) <= MOST_LABELLED)
    letters = max(6, int(width * 0.85 / max(1, len(groups)) / LETTER_WIDTH))
    axes.set_xticks(
        range(len(groups)), [textwrap.fill(group, letters) for group in groups]
    )
    axes.tick_params(axis="x", length=0)
    if axes.get_yscale() == "linear":
        axes.set_ylim(None if min(values, default=0.0) < 0 else 0.0, None, auto=True)
        axes.margins(y=0.1)
    legend(figure, axes)
    return figure


def _draw_kind(
    axes: Axes, kind: Bars, first: float, width: float, scale: _Scale, *, labelled: bool
) -> None:
    """Draw the bars of one series, starting at ``first``."""
    groups = [group for group, value in enumerate(kind.values) if value is not None]
    at = first + np.array(groups)
    heights = np.array([kind.values[group] for group in groups], float)
    bars = axes.bar(
        at,
        scale(heights),
        width * 0.94,
        color=COLOURS[kind.colour],
        hatch=HATCHES[kind.dash],
        edgecolor=COLOURS["card"],
        linewidth=0,
        label=kind.name,
    )
    if any(kind.half_widths):
        _draw_whiskers(
            axes,
            at,
            heights,
            [kind.half_widths[group] for group in groups],
            scale,
            ecolor=COLOURS["ink"],
        )
    if labelled:
        texts = [formats.number(float(f"{value:.3g}")) for value in scale(heights)]
        axes.bar_label(bars, texts, padding=2, color=COLOURS["soft"], fontsize=7.5)


def _make_axes(width: float, x: str) -> tuple[Figure, Axes]:
    figure = Figure((width, HEIGHT))
    axes = figure.subplots()
    axes.set_xlabel(x)
    return figure, axes


@dataclass(frozen=True)
class _Scale:
    """Values in the unit of an axis."""

    y: Axis
    factor: float

    def __call__(self, values: Numbers) -> np.ndarray[Any, Any]:
        return np.asarray(values) / self.factor

    def intervals(
        self, values: Numbers, halves: Sequence[float | None]
    ) -> np.ndarray[Any, Any]:
        """Return the lower and upper half widths of intervals, see `Axis.intervals`."""
        return self.y.intervals(values, halves) / self.factor


def _scale_axis(
    axes: Axes, y: Axis, values: Numbers, ends: Numbers, log_from: float
) -> _Scale:
    """Set title, scale and limits of the y axis, including the ``ends`` of intervals."""
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    factor, unit = formats.unit(y.kind, max(highest, -lowest))
    axes.set_ylabel(f"{y.name} ({unit})" if unit else y.name)
    if y.kind != "share" and lowest > 0 and highest >= lowest * log_from:
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(_tick_locator(lowest, highest, 1000.0))
        axes.set_ylim(lowest / factor / 1.2, max([highest, *ends]) / factor * 1.2)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        bottom, top = min(0.0, lowest, *ends), max(0.0, highest, *ends)
        axes.set_ylim(
            bottom / factor * 1.06, top / factor * 1.06 if top > bottom else 1.0
        )
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: formats.number(float(value)))
    )
    return _Scale(y, factor)


def _tick_locator(lowest: float, highest: float, dense_to: float) -> LogLocator:
    """Return the tick values of a logarithmic axis: 1, 2 and 5 of each decade for few decades."""
    return LogLocator(subs=(1.0, 2.0, 5.0) if highest < lowest * dense_to else (1.0,))


def _shade_windows(axes: Axes, windows: Sequence[Window], width: float) -> None:
    """Shade windows and name faults above the axes; a name that would overlap the previous one is omitted."""
    begin, end = axes.get_xlim()
    letter = (end - begin) * LETTER_WIDTH / width
    free = -math.inf
    for window in windows:
        colour = COLOURS[window.style]
        least = window.start + (end - begin) * 0.002
        axes.axvspan(
            window.start, max(window.end, least), color=colour, alpha=0.15, linewidth=0
        )
        length = letter * len(window.label)
        place = max(begin, min(window.start, end - length))
        if window.style == "fault" and place >= free:
            where: Any = {"va": "bottom", "transform": axes.get_xaxis_transform()}
            axes.text(place, 1.01, window.label, color=colour, fontsize=7.5, **where)
            free = place + length


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names of all series above the plot, in as many columns as fit, and enlarge the figure by their height."""
    handles, names = axes.get_legend_handles_labels()
    letters = int(figure.get_figwidth() / LETTER_WIDTH)
    wrapped = [textwrap.fill(name, letters - MARK_LETTERS) for name in names]
    lines = "\n".join(wrapped).split("\n")
    longest = max(len(line) for line in lines)
    columns = max(1, letters // (longest + MARK_LETTERS))
    names_box = figure.legend(handles, wrapped, ncols=columns, loc="outside upper left")
    height = names_box.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + height)
