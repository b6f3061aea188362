"""The end of a run in the terminal: figures, devices, links, faults, what was expected, the verdict, the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from controller.results.reproduction import ReproducedRow
from controller.results.run import Run, short_keys, value_text
from testbed.common import formats
from testbed.common.formats import FigureKind
from testbed.scenario.expect import Expectation
from testbed.trace.registry import kind_of

WIDE = 100
"""Columns from which a table has room for what is only nice to know."""
WIDEST_KEY = 24
"""Columns that a swept value keeps beside the figures."""
MOST_DEVICES = 24
MOST_OBJECTS = 20
MOST_ROWS = 12
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
    metrics = run.metrics
    parts: list[RenderableType] = [Text(), _title(run), Text(), _figures(run), Text()]
    parts.append(_devices(metrics["devices"], width))
    if metrics["links"]:
        backend = run.outcome.fidelity.get("backend") if run.outcome.runtime == "emulate" else None
        parts.append(_links(metrics["links"], width, backend, measured=run.outcome.runtime == "emulate"))
    if metrics["series"]["objects"]:
        parts.append(_objects(metrics))
    if metrics["fault_list"]:
        parts.append(_faults(metrics))
    parts += [_declared(written) for written in declared.tables(run, wide=width >= WIDE)]
    if run.expectations:
        parts.append(_expectations(run))
    parts += [_verdict(metrics["verdict"]), _where(run.path)]
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
    figures = ("Paper", "Ours", "Ours / paper", "Runs")
    table = tables.table("", *figures, "Expected", bold=[""], right=figures)
    for row in rows:
        ours = Text(formats.of_kind(row.kind, row.ours))
        if row.half_width is not None:
            ours.append(f" ± {formats.of_kind(row.kind, row.half_width)}", style="dim")
        runs = f"{row.runs}" + (f" ({row.untrusted} not trusted)" if row.untrusted else "")
        expected = Text()
        if row.holds is not None:
            expected.append(f"{'✔' if row.holds else '✘'} {row.condition}", style="green" if row.holds else "red")
        paper = formats.of_kind(row.kind, row.paper)
        table.add_row(Text(row.name), paper, ours, formats.ratio(row.ratio), runs, expected)
    notes = [Text(f" {row.name}: {row.note}", style="dim") for row in rows if row.note]
    note = "mean ± half width of the 95% confidence interval (Student)"
    console.print(Text(), _titled(source, note, table, *notes))
    console.print(_where(folder, "paper.html"))


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


def _devices(devices: Mapping[str, Mapping[str, Any]], width: int) -> RenderableType:
    wide = width >= WIDE
    kinds = ["compute", "send", "receive"]
    if any(row["down"] for row in devices.values()):
        kinds.append("down")
    kinds.append("idle")
    heads = [kind.capitalize() for kind in kinds]

    def made(between: str) -> Table:
        table = tables.table("Device", *(["Profile", ""] if wide else []), *heads, bold=["Device"], right=heads)
        for name, row in list(devices.items())[:MOST_DEVICES]:
            extra: list[RenderableType] = [row["profile"], _bar(row)] if wide else []
            table.add_row(name, *extra, *(_spent(kind, row, between) for kind in kinds))
        return table

    table = made(" ")
    if Console(width=2 * width).measure(table).maximum > width:
        table = made("\n")
    parts: list[RenderableType] = [table]
    if len(devices) > MOST_DEVICES:
        parts.append(Text(f"  and {len(devices) - MOST_DEVICES} more in the report", style="dim"))
    return _titled("Devices", "time and share of the run; what overlaps counts in both", *parts)


def _spent(kind: str, row: Mapping[str, Any], between: str) -> Text:
    if not row[kind]:
        return Text(formats.NONE, style="dim")
    text = Text(formats.seconds(row[kind]), style="red" if kind == "down" else "")
    return text.append(f"{between}{formats.whole_share(row[f'{kind}_share']):>3}", style="dim")


def _bar(row: Mapping[str, Any]) -> Text:
    """Draw how a device spent its time, idle being what is left."""
    text = Text()
    left, filled = BAR, 0.0
    for kind, style in (("compute", "blue"), ("communicate", "yellow"), ("down", "red")):
        filled += row[f"{kind}_share"] * BAR
        cells = min(left, round(filled) - (BAR - left))
        text.append("█" * cells, style=style)
        left -= cells
    return text.append("░" * left, style="dim")


def _links(rows: Sequence[Mapping[str, Any]], width: int, backend: str | None, *, measured: bool) -> RenderableType:
    heads = ["Link", "Requested", *(["Measured"] if measured else []), "Carried", *(["Used"] if width >= WIDE else [])]
    table = tables.table(*heads, bold=["Link"], right=["Carried", "Used"])
    for group in group_links(rows):
        cells: list[RenderableType] = [Text(group.name), group.requested]
        if measured:
            found = Text(group.measured, style="red" if group.problem else "")
            cells.append(found.append(f"\n{group.problem}") if group.problem else found)
        cells.append(group.traffic)
        if width >= WIDE:
            cells.append(group.used)
        table.add_row(*cells)
    shaped = f"; shaped by {backend}" if backend else ""
    return _titled("Links", f"rate, one-way delay{shaped}", table)


def _objects(metrics: Mapping[str, Any]) -> RenderableType:
    figures = ("Score", "Left", "Top", "Right", "Bottom")
    table = tables.table("Picture", "Object", *figures, bold=["Picture", "Object"], right=figures)
    rows = list(object_rows(metrics))
    for row in rows[:MOST_OBJECTS]:
        table.add_row(*row)
    parts: list[RenderableType] = [table]
    if len(rows) > MOST_OBJECTS:
        parts.append(Text(f"  and {len(rows) - MOST_OBJECTS} more in the report", style="dim"))
    return _titled("Objects", "in each picture, as first answered; sides as shares of the input", *parts)


def object_rows(metrics: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield (picture, label, score, left, top, right, bottom) of the objects in the first answer about each picture."""
    first: dict[int, Any] = {}
    for answer in metrics["series"]["objects"]:
        first.setdefault(answer["sample"], answer["boxes"])
    for sample, boxes in first.items():
        if not boxes:
            yield (str(sample), "none", *(formats.NONE,) * 5)
        for found in boxes:
            sides = (formats.share(found[side]) for side in ("left", "top", "right", "bottom"))
            yield (str(sample), found["label"], formats.share(found["score"]), *sides)


def _faults(metrics: Mapping[str, Any]) -> RenderableType:
    moments = ("Struck", "Noticed", "Undone", "Resumed", "Recovery")
    table = tables.table("Fault", *moments, bold=["Fault"], right=moments)
    for fault in metrics["fault_list"]:
        recovery = recovery_from(fault, metrics)
        table.add_row(
            Text(f"{fault['action']} {fault['target']}"),
            formats.moment(fault["struck"]),
            formats.moment(recovery["detected"]),
            formats.moment(fault["undone"]),
            formats.moment(recovery["resumed"]),
            formats.seconds(recovery["seconds"]),
        )
    return _titled("Faults", "time since the start of the workload", table)


def _declared(written: declared.Written) -> RenderableType:
    """Return a table of the run's method: of its note the first sentence, of many rows the last."""
    words = [column.heading for column in written.columns if column.kind == "text"]
    figures = [column.heading for column in written.columns if column.kind != "text"]
    table = tables.table(*(column.heading for column in written.columns), bold=words[:1], right=figures)
    for row in written.rows[-MOST_ROWS:]:
        table.add_row(*(Text(cell) for cell in row))
    parts: list[RenderableType] = [table]
    if len(written.rows) > MOST_ROWS:
        parts.append(Text(f"  and {len(written.rows) - MOST_ROWS} before them in the report", style="dim"))
    return _titled(written.title, written.note.partition(". ")[0].rstrip("."), *parts)


def recovery_from(fault: Mapping[str, Any], metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recovery that a fault led to, its seconds from this fault; all None when the method noticed none."""
    for item in metrics["recovery_list"]:
        if fault["recovered"] is not None and item["resumed"] == fault["recovered"]:
            return {**item, "seconds": fault["recovered"] - fault["struck"]}
        if item["resumed"] is None and item["struck"] == fault["struck"]:
            return dict(item)
    return {"detected": None, "resumed": None, "seconds": None}


def _expectations(run: Run) -> RenderableType:
    table = tables.table("", "Figure", "Condition", "Found", bold=["Figure"], right=["Found"])
    for expectation in run.expectations:
        mark = Text("✔", style="green") if expectation.holds else Text("✘", style="bold red")
        found = found_text(expectation, run)
        table.add_row(
            mark, Text(expectation.key), Text(expectation.condition), Text(found, "" if expectation.holds else "red")
        )
    return _titled("Expected", "", table)


def found_text(expectation: Expectation, run: Run) -> str:
    """Write what became of an expectation, exactly enough to see why it holds or not."""
    value = expectation.value
    if value is None:
        return "no such figure"
    if isinstance(value, float) and kind_of(expectation.key, run.figures) in ("share", "number"):
        return f"{value:.4g}"
    return declared.figure(expectation.key, value, run.figures)


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
