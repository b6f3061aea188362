"""`testbed plan`: who holds what, and what that costs, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.ml.layers import costs
from testbed.prepare import Prepared, prepare_all, raise_refused
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.points import point_text
from testbed.workload import by_device
from testbed_controller.cli.options import as_json, in_results, on_hosts, overrides
from testbed_controller.cli.printing import dump, make_console, print_section
from testbed_controller.report.tables import Column, figures

CLASSES_SHOWN = 4
"""Classes shown of a device, those with most samples; all of them are in the JSON."""
COLUMNS = 44
"""Letters of a map's width."""

if TYPE_CHECKING:
    from rich.console import Console

    from testbed.method import Problem
    from testbed.network.radio import Position
    from testbed.plan import Piece
    from testbed_controller.hosts.placement import LabPart


@click.command()
@click.argument("scenario")
@overrides
@on_hosts
@as_json
def plan(scenario: str, overrides: tuple[str, ...], where: LabPart, as_json: bool) -> None:
    """Show who holds which part of the model, and what that costs, without running anything.

    The table shows the units of each device, their parameters, the memory they need as a share of what the device has,
    and the FLOPs computed in a step. Below it are the step time that the planner predicts and, for a pipeline, the
    schedule as a grid (F0 is the forward of micro-batch 0, B0 its backward). With `network.radio` there are also the
    position of each device, the packet reception ratio (PRR) of each directed pair, and a map; with
    `workload.data.split`, how many training samples of which classes each device has. A method that can divide the
    work in several ways shows all of them. A sweep is planned at each of its points.

    SCENARIO is a file, or the name of one in scenarios/.

    \b
    Examples:
      testbed plan quickstart
      testbed plan quickstart --set workload.method.schedule=gpipe
      testbed plan scenarios/quickstart.yaml --json
    """
    # Repetitions differ in their seed alone; what follows from it (positions that are drawn) is shown of the first.
    loaded = load(scenario, overrides)
    if in_results(loaded):
        raise InputError(f"{scenario}: its Python files lie among results, and only 'testbed run' executes those")
    points = [each for each in trials(loaded) if each.repetition == 0]
    found, refused = prepare_all(points)
    prepared = list(found.values())
    plans = [_describe_plan(each) for each in prepared]
    if where.hosts:
        for described, each in zip(plans, _describe_hosts(prepared, where), strict=True):
            described["hosts"] = each
    if as_json:
        dump(plans)
    console = make_console()
    for number, described in enumerate([] if as_json else plans):
        if number:
            console.print()
        _print_plan(console, described)
    raise_refused(refused)


def _describe_plan(prepared: Prepared) -> dict[str, Any]:
    experiment, problem, chosen = prepared.experiment, prepared.problem, prepared.plan
    programs = by_device(problem.workload.programs, [device.name for device in problem.devices])
    return {
        "scenario": prepared.scenario.name,
        "point": prepared.trial.point,
        "task": problem.workload.task,
        "programs": {name: part.model_dump() for name, part in programs.items()},
        "method": chosen.method,
        "model": problem.model.name,
        "batch_size": problem.workload.batch_size,
        "lead": chosen.lead,
        "pieces": [_describe_piece(problem, piece) for name in chosen.devices for piece in chosen.of(name)],
        "data": _describe_data(prepared),
        "samples_everywhere": prepared.method.samples_everywhere,
        "radio": _describe_radio(prepared),
        "memory": {name: chosen.memory(name) for name in chosen.devices},
        "idle": [device.name for device in experiment.devices if device.name not in chosen.devices],
        "step_time": chosen.step_time,
        "even_step_time": _even_time(prepared),
        "f32_step_time": _plain_time(prepared),
        "fastest_alone": _fastest_alone(prepared),
        "schedule": prepared.method.draw(chosen),
        "alternatives": [asdict(each) for each in prepared.method.alternatives(problem)],
        "advice": prepared.method.advice(problem, chosen),
        "details": chosen.details.model_dump(mode="json"),
    }


def _describe_hosts(prepared: Sequence[Prepared], where: LabPart) -> list[list[dict[str, Any]]]:
    """Return for each plan what `testbed_controller.hosts.placement.described` does."""
    from testbed_controller.hosts.contexts import reach_all
    from testbed_controller.hosts.lab import capacities, placement
    from testbed_controller.hosts.placement import described

    there = capacities(reach_all(where.hosts))
    runs = [each.experiment for each in prepared]
    return [described(placement(run, there, where.place), run.devices, run.links, there) for run in runs]


def _even_time(prepared: Prepared) -> float | None:
    """Return the step time that an even partition is predicted to take, in seconds; None where none is searched for."""
    options = prepared.problem.options
    if getattr(options, "partition", None) != "optimal":
        return None
    even = replace(prepared.problem, options=options.model_copy(update={"partition": "even"}))
    return prepared.method.plan(even).step_time


def _plain_time(prepared: Prepared) -> float | None:
    """Return the step time that is predicted if all devices compute in float32; None where they do anyway."""
    problem = prepared.problem
    if all(device.precision == "f32" for device in problem.devices):
        return None
    devices = tuple(replace(device, precision="f32") for device in problem.devices)
    return prepared.method.plan(replace(problem, devices=devices)).step_time


def _fastest_alone(prepared: Prepared) -> dict[str, Any] | None:
    """Return the device that alone would be quicker than the plan and its step time; None where no device is.

    Only plans whose devices share one copy of the model are compared: devices with copies of their own do more work.
    """
    problem, chosen = prepared.problem, prepared.plan
    units_held = sum(piece.last - piece.first for piece in chosen.pieces)
    is_shared = problem.workload.task == "infer" or units_held == len(problem.model.units)
    if chosen.step_time is None or len(chosen.devices) < 2 or not is_shared:
        return None
    times = {}
    for device in map(problem.device, chosen.devices):
        if costs.whole_memory(problem, device) <= device.memory:
            times[device.name] = costs.whole_seconds(problem, device)
    best = min(times, key=times.__getitem__, default=None)
    if best is None or times[best] >= chosen.step_time:
        return None
    return {"device": best, "step_time": times[best]}


def _describe_data(prepared: Prepared) -> dict[str, Any] | None:
    """Return who owns how many training samples of which classes; None where all are the lead's."""
    from testbed.ml.data.catalog import train_labels

    counts = prepared.owned()
    if not counts:
        return None
    labels = train_labels(prepared.problem.workload.data, prepared.scenario.data_folder)
    owners = [{"device": name, "samples": sum(counts[name].values()), "classes": counts[name]} for name in counts]
    return {"samples": len(labels), "owners": owners}


def _describe_radio(prepared: Prepared) -> dict[str, Any] | None:
    """Return where devices are and which share of each one's casts the others receive; None without a radio."""
    experiment, part = prepared.experiment, prepared.scenario.network.radio
    if experiment.radio is None or part is None:
        return None
    positions = experiment.radio.positions
    ratios: dict[str, dict[str, float]] = {name: {} for name in positions}
    for (source, destination), link in experiment.links.items():
        ratios[source][destination] = 1 - link.message_loss
    return {
        "area": list(part.area),
        "positions": {name: list(place) for name, place in positions.items()},
        "prr": ratios,
    }


def _describe_piece(problem: Problem, piece: Piece) -> dict[str, Any]:
    """Return what a device holds by one piece, and what that takes of it."""
    workload, device = problem.workload, problem.device(piece.device)
    units = problem.model.units[piece.first : piece.last]
    cost = costs.forward(units, workload.batch_size)
    if workload.task == "train":
        cost += costs.backward(units, workload.batch_size)
    parameters = piece.parameters
    if parameters is None:
        parameters = sum(unit.parameters for unit in units)
    return {
        "device": device.name,
        "profile": device.profile,
        "speed": device.speed,
        "memory_rate": device.memory_rate,
        "first": piece.first,
        "last": piece.last,
        "units": [unit.name for unit in units],
        "part": piece.part,
        "copy_for": piece.copy_for,
        "parameters": parameters,
        "frozen": sum(unit.frozen for unit in units),
        "memory": piece.memory,
        "memory_available": device.memory,
        "flops": cost.of().flops if piece.flops is None else piece.flops * workload.batch_size,
        "compute_time": device.seconds(cost) if piece.seconds is None else piece.seconds,
    }


def _print_hosts(console: Console, hosts: Sequence[Mapping[str, Any]]) -> None:
    """Print where devices would run."""
    if not hosts:
        return
    rows = [
        (
            each["host"],
            ", ".join(each["devices"]) or "-",
            f"{each['busy']:.2g} of {each['cores']}",
            f"{formats.size(each['memory'])} of {formats.size(each['of'])}",
            str(each["leaving"]),
        )
        for each in hosts
    ]
    console.print()
    print_section(
        console, [Column("host"), Column("devices"), *figures("cores busy", "memory", "links that leave")], rows
    )


def _print_plan(console: Console, described: dict[str, Any]) -> None:
    point = point_text(described["point"])
    if described["programs"]:
        console.print(f"[bold]{described['scenario']}[/bold]{' at ' + point if point else ''}: programs\n")
        commands = [
            (name, " ".join(program["command"]), "in the background" if program["background"] else "")
            for name, program in described["programs"].items()
        ]
        print_section(console, [Column("device"), Column("command"), Column("")], commands)
        _print_hosts(console, described.get("hosts", ()))
        return
    unit = "step" if described["task"] == "train" else "request"
    console.print(
        f"[bold]{described['scenario']}[/bold]{' at ' + point if point else ''}: {described['task']} "
        f"{described['model']} with {described['method']}, {described['batch_size']} samples a {unit}\n"
    )
    rows: list[tuple[str, ...]] = []
    before = None
    for row in described["pieces"]:
        name = row["device"]
        # A device's pieces stand one below the other; its share of memory is that of all of them.
        share = f"{described['memory'][name] / row['memory_available']:.0%}" if name != before else ""
        rows.append(
            (
                "" if name == before else name + (" *" if name == described["lead"] else ""),
                _held(row),
                formats.count(row["parameters"])
                + (f" + {formats.count(row['frozen'])} frozen" if row["frozen"] else ""),
                formats.size(row["memory"]),
                "< 1%" if share == "0%" else share,
                formats.count(row["flops"]),
                formats.seconds(row["compute_time"]),
            )
        )
        before = name
    rows += [(name, "-", *[""] * 5) for name in described["idle"]]
    columns = [Column("device"), Column("units"), *figures("parameters", "memory", "of", "FLOP", "time")]
    print_section(console, columns, rows)
    lead = "lead" if described["data"] or described["samples_everywhere"] else "lead, holds the data"
    console.print(f"\n[dim]* {lead}; of: the device's memory; FLOP, time: per {unit}[/dim]")
    _print_times(console, described, unit)
    _print_hosts(console, described.get("hosts", ()))
    if described["data"]:
        console.print()
        _print_data(console, described["data"])
    if described["radio"]:
        console.print()
        _print_radio(console, described["radio"])
    if described["schedule"]:
        console.print()
        console.print(described["schedule"], soft_wrap=True)
    if described["alternatives"]:
        console.print()
        _print_alternatives(console, described["alternatives"])


def _print_times(console: Console, described: dict[str, Any], unit: str) -> None:
    """Print the predicted time of a step or request, and what would make it shorter."""
    if described["step_time"] is not None:
        even = described["even_step_time"]
        other = "" if even is None else f" ({formats.seconds(even)} with partition: even)"
        if described["f32_step_time"] is not None:
            other += f" ({formats.seconds(described['f32_step_time'])} if all devices computed in f32)"
        console.print(f"predicted {unit} time: [bold]{formats.seconds(described['step_time'])}[/bold]{other}")
    if (alone := described["fastest_alone"]) is not None:
        times = f"{formats.seconds(alone['step_time'])} per {unit} instead of {formats.seconds(described['step_time'])}"
        console.print(f"[yellow]{alone['device']} alone would be quicker: {times}[/yellow]", soft_wrap=True)
    for text in described["advice"]:
        console.print(f"[yellow]{text}[/yellow]", soft_wrap=True)


def _print_data(console: Console, data: dict[str, Any]) -> None:
    """Print who owns which training samples."""
    rows = []
    for row in data["owners"]:
        counts = row["classes"]
        most = sorted(counts, key=lambda label: (-counts[label], label))
        shown = ", ".join(f"{label}: {counts[label]:,}" for label in most[:CLASSES_SHOWN])
        more = ", ..." if len(most) > CLASSES_SHOWN else ""
        rows.append((row["device"], f"{row['samples']:,}", str(len(counts)), shown + more))
    columns = [Column("device"), *figures("samples", "classes"), Column("samples of a class")]
    print_section(console, columns, rows)
    owned = sum(row["samples"] for row in data["owners"])
    console.print(f"\n[dim]{owned:,} of {data['samples']:,} training samples; the lead has the test samples[/dim]")


def _print_radio(console: Console, radio: dict[str, Any]) -> None:
    """Print the reception ratios, a row a sender, a column a receiver, numbered as the rows are, and the map."""
    ratios = radio["prr"]
    numbers = {name: str(index) for index, name in enumerate(ratios, 1)}
    rows = [
        (
            numbers[name],
            name,
            f"{x:.1f}, {y:.1f}",
            *(f"{ratios[name][other]:.0%}" if other in ratios[name] else "-" for other in ratios),
        )
        for name, (x, y) in radio["positions"].items()
    ]
    columns = [Column(""), Column("device"), Column("metres"), *figures(*numbers.values())]
    print_section(console, columns, rows)
    every = [ratio for row in ratios.values() for ratio in row.values()]
    mean = f", {sum(every) / len(every):.1%} on average" if every else ""
    console.print(f"\n[dim]share of the casts of each row's device that each column's receives (PRR){mean}[/dim]")
    console.print(letters(radio["positions"], numbers, radio["area"]), soft_wrap=True, highlight=False)


def letters(positions: Mapping[str, Position], names: Mapping[str, str], area: tuple[float, float]) -> str:
    """Return a map in letters, framed, north up: each device's short name begins where it is.

    Where two are too close to distinguish, the later one stands in the next free place to its right, or is left out.
    """
    # A letter is about twice as high as it is wide.
    rows = min(30, max(5, round(COLUMNS * area[1] / area[0] / 2)))
    canvas = [[" "] * COLUMNS for _ in range(rows)]
    for device, (x, y) in positions.items():
        row = canvas[rows - 1 - min(rows - 1, int(y / area[1] * rows))]
        word = names[device]
        first = min(COLUMNS - len(word), int(x / area[0] * COLUMNS))
        for start in range(first, COLUMNS - len(word) + 1):
            if all(letter == " " for letter in row[max(0, start - 1) : start + len(word) + 1]):
                row[start : start + len(word)] = word
                break
    frame = "-" * COLUMNS
    lines = [f"+{frame}+", *(f"|{''.join(row)}|" for row in canvas), f"+{frame}+"]
    return "\n".join(lines)


def _print_alternatives(console: Console, alternatives: Sequence[dict[str, Any]]) -> None:
    """Print what each way takes of the device that it takes most of, and of the network."""
    rows = [
        (
            each["name"] + (" *" if each["chosen"] else ""),
            formats.count(max(each["weights"].values())),
            formats.size(max(each["memory"].values())),
            formats.count(each["longest_path"]),
            formats.count(each["communication"]),
            formats.size(each["wire_bytes"]),
            "-" if each["step_time"] is None else formats.seconds(each["step_time"]),
            "; ".join(filter(None, ("" if each["fits"] else "does not fit", each["notes"]))),
        )
        for each in alternatives
    ]
    columns = [Column("scheme"), *figures("weights", "memory", "T", "C", "on the wire", "time"), Column("")]
    print_section(console, columns, rows)
    console.print(
        "\n[dim]* chosen; weights, in elements, and memory: of the device with most; T: multiplications one after the "
        "other, C: elements sent by the paper's formulas, per sample; on the wire, time: of a request[/dim]"
    )


def _held(row: dict[str, Any]) -> str:
    """Say which units a device holds by a piece: ``0-2 conv1..conv3``."""
    names, first, last = row["units"], row["first"], row["last"] - 1
    if not names:
        return "-"
    units = f"{first} {names[0]}" if len(names) == 1 else f"{first}-{last} {names[0]}..{names[-1]}"
    if row["part"] is not None:
        units = f"{row['part']} of {first if len(names) == 1 else f'{first}-{last}'}"
    return units if row["copy_for"] is None else f"{units} for {row['copy_for']}"
