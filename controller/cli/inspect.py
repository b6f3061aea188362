"""`testbed plan`, `validate`, `schema`, `models`, `methods`, `profiles`: look at everything before anything runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from controller.cli.options import as_json, overrides
from testbed import formats
from testbed.errors import InputError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from testbed.network.presets import LinkPreset
    from testbed.prepare import Prepared


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _dump(value: object) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


# ---------------------------------------------------------------------------------------------------------------- plan


@click.command()
@click.argument("scenario")
@overrides
@as_json
def plan(scenario: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show who holds which part of the model, and what that costs, without running anything.

    For each device of the plan: its units, parameters, memory against what it has, and the FLOPs it computes in
    a step; then the step time that the planner predicts and, for a pipeline, its schedule drawn as a grid
    (F0 is the forward of micro-batch 0, B0 its backward). A method that can divide the work in several ways shows
    each beside the chosen one. A sweep is planned at each of its points.

    SCENARIO is a file, or the name of one in scenarios/.

    \b
    Examples:
      testbed plan quickstart
      testbed plan quickstart --set workload.method.schedule=gpipe
      testbed plan scenarios/quickstart.yaml --json
    """
    from testbed.prepare import prepare
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load

    # Repetitions differ in their seed alone, which no planner looks at.
    points = [each for each in trials(load(scenario, overrides)) if each.repetition == 0]
    plans = [_describe_plan(prepare(each)) for each in points]
    if as_json:
        _dump(plans)
        return
    console = _console()
    for number, described in enumerate(plans):
        if number:
            console.print()
        _print_plan(console, described)


def _describe_plan(prepared: Prepared) -> dict[str, Any]:
    experiment, task, chosen = prepared.experiment, prepared.problem, prepared.plan
    workload, devices = task.workload, {device.name: device for device in experiment.devices}
    training = workload.task == "train"
    rows = []
    for assignment in chosen.assignments:
        units = task.model.units[assignment.first : assignment.last]
        flops = sum(unit.forward_flops + (unit.backward_flops if training else 0.0) for unit in units)
        parameters = sum(unit.parameters for unit in units)
        if assignment.flops is not None:
            flops = assignment.flops
        if assignment.parameters is not None:
            parameters = assignment.parameters
        device = devices[assignment.device]
        rows.append(
            {
                "device": device.name,
                "profile": device.profile,
                "speed": device.speed,
                "first": assignment.first,
                "last": assignment.last,
                "units": [unit.name for unit in units],
                "divided": assignment.parameters is not None,
                "parameters": parameters,
                "memory": assignment.memory,
                "memory_available": device.memory,
                "flops": flops * workload.batch_size,
                "compute_time": flops * workload.batch_size / device.speed,
            }
        )
    return {
        "scenario": prepared.scenario.name,
        "point": prepared.trial.point,
        "task": workload.task,
        "method": chosen.method,
        "model": task.model.name,
        "batch_size": workload.batch_size,
        "lead": chosen.lead,
        "assignments": rows,
        "idle": [name for name in devices if name not in {row["device"] for row in rows}],
        "step_time": chosen.step_time,
        "schedule": _draw_schedule(prepared),
        "alternatives": [asdict(each) for each in prepared.method.alternatives(task)],
        "details": chosen.details,
    }


def _draw_schedule(prepared: Prepared) -> str | None:
    """Draw a pipeline's step as a grid; None for a method without a schedule."""
    from testbed.schedule import SCHEDULES, grid

    name, micro_batches = (prepared.plan.details.get(key) for key in ("schedule", "micro_batches"))
    stages = len(prepared.plan.assignments)
    if name not in SCHEDULES or not isinstance(micro_batches, int) or stages < 2:
        return None
    return grid(SCHEDULES[name], stages, micro_batches)


def _print_plan(console: Console, described: dict[str, Any]) -> None:
    from controller.report import tables

    point = ", ".join(f"{key}={value}" for key, value in described["point"].items())
    unit = "step" if described["task"] == "train" else "request"
    console.print(
        f"[bold]{described['scenario']}[/bold]{' at ' + point if point else ''}: {described['task']} "
        f"{described['model']} with {described['method']}, {described['batch_size']} samples a {unit}\n"
    )
    numbers = ("parameters", "memory", "of", "FLOP", "time")
    table = tables.table("device", "units", *numbers, right=numbers)
    for row in described["assignments"]:
        share = row["memory"] / row["memory_available"]
        table.add_row(
            row["device"] + (" *" if row["device"] == described["lead"] else ""),
            _held(row),
            formats.count(row["parameters"]),
            formats.size(row["memory"]),
            f"{share:.0%}" if share >= 0.01 else "< 1%",
            formats.count(row["flops"]),
            formats.seconds(row["compute_time"]),
        )
    for name in described["idle"]:
        table.add_row(name, "-")
    console.print(table)
    console.print(f"\n[dim]* lead, holds the data; of: the device's memory; FLOP, time: per {unit}[/dim]")
    if described["step_time"] is not None:
        console.print(f"predicted {unit} time: [bold]{formats.seconds(described['step_time'])}[/bold]")
    if described["schedule"]:
        console.print()
        console.print(described["schedule"], soft_wrap=True)
    if described["alternatives"]:
        console.print()
        _print_alternatives(console, described["alternatives"])


def _print_alternatives(console: Console, alternatives: Sequence[dict[str, Any]]) -> None:
    """Print what each way takes of the device that it takes most of, and of the network."""
    from controller.report import tables

    numbers = ("weights", "memory", "T", "C", "on the wire", "time")
    table = tables.table("scheme", *numbers, "", right=numbers)
    for each in alternatives:
        notes = [] if each["fits"] else ["does not fit"]
        table.add_row(
            each["name"] + (" *" if each["chosen"] else ""),
            formats.count(max(each["weights"].values())),
            formats.size(max(each["memory"].values())),
            formats.count(each["longest_path"]),
            formats.count(each["communication"]),
            formats.size(each["wire_bytes"]),
            "-" if each["step_time"] is None else formats.seconds(each["step_time"]),
            "; ".join([*notes, *([each["notes"]] if each["notes"] else [])]),
        )
    console.print(table)
    console.print(
        "\n[dim]* chosen; weights, in elements, and memory: of the device with most; T: multiplications one after the "
        "other, C: elements sent by the paper's formulas, per sample; on the wire, time: of a request[/dim]"
    )


def _held(row: dict[str, Any]) -> str:
    """Say which units a device holds: ``0-2 conv1..conv3``."""
    names, first, last = row["units"], row["first"], row["last"] - 1
    if not names:
        return "-"
    if row["divided"]:
        return f"a part of {first}-{last}" if last > first else f"a part of {first} {names[0]}"
    return f"{first} {names[0]}" if len(names) == 1 else f"{first}-{last} {names[0]}..{names[-1]}"


# ------------------------------------------------------------------------------------------------------------ validate


@click.command()
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...")
@overrides
@as_json
def validate(scenarios: tuple[str, ...], overrides: tuple[str, ...], as_json: bool) -> None:
    """Check scenario files: keys, units, devices, links, the plan, faults and expectations.

    Everything that `testbed run` would refuse is refused here, before any container exists: one line for each
    problem with file, line, key, what is wrong and what would be right. Exits with 2 if any file has one.

    \b
    Examples:
      testbed validate quickstart
      testbed validate scenarios/*.yaml scenarios/smoke/*.yaml
    """
    results = [_validate(name, overrides) for name in scenarios]
    if as_json:
        _dump(results)
    else:
        for result in results:
            if result["ok"]:
                click.echo(f"ok {result['file']}: {result['summary']}")
            for error in result["errors"]:
                click.echo(error, err=True)
    if not all(result["ok"] for result in results):
        sys.exit(InputError.exit_code)


def _validate(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    from testbed.prepare import prepare
    from testbed.scenario.expand import trials
    from testbed.scenario.loading import load

    file = name
    try:
        scenario = load(name, overrides)
        file = scenario.source.file
        runs = trials(scenario)
        for each in runs:
            prepare(each)
    except InputError as error:
        return {"file": file, "ok": False, "errors": str(error).split("\n")}
    first = runs[0].experiment
    devices, links = len(first.devices), len(first.links)
    counted = [(devices, "device"), (links, "directed link"), (len(scenario.faults), "fault"), (len(runs), "run")]
    summary = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counted)
    return {"file": file, "ok": True, "runs": len(runs), "summary": summary, "errors": []}


# -------------------------------------------------------------------------------------------------------------- schema


@click.command()
def schema() -> None:
    """Print the JSON schema of scenario files.

    Editors with a YAML language server complete and check scenarios with it. The options of models and methods
    are not part of it: `testbed models` and `testbed methods` list them, `testbed validate` checks them.

    \b
    Example, for the first line of a scenario file:
      testbed schema > scenario.schema.json
      # yaml-language-server: $schema=scenario.schema.json
    """
    from testbed.scenario.loading import published_schema

    _dump(published_schema())


# -------------------------------------------------------------------------------------------- models, methods, profiles


def _options(model: type[BaseModel]) -> list[dict[str, Any]]:
    """Describe what a method or a model lets the scenario choose."""
    properties = model.model_json_schema().get("properties", {})
    defaults = model.model_construct().model_dump(mode="json", warnings=False)
    return [
        {
            "name": name,
            "default": defaults.get(name),
            "required": model.model_fields[name].is_required(),
            "choices": _choices(schema),
            "description": schema.get("description", ""),
        }
        for name, schema in properties.items()
    ]


def _choices(schema: dict[str, Any]) -> list[Any]:
    branches = [schema, *schema.get("anyOf", [])]
    return [choice for branch in branches for choice in branch.get("enum", [])]


def _print_options(console: Console, options: Sequence[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    for option in options:
        default = option["default"]
        if isinstance(default, tuple | list):
            default = "[" + ", ".join(map(str, default)) + "]"
        notes = ["one of " + ", ".join(map(str, option["choices"]))] if option["choices"] else []
        notes.append("required" if option["required"] else f"default {'none' if default is None else default}")
        text = " ".join([escape(option["description"]), f"[dim]({escape('; '.join(notes))})[/dim]"]).strip()
        grid.add_row(f"[cyan]{option['name']}[/cyan]", text)
    console.print(Padding(grid, (0, 0, 0, 2)) if options else "  [dim]no options[/dim]")


def _print_catalogue(entries: Sequence[dict[str, Any]], title: Callable[[dict[str, Any]], str]) -> None:
    console = _console()
    for number, entry in enumerate(entries):
        if number:
            console.print()
        console.print(f"[bold]{entry['name']}[/bold]: {title(entry)}")
        _print_options(console, entry["options"])


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
            {"name": entry.name, "summary": entry.summary, "options": _options(entry.Options)}
            for entry in CATALOG.values()
        ]
        if as_json:
            _dump(entries)
        else:
            _print_catalogue(entries, lambda entry: entry["summary"])
        return
    source = describe_data(data)
    figures = describe(create(name, {}, source.shape, source.classes))
    if as_json:
        _dump(figures)
        return
    size = "x".join(map(str, figures["input"]))
    console = _console()
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


@click.command()
@as_json
def methods(as_json: bool) -> None:
    """List the methods a scenario can name: what each does, for which tasks, and its options.

    \b
    Example, in a scenario:
      workload:
        method: {name: pipeline, schedule: 1f1b, micro_batches: 4}
    """
    from testbed.methods import METHODS

    entries = [
        {
            "name": method.name,
            "summary": method.summary,
            "tasks": list(method.tasks),
            "options": _options(method.Options),
        }
        for method in METHODS.values()
    ]
    if as_json:
        _dump(entries)
    else:
        _print_catalogue(entries, lambda entry: f"{entry['summary']} [dim]({', '.join(entry['tasks'])})[/dim]")


@click.command()
@as_json
def profiles(as_json: bool) -> None:
    """List device profiles and link presets, each with the source of its figures.

    The speed is what the pacing charges computing at. Most are results of HPL, which is a device's best in large
    float64 matrix products: measure your own network and override `speed` where the absolute time matters.

    \b
    Example, in a scenario:
      devices:
        worker: {profile: raspberry-pi-4b, count: 3, memory: 2GiB}
      network:
        link: {preset: wifi, delay: 3ms}
    """
    from testbed.hardware import PROFILES
    from testbed.network.presets import PRESETS
    from testbed.quantities import format_rate, format_size

    if as_json:
        _dump(
            {
                "devices": [asdict(profile) for profile in PROFILES.values()],
                "links": [asdict(preset) for preset in PRESETS.values()],
            }
        )
        return
    console = _console()
    console.print("[bold]Devices[/bold]")
    devices = [
        (each.name, formats.speed(each.speed), format_size(each.memory), each.basis, each.source)
        for each in PROFILES.values()
    ]
    _print_sourced(console, devices)
    console.print("\n[bold]Links[/bold]: up is towards the first device of the scenario")
    links = [
        (each.name, f"{format_rate(each.up)} up", f"{format_rate(each.down)} down", _delay(each), each.source)
        for each in PRESETS.values()
    ]
    _print_sourced(console, links)


def _delay(preset: LinkPreset) -> str:
    from testbed.quantities import format_duration

    return "delay is yours to give" if preset.delay is None else f"{format_duration(preset.delay)} one way"


def _print_sourced(console: Console, rows: Sequence[tuple[str, str, str, str, str]]) -> None:
    """Print rows of four figures, each with its source in the lines below."""
    from rich.markup import escape
    from rich.padding import Padding

    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, first, second, note, source in rows:
        console.print(
            f"  [cyan]{name:<{widths[0]}}[/cyan]  {first:>{widths[1]}}  {second:>{widths[2]}}  {note}", soft_wrap=True
        )
        console.print(Padding(f"[dim]{escape(source)}[/dim]", (0, 0, 0, 6)))
