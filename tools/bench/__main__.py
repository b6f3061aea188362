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
from tools.bench import history
from tools.bench.measurement import Measurement

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
    """Return the function ``measure`` of a part's module, imported on use: some parts need Docker or torch."""
    module = importlib.import_module(f"tools.bench.{part}")
    measure: Callable[[], Iterator[Measurement]] = module.measure
    return measure


@click.command()
@click.argument(
    "parts", nargs=-1, type=click.Choice([*PARTS, *PEER_PARTS]), metavar="[PART]..."
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the JSON to this file.",
)
@click.option(
    "--compare",
    metavar="REV",
    help="Show the ratio to the stored measurements of another revision.",
)
def bench(
    parts: tuple[str, ...], as_json: bool, out: Path | None, compare: str | None
) -> None:
    """Measure the costs of the testbed, all parts or the given ones, which docs/bench.md describes."""
    # First, so that a wrong name of a revision is noticed before anything is measured.
    before = history.measurements_of_revision(compare) if compare else {}
    console = Console(stderr=as_json, highlight=False)
    measurements: list[Measurement] = []
    for part in parts or PARTS:
        console.print(f"[cyan]measuring {part}[/]")
        for measurement in _measure_function(part)():
            measurements.append(measurement)
            mark = {None: " ", True: "[green]✔[/]", False: "[red]✘[/]"}[
                measurement.reached
            ]
            value = f"{measurement.value:.4g} {measurement.unit}"
            console.print(
                f"  {mark} {measurement.name}: {value}  [dim]{measurement.detail}[/]"
            )
    history.store_measurements(measurements)
    document = json.dumps(
        [measurement.to_json() for measurement in measurements], indent=2
    )
    if out:
        out.write_text(document + "\n")
    if as_json:
        click.echo(document)
        return
    console.print(
        tables.draw_section(_make_section(measurements, compare, before), console.width)
    )


def _make_section(
    measurements: list[Measurement], compare: str | None, before: Mapping[str, float]
) -> Section:
    rows = []
    for measurement in measurements:
        mark = {None: "", True: "✔", False: "✘"}[measurement.reached]
        cells = [
            Cell(measurement.name),
            Cell(f"{measurement.value:.4g} {measurement.unit}"),
            Cell(measurement.to_json()["target"] or ""),
            Cell(mark, tone="no" if measurement.reached is False else ""),
        ]
        if compare:
            text, is_worse = history.compare_measurement(measurement, before)
            cells.append(Cell(text, tone="no" if is_worse else ""))
        rows.append(cells)
    headings = ["Value", "Target", ""]
    if compare:
        headings.append(f"Over {compare}")
    columns = (Column("Measurement", "name"), *tables.number_columns(*headings))
    return Section("", "", "", columns, rows)


if __name__ == "__main__":
    bench(prog_name="python -m tools.bench")
