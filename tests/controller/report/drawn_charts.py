"""Drawing of charts for tests, and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from testbed_controller.report import drawing
from testbed_controller.report.charts import Axis, BarPlot, Bars, Line, LinePlot


def draw_axes(plot: Any) -> Any:
    """Draw a plot and return the only axes of the figure."""
    (axes,) = drawing.draw(plot).axes
    return axes


def draw_lines(
    *lines: Line, y: Axis, x_range: tuple[float, float] = (0, 1), swept: bool = False
) -> Any:
    """Draw lines over ``x_range`` and return the axes."""
    return draw_axes(LinePlot(lines, x_range=x_range, y=y, swept=swept))


def draw_bars(names: Sequence[str], *kinds: Bars, y: Axis) -> Any:
    """Draw groups of bars with these names, one bar of each kind, and return the axes."""
    return draw_axes(BarPlot(names, kinds, y=y))


def texts_of(artists: Iterable[Any]) -> list[str]:
    """Return the texts of labels of a figure."""
    return [artist.get_text() for artist in artists]


def boxes_of(artists: Iterable[Any]) -> list[Any]:
    """Return the bounding boxes of visible texts in pixels, which are known after a layout."""
    boxes = []
    for artist in artists:
        # Labels that would touch others are empty.
        if artist.get_text():
            boxes.append(artist.get_window_extent())
    return boxes


def assert_disjoint(boxes: Iterable[Any]) -> None:
    """Fail if neighbouring boxes overlap."""
    for left, right in pairwise(boxes):
        assert not left.overlaps(right)
