"""The comparison of runs, in the terminal and as HTML, and what runs went through as lines."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from controller.report import tables
from controller.report.html import environment
from controller.report.plots import FEW, SERIES, Axis, Draw, Line, inline, line_plot
from controller.report.terminal import VERDICTS
from controller.results.comparison import groups
from controller.results.run import Run
from controller.results.summary import interval
from testbed.common import formats

BAND = "Mean of the repetitions; pale band: 95% confidence interval."
MOST_PLACES = 200
"""At which a mean is taken: more than that cannot be distinguished in a band."""

Points = list[tuple[float, float]]
HEAD = 24
"""Letters of a column's name in a row of its head."""
MOST_COLUMNS = 6
"""Side by side on a page."""
AROUND = 20
"""Steps drawn after the one resumed with; half as many before it."""


def show(console: Console, compared: Mapping[str, Any]) -> None:
    """Print a comparison: a row a figure, a column a run or its repetitions, ratios to the first beside the figures.

    Where columns do not fit side by side the table goes on below, so that each keeps its head.
    """
    names = [row["name"].replace("_", " ") for row in compared["figures"]]
    columns = [_column(compared, index) for index in range(len(compared["runs"]))]
    room = console.width - max(map(len, ["Figure", *names])) - 2
    console.print(Text(" Runs side by side", style="bold"), Text(f"  {_made_of(compared)}", style="dim"))
    widths = [max(cell_len(line) for text in column for line in text.plain.splitlines()) for column in columns]
    for block in tables.blocks([width + tables.BETWEEN for width in widths], room):
        table = tables.table("Figure", bold=["Figure"])
        for index in block:
            table.add_column(columns[index][0], justify="right", overflow="fold")
        for row, name in enumerate(names, 1):
            table.add_row(name, *(columns[index][row] for index in block))
        console.print(table)
    if compared["clocks"]:
        console.print(
            Text("  " + clocks_text(compared["clocks"]), style="green" if compared["clocks"]["agree"] else "yellow")
        )
    for warning in compared["warnings"]:
        console.print(Text(f"  ! {warning}", style="yellow"))


def _column(compared: Mapping[str, Any], index: int) -> list[Text]:
    """Return the head of a column and its cells."""
    run = compared["runs"][index]
    sign, colour = VERDICTS[run["verdict"]]
    lines = [line for part in run["label"].split(",") for line in textwrap.wrap(part, HEAD) or [""]]
    again = f" × {run['count']}" if run["count"] > 1 else ""
    head = Text("\n".join(lines)).append(f"\n{run['runtime']}d {sign}{again}", style=colour)
    cells = []
    for row in compared["figures"]:
        value, half, ratio = _cell(row, index)
        cells.append(Text(value).append(f" {half}" * bool(half)).append(f" {ratio}" * bool(ratio), style="dim"))
    return [head, *cells]


def _cell(row: Mapping[str, Any], index: int) -> tuple[str, str, str]:
    """Return a figure of a column, its interval, and its ratio to the first column; what there is not is empty."""
    half, ratio = row["half_widths"][index], row["ratios"][index]
    return (
        formats.of_kind(row["kind"], row["values"][index]),
        f"± {formats.of_kind(row['kind'], half)}" if half else "",
        formats.ratio(ratio) if index and ratio is not None else "",
    )


def _made_of(compared: Mapping[str, Any]) -> str:
    """Say what a figure of several runs is."""
    repeated = any(run["count"] > 1 for run in compared["runs"])
    return "mean ± half width of the 95% confidence interval (Student)" if repeated else ""


def clocks_text(clocks: Mapping[str, Any]) -> str:
    """Say how the two runtimes agree."""
    what = clocks["figure"].replace("_", " ")
    verb = "agree" if clocks["agree"] else "do not agree"
    return (
        f"emulated and simulated {verb}: {what} {formats.seconds(clocks['emulated'])} against "
        f"{formats.seconds(clocks['simulated'])}, {clocks['ratio'] - 1:+.1%}"
    )


def render(runs: Sequence[Run], compared: Mapping[str, Any]) -> str:
    """Return a comparison as one self-contained HTML page."""
    number = len(compared["runs"])
    heads = [run["label"].replace(",", "\n") for run in compared["runs"]]
    blocks = tables.blocks([1] * number, -(-number // -(-number // MOST_COLUMNS)))
    return (
        environment()
        .get_template("compare.html")
        .render(
            runs=compared["runs"],
            blocks=[(block, [heads[index] for index in block]) for block in blocks],
            made_of=_made_of(compared),
            figures=[
                (row["name"].replace("_", " "), row["about"], [_cell(row, index) for index in range(number)])
                for row in compared["figures"]
            ],
            devices=compared["devices"],
            differences=compared["differences"],
            warnings=compared["warnings"],
            clocks=clocks_text(compared["clocks"]) if compared["clocks"] else "",
            charts=[(title, note, inline(plot, title)) for title, note, plot in plots(runs, compared)],
            signs={kind: sign for kind, (sign, _) in VERDICTS.items()},
        )
    )


def plots(runs: Sequence[Run], compared: Mapping[str, Any]) -> Iterator[tuple[str, str, Draw]]:
    """Yield (title, note, plot) of what runs went through, the first of them where there are more than colours."""
    grouped = list(zip(groups(runs), (run["label"] for run in compared["runs"]), SERIES, strict=False))

    def lines(what: str, **options: Any) -> list[Line]:
        found = [mean_line(label, [curve(run, what, **options) for run in group], at) for group, label, at in grouped]
        return [line for line in found if line.points]

    note = BAND if any(len(group) > 1 for group, *_ in grouped) else ""
    end = max(run.metrics["duration"] for run in runs)
    for title, what, y in (
        ("Loss over time", "loss", Axis("training loss")),
        # Disturbed steps would flatten the rest; their time is the recovery time above.
        ("Time per undisturbed step", "steps", Axis("time per step", "seconds")),
        ("Accuracy over time", "accuracy", Axis("accuracy", "share")),
        ("Latency over time", "latency", Axis("latency", "seconds")),
    ):
        drawn = lines(what, over="seconds", steady=what == "steps")
        # One evaluation at the end is a figure and no curve.
        if any(len(line.points) > 1 or what != "accuracy" for line in drawn):
            yield title, note, partial(line_plot, drawn, range_=(0.0, end), y=y)
    steps = [item["step"] for run in runs for item in run.metrics["recovery_list"] if item["step"] is not None]
    if steps:
        # Around the first step that any run had to resume with.
        first, last = max(0, min(steps) - AROUND // 2), min(steps) + AROUND
        drawn, y = lines("steps", begin=first, end=last), Axis("time per step", "seconds")
        yield "Time per step around the fault", note, partial(line_plot, drawn, range_=(first, last), x="step", y=y)


def curve(
    run: Run, what: str, *, over: str = "steps", begin: float = 0.0, end: float = float("inf"), steady: bool = False
) -> Points:
    """Return (x, value) of a run's steps in their order: their time for `steps`, or what `PaperChart.what` names.

    ``over`` says whether x, from ``begin`` to ``end``, is the step or its seconds. A step that was done again is there
    as it was done last, so the outage is within the step resumed with. With ``steady``, only undisturbed steps.
    """
    table, key = {
        "steps": ("steps", "seconds"),
        "loss": ("steps", "loss"),
        "accuracy": ("evaluations", "accuracy"),
        "test_loss": ("evaluations", "loss"),
        "latency": ("requests", "latency"),
    }[what]
    rows = [row for row in run.metrics["series"][table] if row.get(key) is not None and (not steady or row["steady"])]
    last = {row.get("step", number): row for number, row in enumerate(rows)}
    x = "step" if over == "steps" else "time"
    return sorted((row[x], row[key]) for row in last.values() if begin <= row[x] <= end)


def mean_line(name: str, curves: Sequence[Points], colour: str) -> Line:
    """Return the mean of some curves over the x that all of them reach, with its 95% confidence interval (Student).

    Curves that do not stand at the same x are read in between, linearly. Those without a point do not count.
    """
    some = [points for points in curves if points]
    if len(some) < 2:
        points = some[0] if some else []
        return Line(name, points, colour, marks=len(points) <= FEW)
    low, high = max(points[0][0] for points in some), min(points[-1][0] for points in some)
    places = [x for x, _ in some[0] if low <= x <= high]
    places = places[:: -(-len(places) // MOST_PLACES)] if places else []
    means = [interval([_at(points, x) for points in some]) for x in places]
    points = [(x, mean) for x, (mean, _) in zip(places, means, strict=True)]
    return Line(name, points, colour, half_widths=[half for _, half in means])


def _at(points: Points, x: float) -> float:
    """Return the value of a curve at an x between its first and last."""
    after = bisect_left(points, (x, float("-inf")))
    (right, value) = points[after]
    if right == x:
        return value
    left, before = points[after - 1]
    return before + (value - before) * (x - left) / (right - left)
