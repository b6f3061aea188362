"""Plots by matplotlib: inline in a page, whose colours they take on, and as SVG and PDF files of their own."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

COLOURS = {
    "ink": "#1b2330",
    "soft": "#5b6675",
    "line": "#e1e5eb",
    "blue": "#3273dc",
    "orange": "#e07b22",
    "green": "#2a9d6f",
    "violet": "#8757c9",
    "teal": "#1397a8",
    "grey": "#8792a2",
    "fault": "#d6404f",
    "recovery": "#d99a1c",
}
"""Those of style.css by its names; inline, each becomes the page's own, in a dark page too."""
SERIES = ("blue", "orange", "green", "violet", "teal", "grey")
"""Colours of the series of a plot, in this order; it has no more series than that."""
WIDTH, HEIGHT = 5.2, 2.5
"""Inches."""
LETTER, ROW = 0.075, 0.17
"""Inches: about the width of a letter and the height of a row of text."""
MOST_POINTS = 1500
"""Points drawn of a line: more than pixels across add weight, not detail."""
MOST_LETTERS = 60
"""Of a name in the legend."""
PRINTED = 0.45
"""Opacity of what is as a publication has it."""
STYLE: Any = {
    "font.size": 8,
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
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
    write: Callable[[float], str],
    axis: str = "seconds",
    top: float | None = None,
    at: Sequence[float] | None = None,
) -> Figure:
    """Draw lines, windows behind them.

    The y axis begins at 0 and ends at ``top``, or above the highest point; ``write`` formats its figures. The x axis
    goes over ``range_``, is called ``axis``, and has a figure at each of ``at``, or at round numbers.
    """
    figure, axes = _axes(write, axis)
    low, high = range_[0], range_[1] if range_[1] > range_[0] else range_[0] + 1.0
    axes.set_xlim(low, high)
    _shade(axes, windows, high - low)
    drawn = [(line, thin(line.points)) for line in lines]
    for line, points in drawn:
        if points:
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color=COLOURS[line.colour],
                alpha=PRINTED if line.printed else 1.0,
                linestyle="none" if not line.joined else "dashed" if line.printed else "solid",
                linewidth=1.3,
                marker="o" if line.marks or not line.joined or len(points) == 1 else "",
                markersize=3.5 if line.marks else 3,
                markeredgewidth=0,
                label=f"_{line.name}" if line.printed else line.name,
                clip_on=line.joined and not line.marks,
            )
    highest = max((y for _, points in drawn for _, y in points), default=0.0)
    axes.set_ylim(0.0, top if top is not None else highest * 1.06 or 1.0)
    if at is not None:
        axes.set_xticks(at, [f"{x:g}" for x in at])
    legend(figure, axes)
    return figure


@mpl.rc_context(STYLE)
def bar_plot(groups: Sequence[str], kinds: Sequence[Bars], *, write: Callable[[float], str], axis: str = "") -> Figure:
    """Draw bars side by side in groups, each with its figure above it if there is room for all of them.

    The y axis begins at 0; ``write`` formats its figures. ``axis`` says what the groups are.
    """
    figure, axes = _axes(write, axis)
    room = WIDTH * 0.85 / max(1, len(groups))
    width = 0.8 / max(1, len(kinds))
    texts = [write(value) for kind in kinds for value in kind.values if value is not None]
    labelled = all(len(text) * LETTER <= room * width for text in texts)
    for index, kind in enumerate(kinds):
        places = [group - 0.4 + (index + 0.5) * width for group in range(len(groups))]
        halves = kind.half_widths or [None] * len(kind.values)
        found = [(x, y, half) for x, y, half in zip(places, kind.values, halves, strict=True) if y is not None]
        bars = axes.bar(
            [x for x, _, _ in found],
            [y for _, y, _ in found],
            width * 0.94,
            yerr=[half or math.nan for _, _, half in found] if any(half for _, _, half in found) else None,
            color=COLOURS[kind.colour],
            alpha=PRINTED if kind.printed else 1.0,
            error_kw={"ecolor": COLOURS["ink"], "elinewidth": 1, "capsize": 3},
            label=f"_{kind.name}" if kind.printed else kind.name,
        )
        if labelled:
            axes.bar_label(bars, [write(y) for _, y, _ in found], padding=2, color=COLOURS["soft"], fontsize=7.5)
    wrapped = ["\n".join(textwrap.wrap(group, max(6, int(room / LETTER)))) for group in groups]
    axes.set_xticks(range(len(groups)), wrapped)
    axes.tick_params(axis="x", length=0)
    figure.set_figheight(HEIGHT + ROW * max((text.count("\n") for text in wrapped), default=0))
    axes.set_ylim(bottom=0.0)
    axes.margins(y=0.1)
    legend(figure, axes)
    return figure


def _axes(write: Callable[[float], str], axis: str) -> tuple[Figure, Axes]:
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", linewidth=0.8)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(float(value))))
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.set_xlabel(axis, loc="right")
    return figure, axes


def _shade(axes: Axes, windows: Sequence[Window], span: float) -> None:
    """Shade windows; a label is left out where it would lie on the one before."""
    free = -math.inf
    for window in windows:
        colour = COLOURS[window.style]
        axes.axvspan(window.start, max(window.end, window.start + span * 0.002), color=colour, alpha=0.15, linewidth=0)
        if window.style == "fault" and window.start >= free:
            late = window.start > axes.get_xlim()[0] + span * 0.75
            where = (window.end if late else window.start, 0.97)
            across = "right" if late else "left"
            transform = axes.get_xaxis_transform()
            axes.text(*where, f" {window.label} ", color=colour, ha=across, va="top", fontsize=7.5, transform=transform)
            free = window.start + span * len(window.label) * LETTER / WIDTH


def legend(figure: Figure, axes: Axes) -> None:
    """Put the names of all series above the plot, which grows with their rows."""
    handles, names = axes.get_legend_handles_labels()
    if not handles:
        return
    short = [name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…" for name in names]
    columns = max(1, int(WIDTH / LETTER / (max(map(len, short)) + 6)))
    figure.set_figheight(figure.get_figheight() + ROW * (math.ceil(len(short) / columns) - 1))
    axes.legend(
        handles, short, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False, handlelength=1.2
    )


@mpl.rc_context(STYLE)
def save(figure: Figure, path: Path) -> None:
    """Write the plot beside ``path`` as ``.svg`` and ``.pdf``, the same bytes each time."""
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None}, facecolor="white")
    figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None}, facecolor="white")


@mpl.rc_context(STYLE)
def inline(figure: Figure, title: str) -> Markup:
    """Return the plot as an SVG element for a page with style.css, which gives it colours and font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
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
