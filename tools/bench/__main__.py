"""`python -m tools.bench`: measurements of the testbed's own costs on this machine."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click
from rich.console import Console

from testbed_controller.report import tables
from testbed_controller.report.tables import Cell, Column, Section
from tools.bench import kept
from tools.bench.figure import Measurement

PARTS = (
    "clocks",
    "pacing",
    "transfer",
    "gloo",
    "memory",
    "startup",
    "conformance",
    "hosts",
)
"""Parts that are measured by default."""
PEER_PARTS = ("peers",)
"""Parts measured only by name, since they install packages of others."""


def _measure_function(part: str) -> Callable[[], Iterator[Measurement]]:
    module = importlib.import_module(f"tools.bench.{part}")
    measure: Callable[[], Iterator[Measurement]] = module.measure
    return measure


@click.command()
@click.argument(
    "parts", nargs=-1, type=click.Choice([*PARTS, *PEER_PARTS]), metavar="[PART]..."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the JSON to this file.",
)
@click.option(
    "--compare",
    metavar="REV",
    help="Show the ratio to the stored figures of another revision.",
)
def bench(
    parts: tuple[str, ...], as_json: bool, out: Path | None, compare: str | None
) -> None:
    """Measure the costs of the testbed, all parts or the given ones, which docs/bench.md describes."""
    before = kept.figures_of_revision(compare) if compare else {}
    console = Console(stderr=as_json, highlight=False)
    figures: list[Measurement] = []
    for part in parts or PARTS:
        console.print(f"[cyan]measuring {part}[/]")
        for figure in _measure_function(part)():
            figures.append(figure)
            mark = {None: " ", True: "[green]✔[/]", False: "[red]✘[/]"}[figure.reached]
            value = f"{figure.value:.4g} {figure.unit}"
            console.print(f"  {mark} {figure.name}: {value}  [dim]{figure.detail}[/]")
    kept.store_figures(figures)
    document = json.dumps([figure.to_json() for figure in figures], indent=2)
    if out:
        out.write_text(document + "\n")
    if as_json:
        click.echo(document)
        return
    console.print(tables.draw(_make_section(figures, compare, before), console.width))


def _make_section(
    figures: list[Measurement], compare: str | None, before: Mapping[str, float]
) -> Section:
    rows = []
    for figure in figures:
        mark = {None: "", True: "✔", False: "✘"}[figure.reached]
        cells = [
            Cell(figure.name),
            Cell(f"{figure.value:.4g} {figure.unit}"),
            Cell(figure.to_json()["target"] or ""),
            Cell(mark, tone="no" if figure.reached is False else ""),
        ]
        if compare:
            text, is_worse = kept.compare_figure(figure, before)
            cells.append(Cell(text, tone="no" if is_worse else ""))
        rows.append(cells)
    headings = ["Value", "Target", ""]
    if compare:
        headings.append(f"Over {compare}")
    columns = (Column("Figure", "name"), *tables.number_columns(*headings))
    return Section("", "", "", columns, rows)


if __name__ == "__main__":
    bench(prog_name="python -m tools.bench")
