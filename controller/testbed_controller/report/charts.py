"""Plain data of charts (lines, bars and maps with axes), drawn by `.drawing` with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import product
from typing import Any, Literal, get_args

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
STYLES: tuple[tuple[str, Dash], ...] = tuple(
    (colour, dash) for dash, colour in product(get_args(Dash), SERIES)
)
"""Colour and dash of the series of a plot, in order, and the maximum number of series."""
MOST_POINTS = 1500
"""Points drawn of a line at most: more than the plot has pixels add size without detail."""
FEW = 60
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
    marks: bool = False
    """Whether to mark every point; useful for few points."""
    joined: bool = True
    """Join the points."""
    half_widths: Sequence[float | None] = ()
    """Half widths of the confidence intervals, one per point: error bars with marks, else a band."""

    @property
    def marked(self) -> bool:
        """Whether each point has a mark."""
        return self.marks or not self.joined or len(self.points) == 1


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, one for each group of a plot; a value of None draws no bar."""

    name: str
    values: Sequence[float | None]
    colour: str
    half_widths: Sequence[float | None] = ()
    """Half widths of the intervals around the values."""
    dash: Dash = "solid"
    """Hatching, equivalent to the dash of a line of the same series."""


@dataclass(frozen=True)
class Axis:
    """Title and unit of an axis."""

    name: str
    kind: MetricKind = "number"

    @property
    def most(self) -> float:
        """Upper bound of values and intervals: 1 for shares."""
        return 1.0 if self.kind == "share" else math.inf

    def intervals(
        self, values: Numbers, halves: Sequence[float | None]
    ) -> np.ndarray[Any, Any]:
        """Return the lower and upper half widths of intervals around values, (2, values); NaN without an interval."""
        half = np.array([math.nan if each is None else each for each in halves], float)
        centres = np.array(values)
        # A share is at most 1, so the interval ends there, unless the value itself is above.
        room = np.where(centres > self.most, math.inf, self.most - centres)
        return np.array([half, np.minimum(half, room)])


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

    The y axis begins at 0 or at the lowest negative value, or is logarithmic where values are far apart.
    """

    lines: Sequence[Line]
    windows: Sequence[Window] = ()
    _: KW_ONLY
    range_: tuple[float, float]
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
    marks: Sequence[float]
    """Seconds marked by vertical lines."""
    _: KW_ONLY
    end: float
    y: Axis


@dataclass(frozen=True)
class BarPlot:
    """Grouped bars, labelled with their values if space permits.

    The y axis begins at 0 or at the lowest negative value, or is logarithmic where values are far apart.
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

    A link has two halves: the half at a device is for the casts that the other device receives from it.
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
    """The source of the devices' order."""


Plot = LinePlot | StackedPlot | BarPlot | DeviceMap | Ownership
Chart = tuple[str, str, Plot | None]
"""Title, note and plot; without a plot, the note gives the reason."""


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most ``most`` points, the lowest and the highest of each interval of x. NaN is omitted.

    >>> thin([(0, 1.0), (1, 9.0), (2, 2.0), (3, 3.0)], most=2)
    [(0, 1.0), (1, 9.0)]
    """
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    size = math.ceil(len(finite) / (most // 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(finite), size):
        stretch = finite[start : start + size]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        # The same point if the interval is flat.
        kept += sorted({lowest, highest})
    return kept
