"""Plain data of charts, drawn by `.plots` (lines, stacks, bars) and `.devices` (maps, data ownership)."""

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


def _make_styles() -> Iterator[tuple[str, Dash]]:
    # All colours solid before the first dashed one.
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
    """Bars of one kind, one for each group of a plot; a value of None or NaN draws no bar."""

    name: str
    values: Sequence[float | None]
    colour: str
    half_widths: Sequence[float | None] = ()
    """Half widths of the intervals around the values; None or empty as in a `Line`."""
    dash: Dash = "solid"
    """Hatching, equivalent to the dash of a line of the same series."""


@dataclass(frozen=True)
class Axis:
    """Title and kind of values of an axis; the kind determines the unit."""

    title: str
    kind: MetricKind = "number"

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest end of an interval: 0 and 1 for shares."""
        return (0.0, 1.0) if self.kind == "share" else (-math.inf, math.inf)

    def intervals(
        self, values: Numbers, half_widths: Sequence[float | None]
    ) -> np.ndarray[Any, Any]:
        """Return the widths of intervals below and above values, (2, values); NaN without an interval."""
        # numpy converts None to NaN.
        widths = np.array(half_widths, float)
        centres = np.array(values)
        lowest, highest = self.bounds
        # A share is from 0 to 1, so the interval ends there, unless the value itself is outside.
        below = np.where(centres < lowest, math.inf, centres - lowest)
        above = np.where(centres > highest, math.inf, highest - centres)
        return np.array([np.minimum(widths, below), np.minimum(widths, above)])


@dataclass(frozen=True)
class Window:
    """A shaded interval of x."""

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
    """Whether x is a swept value, with a logarithmic axis for a wide range."""


@dataclass(frozen=True)
class StackedPlot:
    """Shares of a whole over the seconds from 0 to ``end``; a value holds until the next one."""

    lines: Sequence[Line]
    """At least one line."""
    instants: Sequence[float]
    """Seconds marked by vertical lines."""
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
    kinds: Sequence[Bars]
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
    held: Mapping[str, str]
    """Model units of each device, as text."""
    area: tuple[float, float]
    """Width and height in metres."""


@dataclass(frozen=True)
class Ownership:
    """Data ownership: a disc per device and class, with an area proportional to the samples."""

    owned: Mapping[str, Mapping[str, int]]
    """Samples of each device by class, as in a manifest."""
    order: str = "the scenario"
    """Noun that completes "in the order of": the list in whose order the devices are drawn."""


Plot = LinePlot | StackedPlot | BarPlot | DeviceMap | Ownership


class Chart(NamedTuple):
    """A plot with title and note."""

    title: str
    note: str
    plot: Plot | None
    """None if nothing can be drawn; the note then gives the reason."""


def thin(points: Points, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most ``max_points`` (4 or more): the ends, and the extremes of each stretch of inner points.

    All stretches have equally many points. Values that are not finite are omitted.

    >>> thin([(0, 2.0), (1, 1.0), (2, 9.0), (3, 2.0), (4, 3.0)], max_points=4)
    [(0, 2.0), (1, 1.0), (2, 9.0), (4, 3.0)]
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= max_points:
        return finite
    first, *inner, last = finite
    stretches = (max_points - 2) // 2
    size = math.ceil(len(inner) / stretches)
    kept = [first]
    for start in range(0, len(inner), size):
        stretch = inner[start : start + size]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        # A set, as both are one point if the stretch is flat.
        kept += sorted({lowest, highest})
    return [*kept, last]
