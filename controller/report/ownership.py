"""Who owns how many training samples of which class, as a plot."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from controller.report.plots import COLOURS, HEIGHT, STYLE, WIDTH

MOST_NAMED = 12
"""Devices whose names fit below; more are numbered."""
_LARGEST = 120.0
"""Area of the largest disc, in square points."""


@mpl.rc_context(STYLE)
def draw(owned: Mapping[str, Mapping[str, int]], *, width: float = WIDTH) -> Figure:
    """Draw a disc for each device and class, its area in proportion to the samples.

    ``owned`` are the samples of each device by class, as a manifest has them.
    """
    figure = Figure((width, HEIGHT), layout="constrained")
    axes = figure.subplots()
    found = [(place, int(of), count) for place, each in enumerate(owned.values()) for of, count in each.items()]
    most = max(count for _, _, count in found)
    places, classes, counts = zip(*found, strict=True)
    axes.scatter(places, classes, [_LARGEST * count / most for count in counts], color=COLOURS["blue"], linewidths=0)
    named = len(owned) <= MOST_NAMED
    if named:
        axes.set_xticks(range(len(owned)), list(owned), rotation=30 if len(owned) > 6 else 0)
    axes.set_xlabel("device" if named else "device, by its place in the scenario")
    axes.set_ylabel("class")
    axes.set_xlim(-0.5, len(owned) - 0.5)
    axes.set_ylim(min(classes) - 0.7, max(classes) + 0.7)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
