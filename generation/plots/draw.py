"""Draw the two plots of this folder from results of the scenarios ``generation/delay`` and ``generation/recovery``.

testbed run generation/delay --runtime simulate --out results/delay
testbed run generation/recovery --runtime simulate --out results/recovery
python generation/plots/draw.py results/delay results/recovery
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

FOLDER = Path(__file__).resolve().parent
WIDTH = 7.16
"""Width of a plot in inches: that of two columns of an IEEE paper."""
STYLE = {
    "font.size": 8,
    "lines.markersize": 3,
    "lines.linewidth": 1.2,
    # With text as text and constant names of elements, files differ only if their data differ.
    "svg.fonttype": "none",
    "svg.hashsalt": "generation",
}
DASHES = {"layers": "-", "tensors": "--"}
Point = dict[str, str]
"""One run of a sweep: swept keys and metrics by name, all as text."""


def read_points(results: Path) -> list[Point]:
    """Return the points of a sweep from the ``summary.csv`` of the results."""
    with (results / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def values_of(points: Iterable[Point], key: str) -> list[str]:
    """Return the distinct values of a key, in the order of the points."""
    return list(dict.fromkeys(point[key] for point in points))


def milliseconds(text: str) -> float:
    """Return the milliseconds of a delay such as ``0.2ms``."""
    return float(text.removesuffix("ms"))


def draw_delay(points: list[Point]) -> Figure:
    """Draw the time per token over the delay of links: a panel for each loss, a line for each method and number."""
    losses = values_of(points, "network.link.loss")
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    for axes, loss in zip(panels, losses, strict=True):
        chosen = [point for point in points if point["network.link.loss"] == loss]
        draw_loss(axes, chosen)
        axes.set_title(f"loss {loss}")
    panels[0].set_ylabel("time per token (s)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=4, loc="outside lower center", frameon=False)
    return figure


def times_by_delay(
    points: list[Point], method: str, count: str
) -> tuple[list[float], list[float]]:
    """Return the delays of links in ms, and the seconds per token, of one method and number of devices."""
    delays = []
    seconds = []
    for point in points:
        line = (point["workload.method"], point["devices.pi.count"])
        if line != (method, count):
            continue
        delays.append(milliseconds(point["network.link.delay"]))
        # The mean over the text, since a median hides the few tokens that wait for a lost packet.
        seconds.append(1 / float(point["request_token_rate"]))
    return delays, seconds


def draw_loss(axes: Axes, points: list[Point]) -> None:
    """Draw the lines of one panel."""
    for method in values_of(points, "workload.method"):
        for index, count in enumerate(values_of(points, "devices.pi.count")):
            # One device alone computes the same with both methods.
            if count != "1":
                style = {
                    "color": f"C{index}",
                    "linestyle": DASHES[method],
                    "marker": "o",
                }
                label = f"{method}, {count} boards"
            elif method == "layers":
                style = {"color": "grey", "linestyle": ":"}
                label = "one board"
            else:
                continue
            delays, seconds = times_by_delay(points, method, count)
            axes.plot(delays, seconds, label=label, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [milliseconds(text) for text in values_of(points, "network.link.delay")]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("one-way delay (ms)")
    axes.grid(alpha=0.3)


def draw_recovery(points: list[Point]) -> Figure:
    """Draw the longest pause between two tokens over the token at which a device dies, by recovery."""
    figure = Figure(figsize=(WIDTH / 2, 2.4), layout="constrained")
    axes = figure.subplots()
    for recovery in values_of(points, "workload.method"):
        chosen = [point for point in points if point["workload.method"] == recovery]
        # The scenario counts tokens from 0.
        tokens = [int(point["faults.0.when.micro"]) + 1 for point in chosen]
        pauses = [float(point["longest_pause"]) for point in chosen]
        axes.plot(tokens, pauses, marker="o", label=recovery)
    axes.set_xlabel("token at which a device dies")
    axes.set_ylabel("longest pause (s)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def main(delay: Path, recovery: Path, folder: Path = FOLDER) -> None:
    """Write ``delay.svg`` and ``recovery.svg``."""
    with mpl.rc_context(STYLE):
        figures = {
            "delay": draw_delay(read_points(delay)),
            "recovery": draw_recovery(read_points(recovery)),
        }
        for name, figure in figures.items():
            file = folder / f"{name}.svg"
            # Without a date, equal results give equal files.
            figure.savefig(file, metadata={"Date": None})
            print(file)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(
            "usage: python generation/plots/draw.py DELAY_RESULTS RECOVERY_RESULTS"
        )
    main(Path(sys.argv[1]), Path(sys.argv[2]))
