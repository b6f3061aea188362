"""Charts as plain data, drawn by `.plots` (lines, stacks, bars) and `.devices` (maps, data ownership).

A chart is a plot with title and note. A series is a line or the bars of one kind, with a name in the legend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from testbed.common.formats import MetricKind
from testbed.network.link import Pair
from testbed.network.radio import Position

COLOURS = {
    "ink": "#1b2330",
    "soft": "#5b6675",
    "line": "#e1e5eb",
    "card": "#ffffff",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "violet": "#cc79a7",
    "teal": "#56b4e9",
    "grey": "#4d4d4d",
    "fault": "#d6404f",
    "recovery": "#d99a1c",
}
"""Colours of style.css by name, replaced in pages by CSS variables for dark mode. The series follow Okabe and
Ito (Color Universal Design, 2008) for colour-blind readers."""
SERIES = ("blue", "orange", "green", "violet", "teal", "grey")
"""Colours of the series of a plot, in order."""
Dash = Literal["solid", "dashed", "dotted"]
"""Style of a line, in matplotlib's words."""


def _make_styles() -> Iterator[tuple[str, Dash]]:
    # First all colours as solid lines, then all as dashed lines, then all as dotted lines.
    for dash in get_args(Dash):
        for colour in SERIES:
            yield colour, dash


STYLES: tuple[tuple[str, Dash], ...] = tuple(_make_styles())
"""Colour and dash of the series of a plot, in order; their number is the maximum number of series."""
MAX_POINTS = 1500
"""Maximum number of drawn points per line: more points than the plot has pixels add size without detail."""
MAX_MARKED_POINTS = 60
"""Maximum number of points per line with a mark at each point."""
Points = Sequence[tuple[float, float]]
"""Points (x, y), usually (seconds of the run, value)."""
Numbers = Sequence[float] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Line:
    """One line of a plot: (x, y) in the order of x."""

    name: str
    points: Points
    colour: str
    """One of `COLOURS`."""
    dash: Dash = "solid"
    mark_points: bool = False
    """Whether to mark every point; useful for few points."""
    joined: bool = True
    """Whether lines join the points."""
    half_widths: Sequence[float | None] = ()
    """Half widths of the confidence intervals, one per point: error bars with marks, else a band.

    None for a point without an interval; empty for a line without intervals.
    """

    @property
    def is_marked(self) -> bool:
        """Whether each point has a mark."""
        return self.mark_points or not self.joined or len(self.points) == 1

    def with_finite_points(self) -> Line:
        """Return the line without NaN and infinite values."""
        points = []
        half_widths = []
        for index, point in enumerate(self.points):
            if not math.isfinite(point[1]):
                continue
            points.append(point)
            # A line has half widths for all points, or for none.
            if self.half_widths:
                half_widths.append(self.half_widths[index])
        return replace(self, points=points, half_widths=half_widths)


@dataclass(frozen=True)
class Bars:
    """Bars of one series, one for each group of a plot; a value of None or NaN draws no bar."""

    name: str
    values: Sequence[float | None]
    colour: str
    half_widths: Sequence[float | None] = ()
    """Half widths of the intervals around the values; None or empty as in a `Line`."""
    dash: Dash = "solid"
    """Decides the hatching, so that series differ as in a plot with lines."""


@dataclass(frozen=True)
class Axis:
    """Title and kind of values of an axis; the kind determines the unit."""

    title: str
    kind: MetricKind = "number"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest possible end of an interval: 0 and 1 for shares."""
        return (0.0, 1.0) if self.kind == "share" else (-math.inf, math.inf)

    def intervals(
        self, values: Numbers, half_widths: Sequence[float | None]
    ) -> np.ndarray[Any, Any]:
        """Return the widths of intervals below and above values, with shape (2, values); NaN without an interval."""
        # numpy converts None to NaN.
        widths = np.array(half_widths, float)
        centres = np.array(values)
        lowest, highest = self.bounds
        # The interval of a share ends at 0 and 1, unless the value itself is outside these bounds.
        below = np.where(centres < lowest, math.inf, centres - lowest)
        above = np.where(centres > highest, math.inf, highest - centres)
        return np.array([np.minimum(widths, below), np.minimum(widths, above)])


@dataclass(frozen=True)
class Window:
    """A shaded interval of the x axis."""

    start: float
    end: float
    label: str
    style: str = "fault"
    """Kind of window: fault, drawn with its label, or recovery."""


@dataclass(frozen=True)
class LinePlot:
    """Lines with background windows.

    The y axis begins at 0 or at the lowest negative value, or is logarithmic if values are far apart (`LOG_FROM` of
    `.plots`).
    """

    lines: Sequence[Line]
    windows: Sequence[Window] = ()
    _: KW_ONLY
    x_range: tuple[float, float]
    """Ends of the x axis."""
    y: Axis
    x: str = "time (s)"
    """Title of the x axis."""
    swept: bool = False
    """Whether x is a swept value, whose axis is logarithmic for a wide range."""


@dataclass(frozen=True)
class StackedPlot:
    """Shares of a whole over the seconds from 0 to ``end``; a value holds until the next one."""

    lines: Sequence[Line]
    """At least one line."""
    instants: Sequence[float]
    """Times of vertical lines, in seconds of the run."""
    _: KW_ONLY
    end: float
    y: Axis


@dataclass(frozen=True)
class BarPlot:
    """Grouped bars, labelled with their values if space permits.

    The y axis begins at 0 or at the lowest negative value, or is logarithmic if values are far apart (`LOG_BARS_FROM`
    of `.plots`).
    """

    groups: Sequence[str]
    """Labels of the groups along the x axis."""
    series: Sequence[Bars]
    _: KW_ONLY
    y: Axis
    x: str = ""
    """Title of the x axis."""


@dataclass(frozen=True)
class DeviceMap:
    """Device positions and the links between them.

    A link is drawn in two halves: the half next to device A shows the share of A's casts that the other device
    receives.
    """

    positions: Mapping[str, Position]
    ratios: Mapping[Pair, float]
    """Packet reception ratio of each directed link, from 0 to 1."""
    units: Mapping[str, str]
    """Model units of each device, as text."""
    area: tuple[float, float]
    """Width and height in metres."""


@dataclass(frozen=True)
class Ownership:
    """Data ownership: a disc per device and class, with an area proportional to the samples."""

    owned: Mapping[str, Mapping[str, int]]
    """Number of samples of each device by class, as in a manifest."""
    order: str = "the scenario"
    """The list in whose order the devices are drawn, as it completes "by its place in"."""


Plot = LinePlot | StackedPlot | BarPlot | DeviceMap | Ownership


class Chart(NamedTuple):
    """A plot with title and note."""

    title: str
    note: str
    plot: Plot | None
    """None if nothing can be drawn; the note then gives the reason."""


def thin(points: Points, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most ``max_points`` points (4 or more), which show the same ends and extremes.

    The points between the first and the last one are divided into stretches of equally many points, and the lowest and
    the highest point of each stretch are kept. Values that are not finite are omitted.

    >>> thin([(0, 2.0), (1, 1.0), (2, 9.0), (3, 2.0), (4, 3.0)], max_points=4)
    [(0, 2.0), (1, 1.0), (2, 9.0), (4, 3.0)]
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= max_points:
        return finite
    first, *inner, last = finite
    # Two points of each stretch are kept, besides the ends.
    stretch_count = (max_points - 2) // 2
    stretch_size = math.ceil(len(inner) / stretch_count)
    kept = [first]
    for start in range(0, len(inner), stretch_size):
        stretch = inner[start : start + stretch_size]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        # In a set, since a flat stretch has one point for both.
        kept += sorted({lowest, highest})
    return [*kept, last]
