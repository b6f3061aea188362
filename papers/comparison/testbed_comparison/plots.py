"""Plots of a paper's values beside ours, as SVG files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from testbed_comparison.rows import Plot, Row
from testbed_comparison.tables import System

FOLDER = "plots"
"""Folder of the plots in the folder of a system."""


def draw_plots(system: System) -> dict[str, str]:
    """Write the plots of a system that have results; return the path of each plot in the system's folder by title.

    Without matplotlib, the extra ``plots``, the files of an earlier call are kept.
    """
    paths = {}
    for plot in system.figures.plots:
        path = f"{FOLDER}/{plot.file_name}"
        file = system.folder / path
        if find_spec("matplotlib") and _has_run(system, plot):
            file.parent.mkdir(exist_ok=True)
            # Without a date, equal results give equal files.
            figure = _draw_plot(system, plot)
            figure.savefig(file, metadata={"Date": None})
        if file.is_file():
            paths[plot.title] = path
    return paths


def _has_run(system: System, plot: Plot) -> bool:
    """Return whether at least one row of a plot has our value."""
    for series in plot.series:
        for name in series.rows:
            row = system.figures.row(name)
            if system.ours(row) is not None:
                return True
    return False


def _draw_plot(system: System, plot: Plot) -> Any:
    # Imported here, since tables are written without matplotlib as well.
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and equal plots have equal names of elements.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "papers"})
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel=plot.axis)
    positions = _x_positions(axes, plot)
    for number, series in enumerate(plot.series):
        rows = {}
        for x, name in zip(positions, series.rows, strict=True):
            rows[x] = system.figures.row(name)
        # The paper's values have the colour of ours.
        color = f"C{number}"
        _draw_ours(axes, system, rows, color=color, label=series.label)
        _draw_paper(axes, rows, color=color, label=f"{series.label}, paper")
        # All rows of a series have one unit.
        first_row = next(iter(rows.values()))
        axes.set_ylabel(first_row.unit)
    axes.legend()
    return figure


def _draw_paper(axes: Any, rows: Mapping[float, Row], **style: str) -> None:
    """Draw the paper's values, except rankings and ranges, which have no single value."""
    xs: list[float] = []
    values: list[float] = []
    for x, row in rows.items():
        if row.kind != "ranking" and isinstance(row.paper, str):
            xs.append(x)
            values.append(float(row.paper))
    if values:
        axes.plot(xs, values, marker="x", linestyle="--", **style)


def _x_positions(axes: Any, plot: Plot) -> list[float]:
    """Return the positions of a plot's values on the x axis; names become labels at 0, 1, 2, ..."""
    numbers = [x for x in plot.x if not isinstance(x, str)]
    if len(numbers) == len(plot.x):
        return numbers
    positions = list(range(len(plot.x)))
    labels = [str(x) for x in plot.x]
    axes.set_xticks(positions, labels)
    return [float(x) for x in positions]


def _draw_ours(
    axes: Any, system: System, rows: Mapping[float, Row], **style: str
) -> None:
    """Draw our values with confidence intervals, for the rows with results."""
    xs: list[float] = []
    means: list[float] = []
    half_widths: list[float] = []
    for x, row in rows.items():
        ours = system.ours(row)
        if ours is not None:
            xs.append(x)
            means.append(ours.low)
            half_widths.append(ours.half_width or 0.0)
    axes.errorbar(xs, means, half_widths, marker="o", **style)
