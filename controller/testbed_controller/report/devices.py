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
from testbed_controller.report.plots import HEIGHT, STYLE, legend

GRADES = (
    (0.9, "green", 1.8),
    (0.7, "blue", 1.3),
    (0.4, "orange", 0.9),
    (0.0, "fault", 0.6),
)
"""Minimum PRR, colour and line width in points of each grade of links; a PRR of 0 is not drawn."""
MOST_HOLDING = 8
"""Maximum number of devices labelled with their model pieces; for more, see the table of devices."""
MOST_NAMED = 60
"""Devices; of more, names would hide the map."""
MOST_OWNERS_NAMED = 12
"""Devices whose names fit below; more are numbered."""
_LARGEST = 120.0
"""Area of the largest disc, in square points."""


@mpl.rc_context(STYLE)
def draw_map(plot: DeviceMap, width: float) -> Figure:
    """Draw devices at their positions, and the two halves of each link in the colour of their reception."""
    positions, held, area = plot.positions, plot.held, plot.area
    figure = Figure((width, width * min(1.2, max(0.5, area[1] / area[0]))))
    axes = figure.subplots()
    above = math.inf
    for least, colour, width in GRADES:
        halves = [
            _half_way(positions, pair)
            for pair, ratio in plot.ratios.items()
            if max(least, 1e-9) <= ratio < above
        ]
        label = f"PRR from {least:.0%}" if least else f"PRR below {above:.0%}"
        axes.add_collection(
            LineCollection(
                halves,
                colors=COLOURS[colour],
                linewidths=width,
                label=label if halves else f"_{label}",
            )
        )
        above = least
    axes.plot(
        [x for x, _ in positions.values()],
        [y for _, y in positions.values()],
        "o",
        color=COLOURS["ink"],
        ms=4,
    )
    if len(positions) <= MOST_NAMED:
        _label_devices(
            axes, positions, held if len(positions) <= MOST_HOLDING else {}, area
        )
    axes.set_xlim(0, area[0])
    axes.set_ylim(0, area[1])
    axes.set_aspect("equal")
    axes.set_xlabel("x (m)")
    axes.set_ylabel("y (m)")
    legend(figure, axes)
    return figure


def _label_devices(
    axes: Axes,
    positions: Mapping[str, Position],
    held: Mapping[str, str],
    area: tuple[float, float],
) -> None:
    """Label each device with its name and pieces, placed to avoid other labels."""
    above: list[Position] = []
    for name, (x, y) in positions.items():
        near = any(
            abs(x - one) < area[0] / 2 and abs(y - other) < area[1] / 12
            for one, other in above
        )
        below, left = near or y > area[1] * 0.9, x > area[0] * 0.6
        if not below:
            above.append((x, y))
        axes.annotate(
            f"{name}\n{held.get(name, '')}".rstrip(),
            (x, y),
            (-6 if left else 6, -4 if below else 4),
            textcoords="offset points",
            ha="right" if left else "left",
            va="top" if below else "bottom",
            fontsize=7.5,
            bbox={
                "facecolor": COLOURS["card"],
                "edgecolor": "none",
                "pad": 0.4,
                "alpha": 0.7,
            },
        )


def _half_way(
    positions: Mapping[str, Position], pair: Pair
) -> tuple[Position, Position]:
    (x, y), (other_x, other_y) = positions[pair[0]], positions[pair[1]]
    return (x, y), ((x + other_x) / 2, (y + other_y) / 2)


@mpl.rc_context(STYLE)
def draw_owned(plot: Ownership, width: float) -> Figure:
    """Draw a disc per device and class, with an area proportional to the samples."""
    owned = plot.owned
    figure = Figure((width, HEIGHT))
    axes = figure.subplots()
    discs = [
        (place, int(of), count)
        for place, each in enumerate(owned.values())
        for of, count in each.items()
    ]
    most = max(count for _, _, count in discs)
    places, classes, counts = zip(*discs, strict=True)
    axes.scatter(
        places,
        classes,
        [_LARGEST * count / most for count in counts],
        color=COLOURS["blue"],
        linewidths=0,
    )
    named = len(owned) <= MOST_OWNERS_NAMED
    if named:
        axes.set_xticks(
            range(len(owned)), list(owned), rotation=30 if len(owned) > 6 else 0
        )
    axes.set_xlabel("device" if named else f"device, by its place in {plot.order}")
    axes.set_ylabel("class")
    axes.set_xlim(-0.5, len(owned) - 0.5)
    axes.set_ylim(min(classes) - 0.7, max(classes) + 0.7)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
