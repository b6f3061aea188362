"""Lines, stacks and bars drawn by matplotlib.

Text and lines have the same size at every width: a wider plot wraps and omits fewer labels. Values are in SI units, and
axes have a unit that suits the largest value, such as ms (`_Scale`).
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
"""Hatching of bars for each style of a line."""
WIDTH, HEIGHT = 4.2, 2.2
"""Size on a page in inches, without the legend."""
LOG_FROM = 10.0
"""Minimum ratio of the highest to the lowest value for a logarithmic y axis of lines."""
LOG_BARS_FROM = 100.0
"""The same ratio for bars; larger, because lengths on a logarithmic axis cannot be compared."""
LOG_X_FROM = 20.0
"""The same ratio for the x axis: swept values such as 1, 2, 5, 10 are legible on a linear axis."""
DENSE_X_TO = 100.0
"""Ratio of the ends of a logarithmic x axis up to which 2 and 5 of each decade have a tick: two decades."""
DENSE_Y_TO = 1000.0
"""The same ratio for the y axis; larger, because its labels are above each other and need less space."""
PADDING = 1.06
"""Ratio of the end of a linear y axis to the largest value."""
LOG_X_PADDING, LOG_Y_PADDING = 1.1, 1.2
"""Ratio of the end of a logarithmic axis to the largest value, and of the lowest value to its beginning."""
GROUP_WIDTH = 0.8
"""Width of a group of bars, where neighbouring groups have the distance 1."""
BAR_SHARE = 0.94
"""Width of a bar as a part of its space in the group, which separates neighbouring bars."""
AXES_SHARE = 0.85
"""Approximate part of a figure's width inside the axes."""
FEWEST_LETTERS = 6
"""Minimum number of letters in a line of a group's label, however narrow the groups are."""
SHORTEST_WINDOW = 0.002
"""Minimum width of a window as a part of the x axis, so that an instant is visible."""
LETTER_WIDTH = 0.075
"""Approximate width of a letter in inches."""
MARK_LETTERS = 6
"""Width of the mark beside a name in a legend, in letters."""
MOST_LABELLED = 10
"""Maximum number of bars with value labels."""
ERROR_BAR_DISTANCE = 3.0
"""Distance in points (1/72 inch) between error bars of different lines at equal x, which would hide each other."""
STYLE: Any = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    # Text stays text, in the font of the page, instead of outlines.
    "svg.fonttype": "none",
    # TrueType fonts: many publishers refuse Type 3, matplotlib's default.
    "pdf.fonttype": 42,
    # Fixed, so that equal plots have equal identifiers and files.
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
"""Settings of matplotlib for all plots."""


@mpl.rc_context(STYLE)
def draw_lines(plot: LinePlot, width: float) -> Figure:
    """Draw lines with background windows."""
    figure, axes = _make_axes(width, plot.x)
    drawn: list[Line] = []
    values: list[float] = []
    # Ends of the intervals around the values.
    ends: list[float] = []
    for line in plot.lines:
        finite = line.with_finite_points()
        if finite.points:
            drawn.append(finite)
            heights = [value for _, value in finite.points]
            values += heights
            ends += _interval_ends(plot.y, heights, finite.half_widths)
    scale = _scale_axis(axes, plot.y, values, ends, LOG_FROM)
    _set_range(axes, plot, drawn)
    unmarked_count = 0
    error_bar_count = 0
    for line in drawn:
        if not line.is_marked:
            unmarked_count += 1
        elif line.half_widths:
            error_bar_count += 1
    error_bars_drawn = 0
    for line in drawn:
        transform = axes.transData
        # Lines with error bars are drawn side by side, centred about x.
        if line.is_marked and line.half_widths:
            position = error_bars_drawn - (error_bar_count - 1) / 2
            transform = _shift_sideways(axes, position * ERROR_BAR_DISTANCE)
            error_bars_drawn += 1
        _draw_line(axes, line, scale, transform, several_unmarked=unmarked_count > 1)
    _shade_windows(axes, plot.windows, width)
    add_legend(figure, axes)
    return figure


def _set_range(axes: Axes, plot: LinePlot, drawn: Sequence[Line]) -> None:
    """Set the limits and the scale of the x axis."""
    low, high = plot.x_range
    # An axis needs a range, also for a single x, such as the only step of a run.
    if high <= low:
        high = low + 1.0
    axes.set_xlim(low, high)
    if plot.swept and low > 0 and high >= low * LOG_X_FROM:
        axes.set_xscale("log", subs=())
        axes.xaxis.set_major_locator(_tick_locator(low, high, DENSE_X_TO))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlim(low / LOG_X_PADDING, high * LOG_X_PADDING)
        return
    xs = [x for line in drawn for x, _ in line.points]
    # Counted values such as epochs have no ticks at 1.5.
    if all(float(x).is_integer() for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _interval_ends(
    y: Axis, values: Sequence[float], half_widths: Sequence[float | None]
) -> list[float]:
    """Return the ends of the intervals around values; empty without intervals."""
    if not half_widths:
        return []
    centres = np.array(values)
    down, up = np.nan_to_num(y.intervals(centres, half_widths))
    return [*(centres - down), *(centres + up)]


def _shift_sideways(axes: Axes, points: float) -> Transform:
    """Return the data's coordinates, shifted along x by a number of typographic points (1/72 inch)."""
    figure = axes.get_figure()
    if figure is None or not points:
        return axes.transData
    shift = ScaledTranslation(points / 72, 0.0, figure.dpi_scale_trans)
    return axes.transData + shift


def _draw_line(
    axes: Axes,
    line: Line,
    scale: _Scale,
    transform: Transform,
    *,
    several_unmarked: bool,
) -> None:
    """Draw one line; several unmarked lines get a few distinguishing marks each."""
    # A line with intervals keeps all points, since each half width belongs to a point.
    points = line.points if line.half_widths else thin(line.points)
    xs, ys = (np.array(part) for part in zip(*points, strict=True))
    # A colour that is not one of the series has the mark of the first series.
    number = SERIES.index(line.colour) if line.colour in SERIES else 0
    colour = COLOURS[line.colour]
    if line.half_widths:
        _draw_intervals(axes, line, xs, ys, scale, transform)
    mark_every: Any = 1
    if not line.is_marked:
        # Position of the first mark and distance of the marks, as shares of the axes' diagonal. The first marks of the
        # lines are at different positions, so that marks do not hide each other.
        mark_every = (0.04 + 0.04 * number, 0.28)
    axes.plot(
        xs,
        scale(ys),
        transform=transform,
        color=colour,
        linestyle=line.dash if line.joined else "none",
        marker=MARKS[number] if line.is_marked or several_unmarked else "",
        markevery=mark_every,
        markersize=3.5,
        label=line.name,
        # Marks at the border of the axes are drawn completely.
        clip_on=line.joined and not line.mark_points,
    )


def _draw_intervals(
    axes: Axes,
    line: Line,
    xs: Numbers,
    ys: Numbers,
    scale: _Scale,
    transform: Transform,
) -> None:
    """Draw the confidence intervals of a line as error bars at the marks, or as a band if the marks are few."""
    colour = COLOURS[line.colour]
    if line.is_marked:
        style = {"transform": transform, "ecolor": colour}
        _draw_whiskers(axes, xs, ys, line.half_widths, scale, **style)
        return
    down, up = scale.intervals(ys, line.half_widths)
    low = scale(ys) - down
    high = scale(ys) + up
    axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_whiskers(
    axes: Axes,
    xs: Numbers,
    ys: Numbers,
    half_widths: Sequence[float | None],
    scale: _Scale,
    **style: Any,
) -> None:
    """Draw intervals around values as error bars."""
    down, up = scale.intervals(ys, half_widths)
    # On a logarithmic axis, a lower end at or below 0 is drawn at the border.
    down = np.minimum(down, scale(ys) - axes.get_ylim()[0])
    error_bars = axes.errorbar(
        xs, scale(ys), [down, up], fmt="none", elinewidth=1, capthick=1, **style
    )
    for artist in error_bars.get_children():
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
    # An infinite ratio keeps the axis linear, on which the heights of parts can be compared.
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
    for instant in plot.instants:
        axes.axvline(instant, color=COLOURS["ink"], linewidth=0.8, linestyle="dotted")
    add_legend(figure, axes)
    return figure


def _sample_steps(points: Points, times: Sequence[float]) -> np.ndarray[Any, Any]:
    """Sample a step function at rising times: the value of the latest point, or 0 before the first point."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    values = np.array([0.0, *ys])
    # The number of points up to each time is also the index of the latest one, because of the leading 0.
    counts = np.searchsorted(xs, times, side="right")
    return values[counts]


@mpl.rc_context(STYLE)
def draw_bars(plot: BarPlot, width: float) -> Figure:
    """Draw grouped bars, with value labels for few bars."""
    groups = plot.groups
    figure, axes = _make_axes(width, plot.x)
    bar_width = GROUP_WIDTH / max(1, len(plot.series))
    values: list[float] = []
    # Ends of the intervals around the values.
    ends: list[float] = []
    for bars in plot.series:
        _, heights, half_widths = _finite_bars(bars)
        values += heights
        ends += _interval_ends(plot.y, heights, half_widths)
    scale = _scale_axis(axes, plot.y, values, ends, LOG_BARS_FROM)
    is_labelled = len(values) <= MOST_LABELLED
    for index, bars in enumerate(plot.series):
        offset = (index + 0.5) * bar_width - GROUP_WIDTH / 2
        _draw_series(axes, bars, offset, bar_width, scale, is_labelled=is_labelled)
    group_width = width * AXES_SHARE / max(1, len(groups))
    letters = max(FEWEST_LETTERS, int(group_width / LETTER_WIDTH))
    labels = [textwrap.fill(group, letters) for group in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.tick_params(axis="x", length=0)
    if axes.get_yscale() == "linear":
        # Scaled again, with a margin for error bars and labels. Without negative values, the axis begins at 0.
        bottom = None if min(values, default=0.0) < 0 else 0.0
        axes.set_ylim(bottom, None, auto=True)
        axes.margins(y=0.1)
    add_legend(figure, axes)
    return figure


def _finite_bars(bars: Bars) -> tuple[list[int], list[float], list[float | None]]:
    """Return the numbers of the groups in which a series has a finite value, the values, and their half widths.

    The half widths are empty for a series without intervals.
    """
    groups: list[int] = []
    values: list[float] = []
    for group, value in enumerate(bars.values):
        if value is not None and math.isfinite(value):
            groups.append(group)
            values.append(value)
    half_widths: list[float | None] = []
    if any(bars.half_widths):
        half_widths = [bars.half_widths[group] for group in groups]
    return groups, values, half_widths


def _draw_series(
    axes: Axes,
    bars: Bars,
    offset: float,
    width: float,
    scale: _Scale,
    *,
    is_labelled: bool,
) -> None:
    """Draw the bars of one series; ``offset`` is the distance from the middle of a group to the middle of the bar."""
    groups, values, half_widths = _finite_bars(bars)
    # The middle of a group is at its number.
    xs = offset + np.array(groups)
    heights = np.array(values, float)
    container = axes.bar(
        xs,
        scale(heights),
        width * BAR_SHARE,
        color=COLOURS[bars.colour],
        hatch=HATCHES[bars.dash],
        edgecolor=COLOURS["card"],
        linewidth=0,
        label=bars.name,
    )
    if half_widths:
        _draw_whiskers(axes, xs, heights, half_widths, scale, ecolor=COLOURS["ink"])
    if is_labelled:
        texts = []
        for value in scale(heights):
            three_digits = float(f"{value:.3g}")
            texts.append(formats.number(three_digits))
        axes.bar_label(container, texts, padding=2, color=COLOURS["soft"], fontsize=7.5)


def _make_axes(width: float, x_title: str) -> tuple[Figure, Axes]:
    figure = Figure((width, HEIGHT))
    axes = figure.subplots()
    axes.set_xlabel(x_title)
    return figure, axes


@dataclass(frozen=True)
class _Scale:
    """Converts values to the unit of an axis."""

    y: Axis
    factor: float
    """One unit of the axis, in SI units."""

    def __call__(self, values: Numbers) -> np.ndarray[Any, Any]:
        return np.asarray(values) / self.factor

    def intervals(
        self, values: Numbers, half_widths: Sequence[float | None]
    ) -> np.ndarray[Any, Any]:
        """Return the widths of intervals below and above values, see `Axis.intervals`."""
        return self.y.intervals(values, half_widths) / self.factor


def _scale_axis(
    axes: Axes, y: Axis, values: Numbers, ends: Numbers, log_from: float
) -> _Scale:
    """Set title, scale and limits of the y axis.

    The limits include the ``ends`` of intervals; a logarithmic axis begins at the lowest value, as lower ends may be 0.
    """
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    # ``factor`` is the size of the unit, in SI units.
    factor, unit = formats.unit(y.kind, max(highest, -lowest))
    axes.set_ylabel(f"{y.title} ({unit})" if unit else y.title)
    # Shares always have a linear axis from 0.
    if y.kind != "share" and lowest > 0 and highest >= lowest * log_from:
        axes.set_yscale("log", subs=())
        axes.yaxis.set_major_locator(_tick_locator(lowest, highest, DENSE_Y_TO))
        bottom = lowest / factor
        top = max([highest, *ends]) / factor
        axes.set_ylim(bottom / LOG_Y_PADDING, top * LOG_Y_PADDING)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        bottom = min(0.0, lowest, *ends) / factor
        top = max(0.0, highest, *ends) / factor
        # An axis needs a range, also without values or with zeros alone.
        axes.set_ylim(bottom * PADDING, top * PADDING if top > bottom else 1.0)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: formats.number(float(value)))
    )
    return _Scale(y, factor)


def _tick_locator(lowest: float, highest: float, dense_to: float) -> LogLocator:
    """Return the ticks of a logarithmic axis: 1, 2 and 5 of each decade below the ratio ``dense_to``, else decades."""
    if highest < lowest * dense_to:
        return LogLocator(subs=(1.0, 2.0, 5.0))
    return LogLocator(subs=(1.0,))


def _shade_windows(axes: Axes, windows: Sequence[Window], width: float) -> None:
    """Shade windows, sorted by start, and name faults above the axes.

    A name that would overlap the previous one is omitted. Only axes of time, which are linear, have windows.
    """
    begin, end = axes.get_xlim()
    letter_width = (end - begin) * LETTER_WIDTH / width
    shortest = (end - begin) * SHORTEST_WINDOW
    label_end = -math.inf
    for window in windows:
        colour = COLOURS[window.style]
        shaded_until = max(window.end, window.start + shortest)
        axes.axvspan(window.start, shaded_until, color=colour, alpha=0.15, linewidth=0)
        length = letter_width * len(window.label)
        left = max(begin, min(window.start, end - length))
        if window.style == "fault" and left >= label_end:
            # x in seconds; y as a part of the axes' height, a little above their top.
            axes.text(
                left,
                1.01,
                window.label,
                color=colour,
                fontsize=7.5,
                va="bottom",
                transform=axes.get_xaxis_transform(),
            )
            label_end = left + length


def add_legend(figure: Figure, axes: Axes) -> None:
    """Name all series above the plot, in as many columns as fit; the figure grows by the height of the legend."""
    handles, names = axes.get_legend_handles_labels()
    letters = int(figure.get_figwidth() / LETTER_WIDTH)
    wrapped = [textwrap.fill(name, letters - MARK_LETTERS) for name in names]
    lines = "\n".join(wrapped).split("\n")
    longest = max(map(len, lines))
    columns = max(1, letters // (longest + MARK_LETTERS))
    legend = figure.legend(handles, wrapped, ncols=columns, loc="outside upper left")
    height = legend.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + height)
