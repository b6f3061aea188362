"""`testbed show`: list the methods, models, data sets and profiles available to scenarios, and print the schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from testbed.common import formats
from testbed.common.errors import InputError, nearest
from testbed.common.quantities import (
    format_byte_rate,
    format_duration,
    format_rate,
    format_size,
    format_speed,
)
from testbed_controller.cli.data import data
from testbed_controller.cli.options import CommandGroup, as_json
from testbed_controller.cli.printing import (
    dump,
    make_console,
    options,
    print_catalogue,
    print_section,
)
from testbed_controller.report.tables import Cell, Column, Section, draw
from testbed_controller.report.tables import figures as figure_columns

if TYPE_CHECKING:
    from testbed.hardware import DeviceSpec, Profile
    from testbed.ml.models.chain import Model
    from testbed.network.parts import LinkPreset
    from testbed_controller.profiling.layers import LayerTime


@click.group(cls=CommandGroup)
def show() -> None:
    """List the methods, models, data sets and profiles available to scenarios, and print the schema."""


show.add_command(data)


@show.command()
@click.argument("name", required=False)
@as_json
def methods(name: str | None, as_json: bool) -> None:
    """List the available methods with their tasks and options. With NAME, show one of them.

    \b
    Example:
      testbed show methods pipeline

    \b
    Example, in a scenario:
      workload:
        method: {name: pipeline, schedule: 1f1b, micro_batches: 4}
    """
    from testbed.methods import METHODS

    if name is not None and name not in METHODS:
        raise InputError(f"unknown method '{name}': {nearest(name, METHODS)}")
    entries: list[dict[str, Any]] = []
    for each in METHODS if name is None else [name]:
        try:
            method = METHODS[each]
        except (
            InputError
        ) as error:  # a broken package must not cost the user the other methods
            if name is not None:
                raise
            entries.append(
                {
                    "name": each,
                    "summary": error.text,
                    "tasks": [],
                    "options": [],
                    "baselines": {},
                }
            )
            continue
        entries.append(
            {
                "name": each,
                "summary": method.summary,
                "tasks": list(method.tasks),
                "options": options(method.Options),
                "baselines": method.Options.baselines,
            }
        )
    if as_json:
        dump(entries)
    else:
        print_catalogue(
            entries,
            lambda entry: (
                f"{entry['summary']} ({', '.join(entry['tasks']) or 'unusable'})"
            ),
        )


@show.command()
@click.argument("name", required=False)
@click.argument("function", required=False)
@click.option(
    "--data",
    default="digits",
    show_default=True,
    help="Data that NAME is for: a set of the list, a file or folder, FILE.py:FUNCTION, TABLE:LABEL.",
)
@click.option(
    "--measure",
    type=click.IntRange(1),
    metavar="BATCH",
    help="Time NAME's layers here, on this many samples.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Charge the layers that are measured by this file of `testbed setup profile`.",
)
@as_json
def models(
    name: str | None,
    function: str | None,
    data: str,
    measure: int | None,
    profile: Path | None,
    as_json: bool,
) -> None:
    """List the models a scenario can name, with their options; with NAME, the units of one.

    NAME may be a Python file, and FUNCTION what in it returns a torch.nn.Module; without FUNCTION, those that it
    defines are named.

    A model is cut between its units, so there are at most as many stages as units. Figures are per sample: FLOPs of
    the forward (a multiply and an add are two), and the bytes that cross the cut after a unit.

    With --measure each layer is trained by itself on one thread of this machine, and all of them in a row; printed are
    the processor times, what a device is charged whose `speed` and `memory_rate` fit all layers best, and the two
    rates. With --profile it is the device of that file: how well it predicts the time of this network.

    \b
    Examples:
      testbed show models
      testbed show models cnn
      testbed show models vgg5 --data cifar10
      testbed show models vgg5 --data synthetic-3x32x32 --measure 100
      testbed show models vgg5 --data synthetic-3x32x32 --measure 32 --profile my-laptop.yaml
      testbed show models my_net.py build --data synthetic-3x32x32
      testbed show models my_net.py build --data my_data.py:load
    """
    from testbed.ml.models.catalog import CATALOG, describe, list_names, summary_of

    if name is None:
        entries = []
        for each in list_names():
            chosen = options(CATALOG[each].Options) if each in CATALOG else []
            entries.append(
                {"name": each, "summary": summary_of(each), "options": chosen}
            )
        if as_json:
            dump(entries)
        else:
            print_catalogue(entries, lambda entry: entry["summary"])
        return
    if profile is not None and measure is None:
        raise click.UsageError("--profile requires --measure BATCH")
    model = _load_model(name, function, data)
    if measure is not None:
        if model.builder is not None:
            raise InputError(
                "--measure requires known layers, and a network of your own has only units: remove the option"
            )
        _print_measured(model, measure, profile, as_json)
        return
    figures = describe(model)
    if as_json:
        dump(figures)
        return
    _print_units(figures, data)


def _load_model(name: str, function: str | None, data: str) -> Model:
    """Return a model for a data set, by name or from a function in a file."""
    from testbed.common import usercode
    from testbed.ml.data.catalog import describe_part, part_of
    from testbed.ml.models.catalog import code_of, create
    from testbed.ml.models.making import KEY
    from testbed.ml.models.own import create_own

    part = part_of(data)
    source = describe_part(part, Path(part.path or part.file or ""))
    code = (
        usercode.read(Path(name), function or "", KEY)
        if name.endswith(".py")
        else code_of(name)
    )
    if code is None:
        return create(name, {}, source.shape, source.classes)
    return create_own(
        code, {}, source.shape, source.classes, None, source.integers, source.fields
    )


def _print_units(figures: Mapping[str, Any], data: str) -> None:
    size = "x".join(map(str, figures["input"]))
    console = make_console()
    console.print(
        f"[bold]{figures['name']}[/bold] for {data}: {size}, {figures['classes']} classes; "
        f"{figures['parameters']:,} parameters, {formats.count(figures['forward_flops'])} FLOP a forward\n"
    )
    rows = [
        (
            str(unit["index"]),
            unit["name"],
            "x".join(map(str, unit["output"])),
            f"{unit['parameters']:,}",
            formats.count(unit["forward_flops"]),
            f"{unit['cut_bytes']:,}",
        )
        for unit in figures["units"]
    ]
    columns = [
        Column(""),
        Column("unit"),
        Column("output"),
        *figure_columns("parameters", "FLOP", "bytes across"),
    ]
    print_section(console, columns, rows)
    for reason in figures["held"]:
        console.print(f"[dim]{escape(reason)}[/dim]", soft_wrap=True)


def _print_measured(
    model: Model, batch_size: int, profile: Path | None, as_json: bool
) -> None:
    """Measure a model on this machine; print the time and the predicted cost of each layer."""
    from testbed.scenario.devices import profiled
    from testbed_controller.profiling.layers import measure, measure_whole

    device = None if profile is None else profiled(profile)
    times, whole = measure(model, batch_size), measure_whole(model, batch_size)
    device = device or _fitted_device(times)
    charged = [device.seconds(each.cost) for each in times]
    if as_json:
        layers = [
            {**asdict(each), "cost": each.cost.of()._asdict(), "charged": seconds}
            for each, seconds in zip(times, charged, strict=True)
        ]
        rates = {"speed": device.speed, "memory_rate": device.memory_rate}
        dump({**rates, "seconds": whole, "charged": sum(charged), "layers": layers})
        return
    measured, flops = (
        sum(each.seconds for each in times),
        sum(each.cost.of().flops for each in times),
    )
    rows = []
    for each, seconds in zip(times, charged, strict=True):
        shares = (
            each.seconds / measured,
            seconds / sum(charged),
            each.cost.of().flops / flops,
        )
        mine, theirs, counted = (f"{share:.1%}" for share in shares)
        taken = formats.seconds(each.seconds), mine, formats.seconds(seconds), theirs
        rows.append((each.unit, each.layer, *taken, counted))
    columns = [
        Column("unit"),
        Column("layer"),
        *figure_columns("time", "of all", "as charged", "of all", "of the FLOPs"),
    ]
    console = make_console()
    print_section(console, columns, rows)
    total = formats.seconds(whole)
    charged_total = formats.seconds(sum(charged))
    together = f"{total}, as charged {charged_total} ({sum(charged) / whole:.2f} of it)"
    console.print(f"\nforward and backward of all in a row: {together}")
    if profile is None:
        rate = device.memory_rate
        read = (
            ""
            if rate is None
            else f", memory_rate: {format_byte_rate(float(f'{rate:.3g}'))}"
        )
        console.print(f"speed: {format_speed(float(f'{device.speed:.3g}'))}{read}")


def _fitted_device(times: Sequence[LayerTime]) -> DeviceSpec:
    from testbed.hardware import DeviceSpec
    from testbed_controller.profiling.layers import rates

    try:
        speed, memory_rate = rates(times)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    return DeviceSpec("this machine", speed, 0.0, memory_rate=memory_rate)


@show.command()
@as_json
def profiles(as_json: bool) -> None:
    """List device profiles, link presets and radios, each with the source of its values.

    The speed is what the pacing charges computing at. Most are results of HPL, which is a device's best in large
    float64 matrix products: measure your own network and override `speed` where the absolute time matters.

    \b
    Example, in a scenario:
      devices:
        worker: {profile: raspberry-pi-4b, count: 3, memory: 2GiB}
      network:
        link: {preset: 802.11a, delay: 3ms}
        radio: {preset: 802.11a, area: [50, 50]}
    """
    from testbed.hardware import PROFILES
    from testbed.network.parts import PRESETS
    from testbed.network.radio import TRANSCEIVERS

    if as_json:
        dump(
            {
                "devices": [asdict(profile) for profile in PROFILES.values()],
                "links": [asdict(preset) for preset in PRESETS.values()],
                "radios": [asdict(radio) for radio in TRANSCEIVERS.values()],
            }
        )
        return
    console = make_console()
    about: dict[str, list[tuple[str, ...]]] = {
        "Devices": [
            (
                each.name,
                formats.speed(each.speed),
                format_size(each.memory),
                _describe_basis(each),
                each.source,
            )
            for each in PROFILES.values()
        ],
        "Links, up is towards the first device of the scenario": [
            (
                each.name,
                f"{format_rate(each.up)} up",
                f"{format_rate(each.down)} down",
                _format_delay(each),
                each.source,
            )
            for each in PRESETS.values()
        ],
        "Radios, for `network.radio`: how far a cast is heard": [
            (
                each.name,
                *(
                    f"{power:g} dBm"
                    for power in (each.transmit_power, each.sensitivity)
                ),
                _RADIO,
                each.source,
            )
            for each in TRANSCEIVERS.values()
        ],
    }
    columns = (
        Column("", "name"),
        Column("", "figure"),
        Column("", "figure"),
        Column(""),
    )
    for title, entries in about.items():
        rows = [
            [*map(Cell, figures), Cell(note, source)]
            for *figures, note, source in entries
        ]
        console.print(draw(Section(title, "", "", columns, rows), console.width))


_RADIO = "sent with, still received"


def _describe_basis(profile: Profile) -> str:
    """Describe the origin of a speed, and the number of processors."""
    return (
        f"{profile.processors} processors, each: " if profile.processors > 1 else ""
    ) + profile.basis


def _format_delay(preset: LinkPreset) -> str:
    delay = (
        "delay is yours to give"
        if preset.delay is None
        else f"{format_duration(preset.delay)} one way"
    )
    return delay if preset.frame is None else f"{delay}; frame {preset.frame} B"


@show.command()
def schema() -> None:
    """Print the JSON schema of scenario files.

    Editors with a YAML language server complete and check scenarios with it. The options of models and methods
    are not part of it: `testbed show models` and `testbed show methods` list them, `testbed validate` checks them.

    \b
    Example, for the first line of a scenario file:
      testbed show schema > scenario.schema.json
      # yaml-language-server: $schema=scenario.schema.json
    """
    from testbed.scenario.explaining import published_schema

    dump(published_schema())
