"""Lines, stacks and bars drawn by matplotlib.

Text and lines have the same size at every width: a wider plot wraps and omits fewer labels.
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
"""The same ratio for the x axis: swept values up to 1, 2, 5, 10 are legible on a linear axis."""
DENSE_X_TO = 100.0
"""Ratio of the ends of a logarithmic x axis up to which 2 and 5 of each decade have a tick: two decades."""
DENSE_Y_TO = 1000.0
"""The same ratio for the y axis, whose labels do not lie side by side."""
PADDING = 1.06
"""Ratio of the end of a linear y axis to the largest value."""
LOG_X_PADDING, LOG_Y_PADDING = 1.1, 1.2
"""Ratio of the end of a logarithmic axis to the largest value, and of the lowest value to its beginning."""
GROUP_WIDTH = 0.8
"""Width of a group of bars; the next group is 1 away."""
BAR_SHARE = 0.94
"""Part of a bar's place that the bar fills."""
AXES_SHARE = 0.85
"""Approximate part of a figure's width inside the axes."""
FEWEST_LETTERS = 6
"""Minimum length of a line of a group's label."""
SHORTEST_WINDOW = 0.002
"""Minimum width of a window as a part of the x axis, so that an instant is visible."""
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


@mpl.rc_context(STYLE)
def draw_lines(plot: LinePlot, width: float) -> Figure:
    """Draw lines with background windows."""
    figure, axes = _make_axes(width, plot.x)
    drawn: list[Line] = []
    values: list[float] = []
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
        # Error bars at equal x would hide each other: they stand side by side, centred about x.
        if line.is_marked and line.half_widths:
            position = error_bars_drawn - (error_bar_count - 1) / 2
            transform = _shift_sideways(axes, position * APART)
            error_bars_drawn += 1
        _draw_line(axes, line, scale, transform, several_unmarked=unmarked_count > 1)
    _shade_windows(axes, plot.windows, width)
    add_legend(figure, axes)
    return figure


def _set_range(axes: Axes, plot: LinePlot, drawn: Sequence[Line]) -> None:
    """Set the limits and the scale of the x axis."""
    low, high = plot.x_range
    # A single x, such as the only step of a run, has no range to be drawn.
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
    if all(float(x).is_integer() for x in xs):
        # There is no epoch 1.5.
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
    # Each half width belongs to a point, so lines with intervals keep all points.
    points = line.points if line.half_widths else thin(line.points)
    xs, ys = (np.array(part) for part in zip(*points, strict=True))
    # Colours outside the series have the mark of the first one.
    number = SERIES.index(line.colour) if line.colour in SERIES else 0
    colour = COLOURS[line.colour]
    if line.half_widths:
        _draw_intervals(axes, line, xs, ys, scale, transform)
    mark_every: Any = 1
    if not line.is_marked:
        # Start and distance as shares of the axes' diagonal. Lines start apart, so that no mark hides another one.
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
        # Marks at the border of the axes are drawn whole.
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
    """Draw the confidence intervals of a line: error bars at marks, else a band."""
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
    # On a logarithmic axis the lower end could be 0 or below; it then lies at the border.
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
    # An infinite ratio: heights of parts can be compared on a linear axis only.
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
    """Sample a step function at rising times: the last point so far, or 0 before the first."""
    xs, ys = zip(*points, strict=True) if points else ((), ())
    # `searchsorted` counts the points up to each time, which is the index of the last of them behind the leading 0.
    return np.array([0.0, *ys])[np.searchsorted(xs, times, side="right")]


@mpl.rc_context(STYLE)
def draw_bars(plot: BarPlot, width: float) -> Figure:
    """Draw grouped bars, with value labels for few bars."""
    groups, kinds = plot.groups, plot.kinds
    figure, axes = _make_axes(width, plot.x)
    bar_width = GROUP_WIDTH / max(1, len(kinds))
    values: list[float] = []
    ends: list[float] = []
    for kind in kinds:
        _, heights, half_widths = _present_bars(kind)
        values += heights
        ends += _interval_ends(plot.y, heights, half_widths)
    scale = _scale_axis(axes, plot.y, values, ends, LOG_BARS_FROM)
    is_labelled = len(values) <= MOST_LABELLED
    for index, kind in enumerate(kinds):
        centre = (index + 0.5) * bar_width - GROUP_WIDTH / 2
        _draw_kind(axes, kind, centre, bar_width, scale, is_labelled=is_labelled)
    group_width = width * AXES_SHARE / max(1, len(groups))
    letters = max(FEWEST_LETTERS, int(group_width / LETTER_WIDTH))
    labels = [textwrap.fill(group, letters) for group in groups]
    axes.set_xticks(range(len(groups)), labels)
    axes.tick_params(axis="x", length=0)
    if axes.get_yscale() == "linear":
        # Scaled again, to make room for whiskers and labels; bars without negative values stand on the axis.
        bottom = None if min(values, default=0.0) < 0 else 0.0
        axes.set_ylim(bottom, None, auto=True)
        axes.margins(y=0.1)
    add_legend(figure, axes)
    return figure


def _present_bars(kind: Bars) -> tuple[list[int], list[float], list[float | None]]:
    """Return groups, values and half widths (empty for none) of the bars with a finite value."""
    groups: list[int] = []
    values: list[float] = []
    for group, value in enumerate(kind.values):
        if value is not None and math.isfinite(value):
            groups.append(group)
            values.append(value)
    half_widths: list[float | None] = []
    if any(kind.half_widths):
        half_widths = [kind.half_widths[group] for group in groups]
    return groups, values, half_widths


def _draw_kind(
    axes: Axes,
    kind: Bars,
    centre: float,
    width: float,
    scale: _Scale,
    *,
    is_labelled: bool,
) -> None:
    """Draw the bars of one series; ``centre`` is the middle of the bar in the first group."""
    groups, values, half_widths = _present_bars(kind)
    at = centre + np.array(groups)
    heights = np.array(values, float)
    bars = axes.bar(
        at,
        scale(heights),
        width * BAR_SHARE,
        color=COLOURS[kind.colour],
        hatch=HATCHES[kind.dash],
        edgecolor=COLOURS["card"],
        linewidth=0,
        label=kind.name,
    )
    if half_widths:
        _draw_whiskers(axes, at, heights, half_widths, scale, ecolor=COLOURS["ink"])
    if is_labelled:
        texts = []
        for value in scale(heights):
            three_digits = float(f"{value:.3g}")
            texts.append(formats.number(three_digits))
        axes.bar_label(bars, texts, padding=2, color=COLOURS["soft"], fontsize=7.5)


def _make_axes(width: float, x: str) -> tuple[Figure, Axes]:
    figure = Figure((width, HEIGHT))
    axes = figure.subplots()
    axes.set_xlabel(x)
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
    factor, unit = formats.unit(y.kind, max(highest, -lowest))
    axes.set_ylabel(f"{y.title} ({unit})" if unit else y.title)
    # Shares are read from 0 to 1.
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
        # Without values, or with zeros alone, there is no range to be drawn.
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
            where: Any = {"va": "bottom", "transform": axes.get_xaxis_transform()}
            axes.text(left, 1.01, window.label, color=colour, fontsize=7.5, **where)
            label_end = left + length


def add_legend(figure: Figure, axes: Axes) -> None:
    """Name all series above the plot, in as many columns as fit; the figure grows by the height of the legend."""
    handles, names = axes.get_legend_handles_labels()
    letters = int(figure.get_figwidth() / LETTER_WIDTH)
    wrapped = [textwrap.fill(name, letters - MARK_LETTERS) for name in names]
    lines = "\n".join(wrapped).split("\n")
    longest = max(map(len, lines))
    columns = max(1, letters // (longest + MARK_LETTERS))
    names_box = figure.legend(handles, wrapped, ncols=columns, loc="outside upper left")
    height = names_box.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + height)
