"""`testbed show`: list the methods, models, data sets and profiles available to scenarios, and print the schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
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
from testbed_controller.cli.options import CommandGroup, json_option
from testbed_controller.cli.printing import (
    dump,
    make_console,
    options,
    print_catalogue,
    print_section,
)
from testbed_controller.report.tables import (
    Cell,
    Column,
    Section,
    draw_section,
    number_columns,
)

if TYPE_CHECKING:
    from testbed.hardware import DeviceSpec, Profile
    from testbed.method import Method
    from testbed.ml.models.chain import Model
    from testbed.network.parts import LinkPreset
    from testbed.network.radio import Transceiver
    from testbed_controller.profiling.layers import LayerTime


@click.group(cls=CommandGroup)
def show() -> None:
    """List the methods, models, data sets and profiles available to scenarios, and print the schema."""


show.add_command(data)


@show.command()
@click.argument("name", required=False)
@json_option
def methods(name: str | None, as_json: bool) -> None:
    """List the available methods with their tasks and options. With NAME, show one method.

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
            entries.append(_method_entry(each, METHODS[each]))
        except InputError as error:
            if name is not None:
                raise
            # A broken package must not hide the methods of other packages: its entry has the error as its summary.
            entries.append(
                {
                    "name": each,
                    "summary": error.text,
                    "tasks": [],
                    "options": [],
                    "baselines": {},
                }
            )
    if as_json:
        dump(entries)
    else:
        print_catalogue(entries, _method_summary)


def _method_entry(name: str, method: Method) -> dict[str, Any]:
    return {
        "name": name,
        "summary": method.summary,
        "tasks": list(method.tasks),
        "options": options(method.Options),
        "baselines": method.Options.baselines,
    }


def _method_summary(entry: Mapping[str, Any]) -> str:
    tasks = ", ".join(entry["tasks"]) or "unusable"
    return f"{entry['summary']} ({tasks})"


@show.command()
@click.argument("name", required=False)
@click.argument("function", required=False)
@click.option(
    "--data",
    default="digits",
    show_default=True,
    help="Data set for NAME: a name of `testbed show data`, a file or folder, FILE.py:FUNCTION, or TABLE:LABEL.",
)
@click.option(
    "--measure",
    type=click.IntRange(1),
    metavar="BATCH",
    help="Time the layers of NAME on this machine, with this batch size.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With --measure: compare with the predictions of this profile, a file of `testbed setup profile`.",
)
@json_option
def models(
    name: str | None,
    function: str | None,
    data: str,
    measure: int | None,
    profile: Path | None,
    as_json: bool,
) -> None:
    """List the models available to scenarios with their options. With NAME, show the units of one.

    NAME may also be a Python file, and FUNCTION a function in it that returns a torch.nn.Module. Without FUNCTION, the
    error message lists the functions and classes of the file.

    A model is cut between its units, so the number of units limits the number of stages. FLOPs are those of the
    forward pass of one sample (a multiply-add counts as two); "bytes across" is the output of a unit for one sample,
    sent when the model is cut after the unit.

    With --measure, each layer is trained alone on one thread of this machine, then all layers in sequence. The output
    shows the measured processor times, the two rates (`speed`, `memory_rate`) that fit all layers best, and the times
    predicted from these rates. With --profile, the predictions are those of the given profile.

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
            model_options = options(CATALOG[each].Options) if each in CATALOG else []
            entries.append(
                {"name": each, "summary": summary_of(each), "options": model_options}
            )
        if as_json:
            dump(entries)
        else:
            print_catalogue(entries, itemgetter("summary"))
        return
    if profile is not None and measure is None:
        raise click.UsageError("--profile requires --measure BATCH")
    model = _load_model(name, function, data)
    if measure is not None:
        if model.builder is not None:
            raise InputError(
                "--measure requires known layers, and a network of your own has only units: remove the option"
            )
        layers = _measure_layers(model, measure, profile)
        if as_json:
            dump(layers.to_json())
        else:
            _print_layers(layers, fitted=profile is None)
        return
    description = describe(model)
    if as_json:
        dump(description)
        return
    _print_units(description, data)


def _load_model(name: str, function: str | None, data: str) -> Model:
    """Return a model for the samples of a data set; ``function`` is one in the Python file ``name``, else None."""
    from testbed.common import usercode
    from testbed.ml.data.catalog import describe_part, part_of
    from testbed.ml.models.catalog import code_of, create
    from testbed.ml.models.maker import MODEL_FILE_KEY
    from testbed.ml.models.own import create_own

    part = part_of(data)
    source = describe_part(part, Path(part.path or part.file or ""))
    code = code_of(name)
    if name.endswith(".py"):
        code = usercode.read(Path(name), function or "", MODEL_FILE_KEY)
    # Without code, the model is one of the testbed; packages and files have code.
    if code is None:
        return create(name, {}, source.shape, source.classes)
    return create_own(
        code,
        {},
        source.shape,
        source.classes,
        integers=source.integers,
        fields=source.fields,
    )


def _print_units(description: Mapping[str, Any], data: str) -> None:
    size = "x".join(map(str, description["input"]))
    flops = formats.count(description["forward_flops"])
    console = make_console()
    console.print(
        f"[bold]{description['name']}[/bold] for {data}: {size}, {description['classes']} classes; "
        f"{description['parameters']:,} parameters, {flops} FLOP per forward pass\n"
    )
    rows = []
    for unit in description["units"]:
        rows.append(
            (
                str(unit["index"]),
                unit["name"],
                "x".join(map(str, unit["output"])),
                f"{unit['parameters']:,}",
                formats.count(unit["forward_flops"]),
                f"{unit['cut_bytes']:,}",
            )
        )
    columns = [
        Column(""),
        Column("unit"),
        Column("output"),
        *number_columns("parameters", "FLOP", "bytes across"),
    ]
    print_section(console, columns, rows)
    for reason in description["undivided"]:
        console.print(f"[dim]{escape(reason)}[/dim]", soft_wrap=True)


@dataclass(frozen=True)
class MeasuredLayers:
    """Measured times of a model's layers beside the predictions for a device, all in seconds."""

    times: Sequence[LayerTime]
    predicted: Sequence[float]
    """Predicted time of each layer."""
    whole: float
    """Measured time of all layers in sequence."""
    device: DeviceSpec

    def to_json(self) -> dict[str, Any]:
        """Return the content of `testbed show models NAME --measure BATCH --json`."""
        layers = []
        for each, seconds in zip(self.times, self.predicted, strict=True):
            cost = each.cost.of()._asdict()
            layers.append({**asdict(each), "cost": cost, "charged": seconds})
        return {
            "speed": self.device.speed,
            "memory_rate": self.device.memory_rate,
            "seconds": self.whole,
            "charged": sum(self.predicted),
            "layers": layers,
        }


def _measure_layers(
    model: Model, batch_size: int, profile: Path | None
) -> MeasuredLayers:
    """Measure a model on this machine and predict the same times, from a profile or from fitted rates."""
    from testbed.scenario.devices import device_with_profile
    from testbed_controller.profiling.layers import measure_layers, measure_whole

    # The file is read first, so that a mistake is reported before the measurement, which takes a while.
    device = None if profile is None else device_with_profile(profile)
    times = measure_layers(model, batch_size)
    whole = measure_whole(model, batch_size)
    device = device or _fitted_device(times)
    predicted = [device.seconds(each.cost) for each in times]
    return MeasuredLayers(times, predicted, whole, device)


def _print_layers(layers: MeasuredLayers, *, fitted: bool) -> None:
    """Print the time of each layer; with ``fitted``, also the rates of the device, which fit the measurement."""
    measured_total = sum(each.seconds for each in layers.times)
    predicted_total = sum(layers.predicted)
    flops_total = sum(each.cost.of().flops for each in layers.times)
    rows = []
    for each, predicted in zip(layers.times, layers.predicted, strict=True):
        rows.append(
            (
                each.unit,
                each.layer,
                formats.seconds(each.seconds),
                f"{each.seconds / measured_total:.1%}",
                formats.seconds(predicted),
                f"{predicted / predicted_total:.1%}",
                f"{each.cost.of().flops / flops_total:.1%}",
            )
        )
    columns = [
        Column("unit"),
        Column("layer"),
        *number_columns("time", "of all", "predicted", "of all", "of the FLOPs"),
    ]
    console = make_console()
    print_section(console, columns, rows)
    times = (
        f"{formats.seconds(layers.whole)}, predicted {formats.seconds(predicted_total)}"
    )
    ratio = predicted_total / layers.whole
    console.print(
        f"\nforward and backward pass of all layers in sequence: {times} ({ratio:.2f} of the measured time)"
    )
    if fitted:
        rates = f"speed: {format_speed(_round_to_three(layers.device.speed))}"
        memory_rate = layers.device.memory_rate
        if memory_rate is not None:
            rates += f", memory_rate: {format_byte_rate(_round_to_three(memory_rate))}"
        console.print(rates)


def _round_to_three(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")


def _fitted_device(times: Sequence[LayerTime]) -> DeviceSpec:
    from testbed.hardware import DeviceSpec
    from testbed_controller.profiling.layers import fit_rates

    try:
        speed, memory_rate = fit_rates(times)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    return DeviceSpec("this machine", speed, 0.0, memory_rate=memory_rate)


@show.command()
@json_option
def profiles(as_json: bool) -> None:
    """List device profiles, link presets and radios, each with the source of the values.

    The time of a computation on a device is its FLOPs divided by the speed of the profile. Most speeds are results of
    HPL, the best a device reaches in large float64 matrix products: where absolute times matter, measure your own
    network (`testbed show models NAME --measure BATCH`) and override `speed`.

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
    _print_presets(
        "Devices",
        ("profile", "speed", "memory", "basis and source"),
        map(_device_row, PROFILES.values()),
    )
    _print_presets(
        "Links; up is towards the first device of the scenario",
        ("preset", "rate up", "rate down", "delay and source"),
        map(_link_row, PRESETS.values()),
    )
    _print_presets(
        "Radios, for `network.radio`: the range of casts",
        ("preset", "transmit power", "sensitivity", "source"),
        map(_radio_row, TRANSCEIVERS.values()),
    )


_PresetRow = tuple[str, str, str, str, str]
"""Name, two values, a note on the values, and their source."""


def _print_presets(
    title: str, headings: tuple[str, str, str, str], presets: Iterable[_PresetRow]
) -> None:
    name_heading, *value_headings, note_heading = headings
    columns = (
        Column(name_heading, "name"),
        *number_columns(*value_headings),
        Column(note_heading),
    )
    rows = []
    for name, first_value, second_value, note, source in presets:
        values = Cell(first_value), Cell(second_value)
        rows.append([Cell(name), *values, Cell(note, source)])
    console = make_console()
    console.print(draw_section(Section(title, "", "", columns, rows), console.width))


def _device_row(profile: Profile) -> _PresetRow:
    basis = profile.basis
    if profile.processors > 1:
        basis = f"{profile.processors} processors, each: {basis}"
    speed = formats.speed(profile.speed)
    return profile.name, speed, format_size(profile.memory), basis, profile.source


def _link_row(preset: LinkPreset) -> _PresetRow:
    note = "set `delay` in the scenario"
    if preset.delay is not None:
        note = f"{format_duration(preset.delay)} one way"
    if preset.frame is not None:
        note += f"; frame {preset.frame} B"
    up = f"{format_rate(preset.up)} up"
    down = f"{format_rate(preset.down)} down"
    return preset.name, up, down, note, preset.source


def _radio_row(radio: Transceiver) -> _PresetRow:
    power = f"{radio.transmit_power:g} dBm"
    sensitivity = f"{radio.sensitivity:g} dBm"
    note = "transmit power, receiver sensitivity"
    return radio.name, power, sensitivity, note, radio.source


@show.command()
def schema() -> None:
    """Print the JSON schema of scenario files.

    Editors with a YAML language server use the schema to complete and check scenarios. It does not contain the options
    of models and methods: `testbed show models` and `testbed show methods` list them, `testbed validate` checks them.

    \b
    Example, for the first line of a scenario file:
      testbed show schema > scenario.schema.json
      # yaml-language-server: $schema=scenario.schema.json
    """
    from testbed.scenario.explaining import published_schema

    dump(published_schema())
