"""Plots of a paper's curves beside ours, as SVG files."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from testbed_comparison.rows import Plot
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
        if find_spec("matplotlib") and _has_results(system, plot):
            file.parent.mkdir(exist_ok=True)
            _figure(system, plot).savefig(file, metadata={"Date": None})
        if file.is_file():
            found[plot.title] = place
    return found


def _has_results(system: System, plot: Plot) -> bool:
    rows = [system.figures.row(name) for series in plot.series for name in series.rows]
    return any(system.ours(row) is not None for row in rows)


def _figure(system: System, plot: Plot) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and names of elements do not change from call to call.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "papers"})
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel=plot.axis)
    for number, series in enumerate(plot.series):
        rows = [system.figures.row(name) for name in series.rows]
        values = [system.ours(row) for row in rows]
        places = [(x, each) for x, each in zip(plot.x, values, strict=True) if each is not None]
        if places:
            means, halves = [each.low for _, each in places], [each.half_width or 0 for _, each in places]
            axes.errorbar([x for x, _ in places], means, halves, color=f"C{number}", marker="o", label=series.label)
        printed = [(x, row.paper) for x, row in zip(plot.x, rows, strict=True) if isinstance(row.paper, str)]
        paper = [(x, float(value)) for x, value in printed if value not in ("larger", "similar")]
        if paper:
            xs, ys = zip(*paper, strict=True)
            axes.plot(xs, ys, color=f"C{number}", marker="x", linestyle="--", label=f"{series.label}, paper")
        axes.set_ylabel(rows[0].unit)
    axes.legend()
    return figure
