"""`testbed models`: the networks that a scenario can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, make_console, options, print_catalogue
from testbed import formats
from testbed.errors import InputError
from testbed.quantities import format_byte_rate, format_speed

if TYPE_CHECKING:
    from testbed.models.chain import Model


@click.command()
@click.argument("name", required=False)
@click.argument("function", required=False)
@click.option("--data", default="digits", show_default=True, help="Data set whose images and classes NAME is for.")
@click.option(
    "--measure", type=click.IntRange(1), metavar="BATCH", help="Time NAME's layers here, on this many samples."
)
@as_json
def models(name: str | None, function: str | None, data: str, measure: int | None, as_json: bool) -> None:
    """List the models a scenario can name, with their options; with NAME, the units of one.

    NAME may be a Python file, and FUNCTION what in it returns a torch.nn.Module; without FUNCTION, those that it
    defines are named.

    A model is cut between its units, so there are at most as many stages as units. Figures are per sample: FLOPs of
    the forward (a multiply and an add are two), and the bytes that cross the cut after a unit.

    With --measure each layer is trained by itself on one thread of this machine; printed are its processor time, and
    the `speed` and `memory_rate` of a device that fit all of them best.

    \b
    Examples:
      testbed models
      testbed models cnn
      testbed models vgg5 --data cifar10
      testbed models vgg5 --data synthetic-3x32x32 --measure 100
      testbed models my_net.py build --data synthetic-3x32x32
    """
    from testbed.models.catalog import CATALOG, describe

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
    model = _model(name, function, data)
    if measure is not None:
        if model.builder is not None:
            raise InputError("--measure times layers, and of a network of your own only units are known: leave it out")
        _print_measured(model, measure, as_json)
        return
    figures = describe(model)
    if as_json:
        dump(figures)
        return
    _print_units(figures, data)


def _model(name: str, function: str | None, data: str) -> Model:
    """Return the model of that name, or that a function in the file of that name returns, for a data set."""
    from testbed.data.catalog import describe
    from testbed.models.catalog import create

    source = describe(data)
    if not name.endswith(".py"):
        return create(name, {}, source.shape, source.classes)
    from testbed import usercode
    from testbed.models.making import KEY
    from testbed.models.own import create_own

    return create_own(usercode.read(Path(name), function or "", KEY), {}, source.shape, source.classes)


def _print_units(figures: Mapping[str, Any], data: str) -> None:
    from controller.report import tables

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


def _print_measured(model: Model, batch_size: int, as_json: bool) -> None:
    """Measure the layers of a model here; print their times and the rates that fit them."""
    from controller.bench.layers import measure, rates
    from controller.report import tables
    from testbed.hardware import DeviceSpec

    times = measure(model, batch_size)
    try:
        speed, memory_rate = rates(times)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        layers = [{**asdict(each), "cost": each.cost.of()._asdict()} for each in times]
        dump({"speed": speed, "memory_rate": memory_rate, "layers": layers})
        return
    fitted = DeviceSpec("this machine", speed, 0.0, memory_rate=memory_rate)
    measured, charged = sum(each.seconds for each in times), sum(fitted.seconds(each.cost) for each in times)
    flops = sum(each.cost.of().flops for each in times)
    numbers = ("time", "of all", "as charged", "of the FLOPs")
    table = tables.table("unit", "layer", *numbers, right=numbers)
    for each in times:
        shares = (each.seconds / measured, fitted.seconds(each.cost) / charged, each.cost.of().flops / flops)
        table.add_row(each.unit, each.layer, formats.seconds(each.seconds), *(f"{share:.1%}" for share in shares))
    console = make_console()
    console.print(table)
    read = "" if memory_rate is None else f", memory_rate: {format_byte_rate(float(f'{memory_rate:.3g}'))}"
    console.print(f"\nspeed: {format_speed(float(f'{speed:.3g}'))}{read}")
