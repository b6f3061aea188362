"""Terminal output of a run: metrics, devices, links, faults, expectations, verdict and path of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from testbed.common import formats
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.report import declared
from testbed_controller.report.grouping import group_links
from testbed_controller.report.sections import expectations_section, sections
from testbed_controller.report.tables import Cell, Column, Section, draw_section
from testbed_controller.results.available import metric_value
from testbed_controller.results.run import Run

VERDICT_SIGNS = {
    "trusted": ("✔", "green"),
    "not trusted": ("✘", "red"),
    "prediction": ("◌", "cyan"),
}
"""Sign and colour of each kind of verdict."""


def show(console: Console, run: Run) -> None:
    """Print a finished run."""
    console.print(render(run, console.width))


def show_briefly(console: Console, run: Run) -> None:
    """Print one of many runs in a line."""
    parts = []
    for metric in run.metric_definitions.values():
        value = metric_value(run.metrics, metric.name)
        if metric.brief and value is not None:
            text = formats.of_kind(metric.kind, value)
            parts.append(f"{_metric_heading(metric.name)} {text}")
    sign, colour = VERDICT_SIGNS[run.metrics["verdict"]["kind"]]
    line = Text(f" {sign} ", style=colour)
    console.print(line.append(", ".join(parts), style="default"))


def render(run: Run, width: int) -> RenderableType:
    """Return the output of `show` for a given width."""
    parts: list[RenderableType] = [
        Text(),
        _run_title(run),
        Text(),
        _metrics_table(run),
        Text(),
    ]
    parts += [draw_section(section, width) for section in sections(run)]
    if run.expectations:
        parts.append(draw_section(expectations_section(run), width))
    parts.append(_verdict_panel(run.metrics["verdict"]))
    # Several files of weights exist if the stages ended with different versions of the model.
    files = sorted(path.name for path in run.path.glob("weights-*.safetensors"))
    if files:
        more = f" and {len(files) - 2} more" if len(files) > 2 else ""
        text = f"{', '.join(files[:2])}{more}: the newest weights of each stage"
        parts.append(Text(" Weights ", style="dim").append(text, style="not dim"))
    parts.append(report_location(run.path))
    return Group(*parts)


def measurements_table(measurements: Sequence[LinkMeasurement]) -> Section:
    """Return a table of requested and measured properties of groups of links, with links out of tolerance first."""
    links = []
    for each in measurements:
        links.append(
            {
                "source": each.source,
                "destination": each.destination,
                "requested": each.expected.to_json(),
                "measured": each.measured(),
                "problem": each.problem,
                "bytes": 0,
                "used_share": None,
            }
        )
    rows = []
    for group in group_links(links):
        problem = group.problem or ""
        measured = Cell(group.measured, tone="no" if problem else "")
        row = [Cell(group.name), Cell(group.requested), measured]
        rows.append([*row, Cell(problem, tone="no")])
    columns = (
        Column("Link", "name"),
        Column("Requested"),
        Column("Measured"),
        Column("Problem"),
    )
    return Section("", "", "", columns, rows)


def _run_title(run: Run) -> Text:
    workload = run.trial.scenario.workload
    runtime = "emulated" if run.outcome.runtime == "emulate" else "simulated"
    if not workload.is_computed:
        runtime += ", timing only, without computation"
    text = Text(" ")
    text.append(run.trial.scenario.name, style="bold")
    count = len(run.experiment.devices)
    plural = "" if count == 1 else "s"
    text.append(f"  {workload.title()}, {count} device{plural}, {runtime}", style="dim")
    if run.outcome.status != "finished":
        text.append(f"  {run.outcome.status}", style="bold red")
    return text


def _metrics_table(run: Run) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(style="bold")
    grid.add_column(style="dim")
    for row in declared.summary_rows(run):
        grid.add_row(*(Text(cell) for cell in row))
    return Padding(grid, (0, 0, 0, 1))


def _verdict_panel(verdict: Mapping[str, Any]) -> Panel:
    sign, colour = VERDICT_SIGNS[verdict["kind"]]
    text = Text(f"{sign} {verdict['kind']}", style=f"bold {colour}")
    if verdict["reasons"]:
        for reason in verdict["reasons"]:
            text.append(f"\n  {reason}", style="default")
    else:
        text.append(f"  {verdict['summary']}", style="not bold default")
    return Panel(
        text,
        box=box.ROUNDED,
        border_style=colour,
        title="Verdict",
        title_align="left",
        padding=(0, 1),
    )


def report_location(folder: Path, name: str = "report.html") -> Text:
    """Return a line with the path of a page."""
    path = folder / name
    style = "bold cyan" if path.exists() else "cyan"
    # The recorder's paths are absolute; a relative path is shorter.
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return Text(" Report  ", style="dim").append(str(path), style=style)


def _metric_heading(name: str) -> str:
    return name.replace("_", " ").capitalize()
