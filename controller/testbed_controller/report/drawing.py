"""Drawing of charts with matplotlib: inline SVG in the colours of the page, and SVG and PDF files.

matplotlib is an extra: import this module only to draw, after `require_extra("matplotlib", "plots", ...)`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from testbed_controller.report.charts import (
    COLOURS,
    BarPlot,
    Chart,
    DeviceMap,
    LinePlot,
    Ownership,
    Plot,
    StackedPlot,
)
from testbed_controller.report.devices import draw_map, draw_owned
from testbed_controller.report.plots import (
    STYLE,
    WIDTH,
    draw_bars,
    draw_lines,
    draw_stack,
)

PRINT = {"": 3.5, "-wide": 7.16}
"""Suffix of a file name and its width in inches: one and two columns of an IEEE paper."""


def draw(plot: Plot, *, width: float = WIDTH) -> Figure:
    """Draw a plot at a width in inches."""
    match plot:
        case LinePlot():
            return draw_lines(plot, width)
        case StackedPlot():
            return draw_stack(plot, width)
        case BarPlot():
            return draw_bars(plot, width)
        case DeviceMap():
            return draw_map(plot, width)
        case Ownership():
            return draw_owned(plot, width)


@mpl.rc_context(STYLE)
def save(plot: Plot, path: Path) -> None:
    """Write ``<path>.svg`` and ``.pdf`` for one column and ``<path>-wide`` for two, the same bytes each time."""
    for end, width in PRINT.items():
        figure = draw(plot, width=width)
        name = path.with_name(path.name + end)
        figure.savefig(f"{name}.svg", metadata={"Date": None}, facecolor="white")
        figure.savefig(
            f"{name}.pdf", metadata={"CreationDate": None}, facecolor="white"
        )


def save_all(folder: Path, charts: Iterable[Chart]) -> list[str]:
    """Save the plots of a page, given with title and note, in a folder; return the names of their files."""
    names = []
    for number, (title, _, plot) in enumerate(charts, 1):
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        name = f"{number}-{words}"
        names.append(name)
        if plot is not None:
            save(plot, folder / name)
    return names


@mpl.rc_context(STYLE)
def inline(plot: Plot, title: str) -> Markup:
    """Return the plot as an SVG element styled by style.css."""
    buffer = io.StringIO()
    draw(plot).savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    # The page's own style applies, and metadata would name matplotlib's version.
    drawn = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>",
        "",
        text[text.index("<svg") :],
        flags=re.DOTALL,
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
