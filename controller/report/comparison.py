"""The comparison of runs, in the terminal and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from controller.report import tables
from controller.report.html import environment
from controller.report.plots import SERIES, Line, inline, line_plot
from controller.report.terminal import VERDICTS
from controller.results.run import Run
from testbed import formats

AROUND = 20
"""Steps drawn after the one resumed with; half as many before it."""


def show(console: Console, compared: Mapping[str, Any]) -> None:
    """Print a comparison: a row a figure, a column a run, ratios to the first run beside the figures."""
    table = tables.table("Figure", bold=["Figure"])
    for run in compared["runs"]:
        sign, colour = VERDICTS[run["verdict"]]
        table.add_column(
            Text(run["label"]).append(f"\n{run['runtime']}d {sign}", style=colour), justify="right", overflow="fold"
        )
    for row in compared["figures"]:
        table.add_row(row["name"].replace("_", " "), *_cells(row))
    console.print(Text(" Runs side by side", style="bold"), table)
    if compared["clocks"]:
        console.print(
            Text("  " + clocks_text(compared["clocks"]), style="green" if compared["clocks"]["agree"] else "yellow")
        )
    for warning in compared["warnings"]:
        console.print(Text(f"  ! {warning}", style="yellow"))


def _cells(row: Mapping[str, Any]) -> list[Text]:
    cells = []
    for index, (value, ratio) in enumerate(zip(row["values"], row["ratios"], strict=True)):
        text = Text(formats.of_kind(row["kind"], value))
        if index and ratio is not None:
            text.append(f" {formats.ratio(ratio)}", style="dim")
        cells.append(text)
    return cells


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
    return (
        environment()
        .get_template("compare.html")
        .render(
            runs=compared["runs"],
            figures=[
                (
                    row["name"].replace("_", " "),
                    row["about"],
                    [
                        (
                            formats.of_kind(row["kind"], value),
                            formats.ratio(ratio) if index and ratio is not None else "",
                        )
                        for index, (value, ratio) in enumerate(zip(row["values"], row["ratios"], strict=True))
                    ],
                )
                for row in compared["figures"]
            ],
            devices=compared["devices"],
            differences=compared["differences"],
            warnings=compared["warnings"],
            clocks=clocks_text(compared["clocks"]) if compared["clocks"] else "",
            charts=[(title, inline(plot, title)) for title, plot in plots(runs, compared)],
            signs={kind: sign for kind, (sign, _) in VERDICTS.items()},
        )
    )


def plots(runs: Sequence[Run], compared: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield (title, plot) of what several runs went through."""
    end = max(run.metrics["duration"] for run in runs)
    labels = [run["label"] for run in compared["runs"]]
    for title, table, key, write in (
        ("Loss", "steps", "loss", formats.number),
        ("Time per step", "steps", "seconds", formats.seconds),
        ("Accuracy", "evaluations", "accuracy", formats.whole_share),
        ("Latency", "requests", "latency", formats.seconds),
    ):
        lines = []
        for run, label, colour in zip(runs, labels, SERIES, strict=False):
            rows = [row for row in run.metrics["series"][table] if row.get(key) is not None]
            # Disturbed steps would flatten the rest; their time is the recovery time above.
            points = [(row["time"], row[key]) for row in rows if key != "seconds" or row["steady"]]
            # One evaluation at the end is a figure and no curve.
            if points and (table != "evaluations" or len(points) > 1):
                lines.append(Line(label, points, colour))
        if lines:
            yield title, line_plot(lines, range_=(0.0, end), write=write)
    yield from _around_the_fault(runs, labels)


def _around_the_fault(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[tuple[str, Figure]]:
    """Draw the time of every step around the first one that any run had to resume with, if one had to."""
    steps = [item["step"] for run in runs for item in run.metrics["recovery_list"] if item["step"] is not None]
    if not steps:
        return
    begin, end = max(0, min(steps) - AROUND // 2), min(steps) + AROUND
    lines = []
    for run, label, colour in zip(runs, labels, SERIES, strict=False):
        points = curve(run, "steps", begin=begin, end=end)
        if points:
            lines.append(Line(label, points, colour))
    yield "Time per step around the fault", line_plot(lines, range_=(begin, end), axis="step", write=formats.seconds)


def curve(
    run: Run, what: str, *, over: str = "steps", begin: float = 0.0, end: float = float("inf")
) -> list[tuple[float, float]]:
    """Return (x, value) of a run's steps in their order: their time for `steps`, or what `PaperChart.what` names.

    ``over`` says whether x, from ``begin`` to ``end``, is the step or its seconds. A step that was done again is there
    as it was done last, so the outage is within the step resumed with.
    """
    table, key = {
        "steps": ("steps", "seconds"),
        "loss": ("steps", "loss"),
        "accuracy": ("evaluations", "accuracy"),
        "test_loss": ("evaluations", "loss"),
    }[what]
    last = {row["step"]: row for row in run.metrics["series"][table] if row.get(key) is not None}
    x = "step" if over == "steps" else "time"
    return sorted((row[x], row[key]) for row in last.values() if begin <= row[x] <= end)
