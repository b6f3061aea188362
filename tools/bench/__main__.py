"""`python -m tools.bench`: what the testbed itself costs on this machine."""

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
BESIDE = ("peers",)
"""Measured when they are named: they install others' packages."""


def _measure(part: str) -> Callable[[], Iterator[Measurement]]:
    measure: Callable[[], Iterator[Measurement]] = importlib.import_module(
        f"tools.bench.{part}"
    ).measure
    return measure


@click.command()
@click.argument(
    "parts", nargs=-1, type=click.Choice([*PARTS, *BESIDE]), metavar="[PART]..."
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
    help="Show each figure over that of another revision, measured before.",
)
def bench(
    parts: tuple[str, ...], as_json: bool, out: Path | None, compare: str | None
) -> None:
    """Measure these parts, all by default; docs/bench.md describes them."""
    before = kept.of_revision(compare) if compare else {}
    console = Console(stderr=as_json, highlight=False)
    figures: list[Measurement] = []
    for part in parts or PARTS:
        console.print(f"[cyan]measuring {part}[/]")
        for figure in _measure(part)():
            figures.append(figure)
            mark = {None: " ", True: "[green]✔[/]", False: "[red]✘[/]"}[figure.reached]
            console.print(
                f"  {mark} {figure.name}: {figure.value:.4g} {figure.unit}  [dim]{figure.detail}[/]"
            )
    kept.keep(figures)
    document = json.dumps([figure.to_json() for figure in figures], indent=2)
    if out:
        out.write_text(document + "\n")
    if as_json:
        click.echo(document)
        return
    console.print(tables.draw(_section(figures, compare, before), console.width))


def _section(
    figures: list[Measurement], compare: str | None, before: Mapping[str, float]
) -> Section:
    rows = []
    for figure in figures:
        mark = {None: "", True: "✔", False: "✘"}[figure.reached]
        cells = [
            Cell(figure.name),
            Cell(f"{figure.value:.4g} {figure.unit}"),
            Cell(figure.to_json()["target"] or ""),
        ]
        cells.append(Cell(mark, tone="no" if figure.reached is False else ""))
        if compare:
            text, worse = kept.ratio(figure, before)
            cells.append(Cell(text, tone="no" if worse else ""))
        rows.append(cells)
    heads = ("Value", "Target", "", *([f"Over {compare}"] if compare else []))
    return Section(
        "", "", "", (Column("Figure", "name"), *tables.figures(*heads)), rows
    )


if __name__ == "__main__":
    bench(prog_name="python -m tools.bench")
