"""Devices drawn by matplotlib: a map of their links, and the samples of each device by class."""

from __future__ import annotations

import math
from collections.abc import Mapping

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from testbed.network.link import Pair
from testbed.network.radio import Position
from testbed_controller.report.charts import COLOURS, DeviceMap, Ownership
from testbed_controller.report.plots import HEIGHT, STYLE, add_legend

GRADES = (
    (0.9, "green", 1.8),
    (0.7, "blue", 1.3),
    (0.4, "orange", 0.9),
    (0.0, "fault", 0.6),
)
"""Minimum PRR, colour and line width in points of each grade of links."""
LEAST_DRAWN_PRR = 1e-9
"""Minimum PRR of a drawn link; links with less receive practically nothing."""
MOST_WITH_UNITS = 8
"""Maximum number of devices labelled with their model units, which the table of devices shows as well."""
MOST_NAMED = 60
"""Maximum number of devices with names on the map, as more names would hide the map."""
MOST_OWNERS_NAMED = 12
"""Maximum number of devices whose names fit below the x axis; more devices are numbered."""
_LARGEST_AREA = 120.0
"""Area of the largest disc, in square points (1/72 inch)."""


@mpl.rc_context(STYLE)
def draw_map(plot: DeviceMap, width: float) -> Figure:
    """Draw devices at their positions, and the two halves of each link in the colour of their reception."""
    positions = plot.positions
    area = plot.area
    # Height to width; limited, since a very long area would give an illegible figure.
    aspect = min(1.2, max(0.5, area[1] / area[0]))
    figure = Figure((width, width * aspect))
    axes = figure.subplots()
    # The grades have falling minima, and each ends at the minimum of the previous one.
    upper_limit = math.inf
    for minimum, colour, line_width in GRADES:
        halves = []
        for pair, ratio in plot.ratios.items():
            if max(minimum, LEAST_DRAWN_PRR) <= ratio < upper_limit:
                halves.append(_half_line(positions, pair))
        label = f"PRR from {minimum:.0%}" if minimum else f"PRR below {upper_limit:.0%}"
        # matplotlib omits labels that begin with an underscore from the legend.
        shown_label = label if halves else f"_{label}"
        axes.add_collection(
            LineCollection(
                halves,
                colors=COLOURS[colour],
                linewidths=line_width,
                label=shown_label,
            )
        )
        upper_limit = minimum
    xs = [x for x, _ in positions.values()]
    ys = [y for _, y in positions.values()]
    axes.plot(xs, ys, "o", color=COLOURS["ink"], ms=4)
    if len(positions) <= MOST_NAMED:
        units = plot.units if len(positions) <= MOST_WITH_UNITS else {}
        _label_devices(axes, positions, units, area)
    axes.set_xlim(0, area[0])
    axes.set_ylim(0, area[1])
    axes.set_aspect("equal")
    axes.set_xlabel("x (m)")
    axes.set_ylabel("y (m)")
    add_legend(figure, axes)
    return figure


def _label_devices(
    axes: Axes,
    positions: Mapping[str, Position],
    units: Mapping[str, str],
    area: tuple[float, float],
) -> None:
    """Label each device with name and units, above or below the position to avoid other labels."""
    width, height = area
    # Positions of the devices with a label above them.
    labelled_above: list[Position] = []
    for name, (x, y) in positions.items():
        is_crowded = any(
            abs(x - other_x) < width / 2 and abs(y - other_y) < height / 12
            for other_x, other_y in labelled_above
        )
        # At the upper and the right edge, the label would leave the map.
        is_below = is_crowded or y > height * 0.9
        is_left = x > width * 0.6
        if not is_below:
            labelled_above.append((x, y))
        axes.annotate(
            f"{name}\n{units.get(name, '')}".rstrip(),
            (x, y),
            (-6 if is_left else 6, -4 if is_below else 4),
            textcoords="offset points",
            ha="right" if is_left else "left",
            va="top" if is_below else "bottom",
            fontsize=7.5,
            bbox={
                "facecolor": COLOURS["card"],
                "edgecolor": "none",
                "pad": 0.4,
                "alpha": 0.7,
            },
        )


def _half_line(
    positions: Mapping[str, Position], pair: Pair
) -> tuple[Position, Position]:
    """Return the line from the first device of a pair to the middle between both devices."""
    (x, y), (other_x, other_y) = positions[pair[0]], positions[pair[1]]
    return (x, y), ((x + other_x) / 2, (y + other_y) / 2)


@mpl.rc_context(STYLE)
def draw_owned(plot: Ownership, width: float) -> Figure:
    """Draw a disc per device and class, with an area proportional to the samples."""
    owned = plot.owned
    figure = Figure((width, HEIGHT))
    axes = figure.subplots()
    device_numbers = []
    classes = []
    counts = []
    for number, samples in enumerate(owned.values()):
        for label, count in samples.items():
            device_numbers.append(number)
            # Labels of a manifest are keys of JSON, which are text.
            classes.append(int(label))
            counts.append(count)
    largest = max(counts)
    areas = [_LARGEST_AREA * count / largest for count in counts]
    axes.scatter(device_numbers, classes, areas, color=COLOURS["blue"], linewidths=0)
    axes.set_xlabel(f"device, by its place in {plot.order}")
    if len(owned) <= MOST_OWNERS_NAMED:
        rotation = 30 if len(owned) > 6 else 0
        axes.set_xticks(range(len(owned)), list(owned), rotation=rotation)
        axes.set_xlabel("device")
    axes.set_ylabel("class")
    axes.set_xlim(-0.5, len(owned) - 0.5)
    axes.set_ylim(min(classes) - 0.7, max(classes) + 0.7)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
