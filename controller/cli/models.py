"""`testbed models`: the networks that a scenario can name."""

from __future__ import annotations

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, make_console, options, print_catalogue
from testbed import formats


@click.command()
@click.argument("name", required=False)
@click.option("--data", default="digits", show_default=True, help="Data set whose images and classes NAME is for.")
@as_json
def models(name: str | None, data: str, as_json: bool) -> None:
    """List the models a scenario can name, with their options; with NAME, the units of one.

    A model is cut between its units, so there are at most as many stages as units. Figures are per sample: FLOPs of
    the forward (a multiply and an add are two), and the bytes that cross the cut after a unit.

    \b
    Examples:
      testbed models
      testbed models cnn
      testbed models vgg5 --data cifar10
    """
    from controller.report import tables
    from testbed.data.catalog import describe as describe_data
    from testbed.models.catalog import CATALOG, create, describe

    if name is None:
        entries = [
            {"name": entry.name, "summary": entry.summary, "options": options(entry.Options)}
            for entry in CATALOG.values()
        ]
        if as_json:
            dump(entries)
        else:
            print_catalogue(entries, lambda entry: entry["summary"])
        return
    source = describe_data(data)
    figures = describe(create(name, {}, source.shape, source.classes))
    if as_json:
        dump(figures)
        return
    size = "x".join(map(str, figures["input"]))
    console = make_console()
    console.print(
        f"[bold]{figures['name']}[/bold] for {data}: {size}, {figures['classes']} classes; "
        f"{figures['parameters']:,} parameters, {formats.count(figures['forward_flops'])} FLOP a forward\n"
    )
    numbers = ("parameters", "FLOP", "bytes across")
    table = tables.table("", "unit", "output", *numbers, right=("", *numbers))
    for unit in figures["units"]:
        table.add_row(
            str(unit["index"]),
            unit["name"],
            "x".join(map(str, unit["output"])),
            f"{unit['parameters']:,}",
            formats.count(unit["forward_flops"]),
            f"{unit['cut_bytes']:,}",
        )
    console.print(table)
