"""Drawing of charts with matplotlib: inline SVG in the colours of the page, and SVG and PDF files.

matplotlib belongs to the extra ``plots``, which may be missing: import this module only to draw, after
`require_extra("matplotlib", "plots", ...)`.
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

PRINT_WIDTHS = {"": 3.5, "-wide": 7.16}
"""Suffix of a file's name -> width of its plot in inches: one column and two columns of an IEEE paper."""


def draw(plot: Plot, *, width: float = WIDTH) -> Figure:
    """Draw a plot at a width in inches; the default is the width on a page of a report."""
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
    """Write ``<path>.svg`` and ``<path>.pdf`` for one column of a paper, ``<path>-wide.svg`` and ``.pdf`` for two.

    The same plot gives the same bytes each time: files have no date, and the identifiers in an SVG are hashes with the
    salt of `STYLE` instead of random numbers.
    """
    for suffix, width in PRINT_WIDTHS.items():
        figure = draw(plot, width=width)
        name = path.with_name(path.name + suffix)
        figure.savefig(f"{name}.svg", metadata={"Date": None}, facecolor="white")
        figure.savefig(
            f"{name}.pdf", metadata={"CreationDate": None}, facecolor="white"
        )


def save_all(folder: Path, charts: Iterable[Chart]) -> list[str]:
    """Save the plots of a page in a folder; return the file name of each plot without ``-wide`` and extension.

    A name consists of the number of the chart on its page and of the words of its title, such as ``1-loss``. A chart
    without a plot has no file.
    """
    names = []
    for number, (title, _, plot) in enumerate(charts, 1):
        if plot is None:
            continue
        words = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        name = f"{number}-{words}"
        save(plot, folder / name)
        names.append(name)
    return names


@mpl.rc_context(STYLE)
def inline(plot: Plot, title: str) -> Markup:
    """Return the plot as an SVG element for a page with style.css; ``title`` is the text for screen readers."""
    buffer = io.StringIO()
    draw(plot).savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    file = buffer.getvalue()
    # In a page the element begins without the XML declaration and the document type of a file.
    svg = file[file.index("<svg") :]
    # Matplotlib's style element would apply to the whole page; its metadata would make pages depend on its version.
    svg = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", "", svg, flags=re.DOTALL
    )
    # Matplotlib numbers groups such as "line2d_1" in each plot, so that a page with several plots would have such an
    # identifier twice. Nothing refers to them; identifiers of shapes that are referred to are hashes and remain.
    svg = re.sub(r' id="[a-z]+[\w.]*_\d+"', "", svg)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    # The font of the page. The plot was laid out with the widths of DejaVu Sans, which matplotlib contains.
    svg = svg.replace("'DejaVu Sans'", "system-ui, sans-serif")
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    # Only the view box remains of the element's attributes: without width and height, style.css decides the size.
    start = Markup('<svg class="chart" role="img" aria-label="{}" ').format(title)
    return start + Markup(view_box[0]) + Markup(svg[svg.index(">") :])
