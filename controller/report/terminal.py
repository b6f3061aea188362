"""The end of a run in the terminal: figures, devices, links, faults, what was expected, the verdict, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from controller.report import declared, tables
from controller.report.grouping import group_links
from controller.report.sections import BARS, Cell, Column, Section, expected, figures, sections
from controller.results.reproduction import ReproducedRow
from controller.results.run import Run, short_keys, value_text
from testbed.common import formats
from testbed.common.formats import FigureKind
from testbed.trace.outcome import LinkMeasurement

WIDE = 100
"""Columns from which a table has room for what is only nice to know."""
WIDEST_KEY = 24
"""Columns that a swept value keeps beside the figures."""
BAR = 16
VERDICTS = {"trusted": ("✔", "green"), "not trusted": ("✘", "red"), "prediction": ("◌", "cyan")}


def show(console: Console, run: Run) -> None:
    """Print a finished run."""
    console.print(render(run, console.width))


def show_briefly(console: Console, run: Run) -> None:
    """Print one of many runs in a line."""
    found = [(each, run.metrics.get(each.name)) for each in run.figures.values() if each.brief]
    parts = [f"{_heading(each.name)} {formats.of_kind(each.kind, value)}" for each, value in found if value is not None]
    sign, colour = VERDICTS[run.metrics["verdict"]["kind"]]
    console.print(Text(f" {sign} ", style=colour).append(", ".join(parts), style="default"))


def render(run: Run, width: int) -> RenderableType:
    """Return what `show` prints, laid out for a width."""
    parts: list[RenderableType] = [Text(), _title(run), Text(), _figures(run), Text()]
    parts += [_section(section, width) for section in sections(run)]
    if run.expectations:
        parts.append(_section(expected(run), width))
    parts += [_verdict(run.metrics["verdict"]), _where(run.path)]
    return Group(*parts)


def show_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print a sweep or a repeated run: a line a point, means with their confidence intervals.

    Where the figures do not fit side by side the table goes on below, with the points again.
    """
    points = summary["points"]
    keys = list(dict.fromkeys(key for point in points for key in point["point"]))
    swept = [[Text(value_text(point["point"].get(key, ""))) for point in points] for key in keys]
    shown = {name: about["kind"] for name, about in summary["figures"].items() if about["brief"]}
    columns = [[_runs(point) for point in points]]
    columns += [[_mean(kind, point["figures"].get(name)) for point in points] for name, kind in shown.items()]
    heads, figures = list(short_keys(keys).values()), ["Runs", *map(_heading, shown)]
    note = f"{len(points)} points, " if keys else ""
    note += "mean ± half width of the 95% confidence interval (Student)"
    points_width = sum(min(width, WIDEST_KEY) for width in map(_width, heads, swept))
    parts: list[RenderableType] = []
    for block in tables.blocks(list(map(_width, figures, columns)), console.width - points_width):
        chosen = [figures[index] for index in block]
        table = tables.table(*heads, *chosen, bold=heads, right=[name for name in chosen if name != "Runs"])
        for row in zip(*swept, *(columns[index] for index in block), strict=True):
            table.add_row(*row)
        parts += [Text(), table] if parts else [table]
    console.print(Text(), _titled(summary["scenario"], note, *parts))
    console.print(_where(folder, "sweep.html"))


def _width(heading: str, cells: Sequence[Text]) -> int:
    return max(cell_len(text) for text in (heading, *(cell.plain for cell in cells))) + tables.BETWEEN


def _runs(point: Mapping[str, Any]) -> Text:
    runs = len(point["runs"])
    return Text(str(runs) if point["trusted"] == runs else f"{runs} ({runs - point['trusted']} not trusted)")


def show_reproduction(console: Console, source: str, rows: Sequence[ReproducedRow], folder: Path) -> None:
    """Print a publication's figures beside ours."""
    found = []
    for row in rows:
        half = "" if row.half_width is None else f"± {formats.of_kind(row.kind, row.half_width)}"
        ours = Cell(formats.of_kind(row.kind, row.ours), half)
        runs = f"{row.runs}" + (f" ({row.untrusted} not trusted)" if row.untrusted else "")
        condition = Cell("")
        if row.holds is not None:
            condition = Cell(f"{'✔' if row.holds else '✘'} {row.condition}", tone="yes" if row.holds else "no")
        paper = Cell(formats.of_kind(row.kind, row.paper))
        found.append([Cell(row.name), paper, ours, Cell(formats.ratio(row.ratio)), Cell(runs), condition])
    columns = (Column("", "name"), *figures("Paper", "Ours", "Ours / paper", "Runs"), Column("Expected"))
    note = "mean ± half width of the 95% confidence interval (Student)"
    notes = [Text(f" {row.name}: {row.note}", style="dim") for row in rows if row.note]
    console.print(Text(), _section(Section(source, note, note, columns, found), console.width), *notes)
    console.print(_where(folder, "paper.html"))


def measurements_table(measurements: Sequence[LinkMeasurement]) -> RenderableType:
    """Return what was asked of each kind of link and what was found, those outside their tolerance first."""
    rows = [
        {
            "source": each.source,
            "destination": each.destination,
            "requested": each.requested.to_json(),
            "measured": each.figures(),
            "problem": each.problem,
            "bytes": 0,
            "used_share": None,
        }
        for each in measurements
    ]
    shown = tables.table("Link", "Requested", "Measured", "What is wrong", bold=["Link"])
    for group in group_links(rows):
        tone = "red" if group.problem else ""
        texts = (group.name, group.requested, Text(group.measured, tone), Text(group.problem or "", "red"))
        shown.add_row(*(Text(each) if isinstance(each, str) else each for each in texts))
    return shown


def _mean(kind: FigureKind, found: Mapping[str, Any] | None) -> Text:
    if found is None:
        return Text(formats.NONE, style="dim")
    text = Text(formats.of_kind(kind, found["mean"]))
    if found["ci95"] is not None:
        text.append(f" ± {formats.of_kind(kind, found['ci95'])}", style="dim")
    return text


def _titled(title: str, note: str, *parts: RenderableType) -> Group:
    """Put a heading over a table; a table's own title would wrap at the table's width.

    What is too long for one line of 80 columns goes on at the note.
    """
    gap = "  " if len(title) + len(note) < 77 else "\n "
    return Group(Text(f" {title}", style="bold").append(f"{gap}{note}", style="not bold dim"), *parts, Text())


def _title(run: Run) -> Text:
    workload = run.trial.scenario.workload
    runtime = "emulated" if run.outcome.runtime == "emulate" else "simulated"
    if workload.numerics == "none":
        runtime += ", timing only: nothing was computed"
    text = Text(" ")
    text.append(run.trial.scenario.name, style="bold")
    count = len(run.experiment.devices)
    verb = "training" if workload.task == "train" else "inference"
    work = f"{workload.method.name} {verb} of {workload.model.title} on {workload.data.title}"
    if workload.task == "program":
        work = "programs of one's own"
    text.append(f"  {work}, {count} device{'' if count == 1 else 's'}, {runtime}", style="dim")
    if run.outcome.status != "finished":
        text.append(f"  {run.outcome.status}", style="bold red")
    return text


def _figures(run: Run) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(style="bold")
    grid.add_column(style="dim")
    for row in declared.head(run):
        grid.add_row(*(Text(cell) for cell in row))
    return Padding(grid, (0, 0, 0, 1))


def _section(section: Section, width: int) -> RenderableType:
    """Draw a section as a table; notes go below their cells where beside them there is no room."""
    shown = [
        place
        for place, column in enumerate(section.columns)
        if not column.where or (column.where == "wide" and width >= WIDE)
    ]
    rows = section.rows[section.most :] if section.most < 0 else section.rows[: section.most]

    def made(between: str) -> Table:
        columns = [section.columns[place] for place in shown]
        of_kind = {kind: [each.heading for each in columns if each.kind == kind] for kind in ("name", "figure")}
        table = tables.table(
            *("" if each.heading == "Share" else each.heading for each in columns),
            bold=of_kind["name"],
            right=of_kind["figure"],
        )
        for row in rows:
            table.add_row(*(_cell(row[place], section.columns[place], between) for place in shown))
        return table

    table = made(" ")
    if any(cell.note for row in rows for cell in row) and Console(width=2 * width).measure(table).maximum > width:
        table = made("\n")
    parts: list[RenderableType] = [table]
    if left := len(section.rows) - len(rows):
        before = " before them" if section.most < 0 else ""
        parts.append(Text(f"  and {left} more{before} in the report", style="dim"))
    return _titled(section.title, section.brief, *parts)


def _cell(cell: Cell, column: Column, between: str) -> Text:
    if cell.shares is not None:
        return _bar(cell.shares)
    text = Text(cell.text, style={"": "", "yes": "green", "no": "red"}[cell.tone])
    if cell.text == formats.NONE and column.kind == "figure":
        return Text(cell.text, style="dim")
    if not cell.note or column.where:  # columns that only wide terminals have say the least
        return text
    return text.append(f"{between if column.kind == 'figure' else chr(10)}{cell.note}", style="dim")


def _bar(shares: Mapping[str, float]) -> Text:
    """Draw how a device spent its time, idle being what is left."""
    text = Text()
    left, filled = BAR, 0.0
    for kind, style in zip(BARS, ("blue", "yellow", "red"), strict=True):
        filled += shares[kind] * BAR
        cells = min(left, round(filled) - (BAR - left))
        text.append("█" * cells, style=style)
        left -= cells
    return text.append("░" * left, style="dim")


def _verdict(judged: Mapping[str, Any]) -> Panel:
    sign, colour = VERDICTS[judged["kind"]]
    text = Text(f"{sign} {judged['kind']}", style=f"bold {colour}")
    if judged["reasons"]:
        for reason in judged["reasons"]:
            text.append(f"\n  {reason}", style="default")
    else:
        text.append(f"  {judged['summary']}", style="not bold default")
    return Panel(text, box=box.ROUNDED, border_style=colour, title="Verdict", title_align="left", padding=(0, 1))


def _where(folder: Path, name: str = "report.html") -> Text:
    shown = folder / name
    path = shown.relative_to(Path.cwd()) if shown.is_relative_to(Path.cwd()) else shown
    return Text(" Report  ", style="dim").append(str(path), style="bold cyan" if shown.exists() else "cyan")


def _heading(name: str) -> str:
    return name.replace("_", " ").capitalize()
