"""Plots of a paper's curves beside ours, as SVG files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from testbed_comparison.rows import Plot, Row
from testbed_comparison.tables import System

FOLDER = "plots"


def draw(system: System) -> dict[str, str]:
    """Write the plots of a system whose rows have been run; return the file of each by its title.

    Without matplotlib, the extra ``plots``, the files of an earlier call are kept.
    """
    found = {}
    for plot in system.figures.plots:
        place = f"{FOLDER}/{plot.file_name}"
        file = system.folder / place
        rows = [
            system.figures.row(name) for series in plot.series for name in series.rows
        ]
        if find_spec("matplotlib") and any(map(system.ours, rows)):
            file.parent.mkdir(exist_ok=True)
            _figure(system, plot).savefig(file, metadata={"Date": None})
        if file.is_file():
            found[plot.title] = place
    return found


def _figure(system: System, plot: Plot) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and names of elements do not change from call to call.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "papers"})
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel=plot.axis)
    for number, series in enumerate(plot.series):
        rows = dict(zip(plot.x, map(system.figures.row, series.rows), strict=True))
        _draw_ours(axes, system, rows, color=f"C{number}", label=series.label)
        paper = {
            x: float(row.paper) for x, row in rows.items() if isinstance(row.paper, str)
        }
        style: dict[str, Any] = {
            "color": f"C{number}",
            "marker": "x",
            "linestyle": "--",
        }
        axes.plot([*paper], [*paper.values()], label=f"{series.label}, paper", **style)
        axes.set_ylabel(next(iter(rows.values())).unit)
    axes.legend()
    return figure


def _draw_ours(
    axes: Any, system: System, rows: Mapping[float | str, Row], **style: str
) -> None:
    """Draw our values with their intervals, as far as they were run."""
    found = {
        x: ours
        for x, ours in ((x, system.ours(row)) for x, row in rows.items())
        if ours is not None
    }
    means = [each.low for each in found.values()]
    halves = [each.half_width or 0.0 for each in found.values()]
    axes.errorbar([*found], means, halves, marker="o", **style)
