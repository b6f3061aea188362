"""Where devices are and how well they hear each other, as a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from controller.report.plots import COLOURS, STYLE, WIDTH, legend
from testbed.network.link import Link, Pair
from testbed.network.radio import Position

GRADES = ((0.9, "green", 1.8), (0.7, "blue", 1.3), (0.4, "orange", 0.9), (0.0, "fault", 0.6))
"""Least PRR of each grade of links, its colour, and the width of its lines in points; a PRR of 0 is not drawn."""
MOST_TOLD = 8
"""Devices with what they hold beside their names; of more it is in the table of devices alone."""
MOST_NAMED = 60
"""Devices; of more, names would hide the map."""


def reception(links: Mapping[Pair, Link]) -> dict[Pair, float]:
    """Return the packet reception ratio of each directed link, from 0 to 1."""
    return {pair: 1 - link.message_loss for pair, link in links.items()}


@mpl.rc_context(STYLE)
def draw(
    positions: Mapping[str, Position],
    ratios: Mapping[Pair, float],
    held: Mapping[str, str],
    area: tuple[float, float],
    *,
    width: float = WIDTH,
) -> Figure:
    """Draw devices at their positions in an area of (width, height) metres, and who hears whom.

    A link is two halves: the one at a device is how well the other receives its casts. ``held`` says in words what
    devices hold.
    """
    figure = Figure((width, width * min(1.2, max(0.5, area[1] / area[0]))), layout="constrained")
    axes = figure.subplots()
    above = math.inf
    for least, colour, width in GRADES:
        halves = [_half(positions, pair) for pair, ratio in ratios.items() if max(least, 1e-9) <= ratio < above]
        label = f"PRR from {least:.0%}" if least else f"PRR below {above:.0%}"
        axes.add_collection(
            LineCollection(halves, colors=COLOURS[colour], linewidths=width, label=label if halves else f"_{label}")
        )
        above = least
    axes.plot([x for x, _ in positions.values()], [y for _, y in positions.values()], "o", color=COLOURS["ink"], ms=4)
    if len(positions) <= MOST_NAMED:
        _name(axes, positions, held if len(positions) <= MOST_TOLD else {}, area)
    axes.set_xlim(0, area[0])
    axes.set_ylim(0, area[1])
    axes.set_aspect("equal")
    axes.set_xlabel("x (m)")
    axes.set_ylabel("y (m)")
    legend(figure, axes)
    return figure


def _name(axes: Axes, positions: Mapping[str, Position], held: Mapping[str, str], area: tuple[float, float]) -> None:
    """Write beside each device who it is and what it holds: above it, unless another's words may be there."""
    above: list[Position] = []
    for name, (x, y) in positions.items():
        near = any(abs(x - one) < area[0] / 2 and abs(y - other) < area[1] / 12 for one, other in above)
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
            bbox={"facecolor": COLOURS["card"], "edgecolor": "none", "pad": 0.4, "alpha": 0.7},
        )


def _half(positions: Mapping[str, Position], pair: Pair) -> tuple[Position, Position]:
    (x, y), (other_x, other_y) = positions[pair[0]], positions[pair[1]]
    return (x, y), ((x + other_x) / 2, (y + other_y) / 2)
