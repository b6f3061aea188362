"""Plots of a paper's curves beside ours, as SVG files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from testbed_comparison.rows import Plot, Row
from testbed_comparison.tables import System

FOLDER = "plots"
"""Folder of the plots in the folder of a system."""


def draw_plots(system: System) -> dict[str, str]:
    """Write the plots of a system with results for their rows; return the file of each plot by title.

    Without matplotlib, the extra ``plots``, the files of an earlier call are kept.
    """
    files = {}
    for plot in system.figures.plots:
        place = f"{FOLDER}/{plot.file_name}"
        file = system.folder / place
        if find_spec("matplotlib") and _has_run(system, plot):
            file.parent.mkdir(exist_ok=True)
            # Without a date, equal results give equal files.
            figure = _draw_plot(system, plot)
            figure.savefig(file, metadata={"Date": None})
        if file.is_file():
            files[plot.title] = place
    return files


def _has_run(system: System, plot: Plot) -> bool:
    """Return whether at least one row of a plot has our value."""
    for series in plot.series:
        for name in series.rows:
            row = system.figures.row(name)
            if system.ours(row) is not None:
                return True
    return False


def _draw_plot(system: System, plot: Plot) -> Any:
    # Imported here: tables can be written without matplotlib.
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and names of elements do not change from call to call.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "papers"})
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel=plot.axis)
    places = _x_positions(axes, plot)
    for number, series in enumerate(plot.series):
        rows = {}
        for x, name in zip(places, series.rows, strict=True):
            rows[x] = system.figures.row(name)
        # The paper's values in the colour of ours.
        color = f"C{number}"
        _draw_ours(axes, system, rows, color=color, label=series.label)
        _draw_paper(axes, rows, color=color, label=f"{series.label}, paper")
        # All rows of a series have one unit.
        first_row = next(iter(rows.values()))
        axes.set_ylabel(first_row.unit)
    axes.legend()
    return figure


def _draw_paper(axes: Any, rows: Mapping[float, Row], **style: str) -> None:
    """Draw the paper's values, except of rankings and ranges."""
    places: list[float] = []
    values: list[float] = []
    for x, row in rows.items():
        # A ranking and a range have no single value.
        if row.kind != "ranking" and isinstance(row.paper, str):
            places.append(x)
            values.append(float(row.paper))
    if values:
        axes.plot(places, values, marker="x", linestyle="--", **style)


def _x_positions(axes: Any, plot: Plot) -> list[float]:
    """Return the positions of a plot's values; names become labels in the order of the plot."""
    numbers = [x for x in plot.x if not isinstance(x, str)]
    if len(numbers) == len(plot.x):
        return numbers
    places = list(range(len(plot.x)))
    labels = [str(x) for x in plot.x]
    axes.set_xticks(places, labels)
    return [float(x) for x in places]


def _draw_ours(
    axes: Any, system: System, rows: Mapping[float, Row], **style: str
) -> None:
    """Draw our values with confidence intervals, without rows that were not run."""
    places: list[float] = []
    means: list[float] = []
    halves: list[float] = []
    for x, row in rows.items():
        ours = system.ours(row)
        if ours is not None:
            places.append(x)
            means.append(ours.low)
            halves.append(ours.half_width or 0.0)
    axes.errorbar(places, means, halves, marker="o", **style)
