"""`testbed plan`: show the placement of the model and its predicted cost before a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from testbed import method as core
from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.methods.program.workload import programs_of
from testbed.ml.layers import costs
from testbed.ml.method import PlanningProblem
from testbed.ml.preparation import data_folder, workload_section
from testbed.prepare import Prepared, prepare_all, raise_refused
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.scenario.points import point_text
from testbed_controller.cli.options import (
    json_option,
    on_hosts,
    overrides_option,
    runs_code_from_results,
)
from testbed_controller.cli.printing import dump, make_console
from testbed_controller.report.tables import (
    Column,
    Section,
    draw_section,
    number_columns,
    plain_table,
)

CLASSES_SHOWN = 4
"""Maximum number of classes shown per device, by number of samples; the JSON contains all."""

if TYPE_CHECKING:
    from testbed.method import Alternative
    from testbed.ml.models.chain import Unit
    from testbed.plan import Assignment
    from testbed_controller.hosts.placement import LabPart


@click.command()
@click.argument("scenario")
@overrides_option
@on_hosts
@json_option
def plan(
    scenario: str, overrides: tuple[str, ...], where: LabPart, as_json: bool
) -> None:
    """Show the placement of the model and its predicted cost without running anything.

    The table shows the units of each device, their parameters, the memory they need (also as a share of the device's
    memory), and the FLOPs of a step. Below it are the step time that the planner predicts and, for a pipeline, the
    schedule as a grid (F0 is the forward pass of micro-batch 0, B0 its backward pass). With `network.radio`, the
    position of each device and the packet reception ratio (PRR) of each directed pair are shown as well; the report of
    a run has a map. With `workload.data.split`, the training samples of each device and their classes are shown. A
    method with several ways to divide the work shows all of them. A sweep is planned at each of its points.

    SCENARIO is a file, or the name of one in scenarios/.

    \b
    Examples:
      testbed plan quickstart
      testbed plan quickstart --set workload.method.schedule=gpipe
      testbed plan scenarios/quickstart.yaml --json
    """
    # Repetitions differ only in their seed: the first one stands for all, also for positions drawn from the seed.
    loaded = load(scenario, overrides)
    if runs_code_from_results(loaded):
        raise InputError(
            f"{scenario}: has Python files in a results folder, which only 'testbed run' executes"
        )
    points = [each for each in trials(loaded) if each.repetition == 0]
    prepared_points, refused = prepare_all(points)
    prepared = list(prepared_points.values())
    hosts: Sequence[list[dict[str, Any]]] = [[]] * len(prepared)
    if where.hosts:
        hosts = _describe_hosts(prepared, where)
    views = list(map(_make_view, prepared, hosts))
    if as_json:
        dump([asdict(view) for view in views])
    else:
        _print_views(views)
    raise_refused(refused)


@dataclass(frozen=True)
class AssignmentView:
    """An assignment of `testbed.plan` with the properties of its device, for display."""

    device: str
    profile: str
    speed: float
    memory_rate: float | None
    start: int
    stop: int
    units: list[str]
    part: str | None
    copy_for: str | None
    parameters: int
    frozen: int
    memory: float
    memory_available: float
    flops: float
    compute_time: float | None
    pass_times: dict[str, float]

    @property
    def unit_range(self) -> str:
        """The units of the assignment: ``0-2 conv1..conv3``, or only their numbers if units have no names."""
        count = self.stop - self.start
        if not count:
            return "-"
        numbers = str(self.start)
        if count > 1:
            numbers = f"{self.start}-{self.stop - 1}"
        text = numbers
        if self.units:
            names = self.units[0]
            if count > 1:
                names = f"{self.units[0]}..{self.units[-1]}"
            text = f"{numbers} {names}"
        if self.part is not None:
            text = f"{self.part} of {numbers}"
        return text if self.copy_for is None else f"{text} for {self.copy_for}"


@dataclass(frozen=True)
class DataView:
    """Data owners with their samples by class."""

    samples: int
    owners: list[dict[str, Any]]


@dataclass(frozen=True)
class RadioView:
    """Positions of devices, and the reception ratio of each directed pair."""

    area: list[float]
    positions: dict[str, list[float]]
    prr: dict[str, dict[str, float]]


@dataclass(frozen=True)
class PlanView:
    """A plan in display form; its JSON form has the keys of `testbed plan --json`."""

    scenario: str
    point: dict[str, Any]
    task: str
    programs: dict[str, dict[str, Any]]
    method: str
    model: str | None
    batch_size: int | None
    unit: str
    coordinator: str
    assignments: list[AssignmentView]
    data: DataView | None
    samples_everywhere: bool
    radio: RadioView | None
    memory: dict[str, float]
    idle: list[str]
    step_time: float | None
    even_step_time: float | None
    f32_step_time: float | None
    fastest_alone: dict[str, Any] | None
    schedule: str | None
    alternatives: list[Alternative]
    advice: list[str]
    details: dict[str, Any]
    hosts: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """Name of the scenario and, of a sweep, the point, with rich's markup."""
        title = f"[bold]{self.scenario}[/bold]"
        point = point_text(self.point)
        if point:
            title += f" at {escape(point)}"
        return title


def _make_view(prepared: Prepared, hosts: list[dict[str, Any]]) -> PlanView:
    experiment, problem, chosen = prepared.experiment, prepared.problem, prepared.plan
    names = [device.name for device in problem.devices]
    programs = programs_of(problem.workload, names)
    assignments = []
    for name in chosen.devices:
        for assignment in chosen.assignments_of(name):
            assignments.append(_view_assignment(problem, assignment))
    idle = [each.name for each in experiment.devices if each.name not in chosen.devices]
    model_name = None
    batch_size = None
    if isinstance(problem, PlanningProblem):
        model_name = problem.model.name
        batch_size = problem.workload.batch_size
    return PlanView(
        scenario=prepared.scenario.name,
        point=dict(prepared.trial.point),
        task=problem.workload.task,
        programs={name: part.model_dump() for name, part in programs.items()},
        method=chosen.method,
        model=model_name,
        batch_size=batch_size,
        unit=problem.workload.unit,
        coordinator=chosen.coordinator,
        assignments=assignments,
        data=_view_data(prepared),
        samples_everywhere="all_samples" in prepared.method.supports,
        radio=_view_radio(prepared),
        memory={name: chosen.memory(name) for name in chosen.devices},
        idle=idle,
        step_time=chosen.step_time,
        even_step_time=_even_time(prepared),
        f32_step_time=_plain_time(prepared),
        fastest_alone=_fastest_alone(prepared),
        schedule=prepared.method.draw(chosen),
        alternatives=list(prepared.method.alternatives(problem)),
        advice=list(prepared.method.advice(problem, chosen)),
        details=chosen.details.model_dump(mode="json"),
        hosts=hosts,
    )


def _describe_hosts(
    prepared: Sequence[Prepared], where: LabPart
) -> list[list[dict[str, Any]]]:
    """Return, for each plan, the result of `testbed_controller.hosts.placement.describe_placement`."""
    from testbed_controller.hosts.contexts import reach_all
    from testbed_controller.hosts.lab import capacities, place_devices
    from testbed_controller.hosts.placement import describe_placement

    hosts = capacities(reach_all(where.hosts))
    descriptions = []
    for each in prepared:
        run = each.experiment
        placed = place_devices(hosts, run, where.place, where.placement)
        descriptions.append(describe_placement(placed, run.devices, run.links, hosts))
    return descriptions


def _even_time(prepared: Prepared) -> float | None:
    """Return the predicted step time of an even partition in seconds; None for methods without a search."""
    options = prepared.problem.options
    if getattr(options, "partition", None) != "optimal":
        return None
    even_options = options.model_copy(update={"partition": "even"})
    even = replace(prepared.problem, options=even_options)
    return prepared.method.plan(even).step_time


def _plain_time(prepared: Prepared) -> float | None:
    """Return the predicted step time with all devices in float32; None if all are already."""
    problem = prepared.problem
    if all(device.precision == "f32" for device in problem.devices):
        return None
    devices = tuple(replace(device, precision="f32") for device in problem.devices)
    # Planned again, since another partition may then be the best.
    return prepared.method.plan(replace(problem, devices=devices)).step_time


def _fastest_alone(prepared: Prepared) -> dict[str, Any] | None:
    """Return the fastest single device and its step time, if faster than the plan; else None.

    Only plans whose devices share one copy of the model are compared: devices with copies of their own do more work.
    """
    problem, chosen = prepared.problem, prepared.plan
    if not isinstance(problem, PlanningProblem):
        return None
    if chosen.step_time is None or len(chosen.devices) < 2:
        return None
    placed_units = 0
    for assignment in chosen.assignments:
        placed_units += assignment.stop - assignment.start
    has_one_copy = placed_units == len(problem.model.units)
    if problem.workload.task != "infer" and not has_one_copy:
        return None
    fastest = None
    least_time = chosen.step_time
    for device in map(problem.device, chosen.devices):
        # A device that cannot hold the whole model is no alternative.
        if costs.whole_memory(problem, device) > device.memory:
            continue
        seconds = costs.whole_seconds(problem, device)
        if seconds < least_time:
            fastest, least_time = device.name, seconds
    if fastest is None:
        return None
    return {"device": fastest, "step_time": least_time}


def _view_data(prepared: Prepared) -> DataView | None:
    """Return the owners of training samples; None if all are the coordinator's."""
    from testbed.ml.data.catalog import train_labels

    counts = prepared.workload.sample_counts(prepared)
    if not counts:
        return None
    scenario = prepared.scenario
    labels = train_labels(workload_section(scenario).data, data_folder(scenario))
    owners = []
    for name, owned in counts.items():
        samples = sum(owned.values())
        owners.append({"device": name, "samples": samples, "classes": owned})
    return DataView(len(labels), owners)


def _view_radio(prepared: Prepared) -> RadioView | None:
    """Return positions and reception; None without a radio."""
    experiment, part = prepared.experiment, prepared.scenario.network.radio
    if experiment.radio is None or part is None:
        return None
    positions = experiment.radio.positions
    ratios: dict[str, dict[str, float]] = {name: {} for name in positions}
    for (source, destination), link in experiment.links.items():
        ratios[source][destination] = 1 - link.message_loss
    # Lists, as in the JSON of the command.
    places = {name: list(place) for name, place in positions.items()}
    return RadioView(list(part.area), places, ratios)


def _view_assignment(
    problem: core.PlanningProblem, assignment: Assignment
) -> AssignmentView:
    device = problem.device(assignment.device)
    units: Sequence[Unit] = ()
    cost, samples = Cost(), 1
    if isinstance(problem, PlanningProblem):
        samples = problem.workload.batch_size
        units = problem.model.units[assignment.start : assignment.stop]
        cost = costs.forward_cost(units, samples)
        if problem.workload.task == "train":
            cost += costs.backward_cost(units, samples)
    compute_time = assignment.seconds
    # Without units there is no cost to derive the time from.
    if compute_time is None and units:
        compute_time = device.seconds(cost)
    parameters = assignment.parameters
    if parameters is None:
        parameters = sum(unit.parameters for unit in units)
    flops = cost.of().flops
    # A method that divides layers states its own share, for one sample.
    if assignment.flops is not None:
        flops = assignment.flops * samples
    return AssignmentView(
        device=device.name,
        profile=device.profile,
        speed=device.speed,
        memory_rate=device.memory_rate,
        start=assignment.start,
        stop=assignment.stop,
        units=[unit.name for unit in units],
        part=assignment.part,
        copy_for=assignment.copy_for,
        parameters=parameters,
        frozen=sum(unit.frozen_parameters for unit in units),
        memory=assignment.memory,
        memory_available=device.memory,
        flops=flops,
        compute_time=compute_time,
        pass_times=assignment.pass_seconds or {},
    )


def _print_views(views: Sequence[PlanView]) -> None:
    console = make_console()
    for number, view in enumerate(views):
        if number:
            console.print()
        for block in _view_blocks(view):
            if isinstance(block, Section):
                console.print(draw_section(block, console.width))
            else:
                console.print(block)
        # A schedule is a grid of characters: wrapped lines would be unreadable.
        if view.schedule:
            console.print(f"\n{escape(view.schedule)}", soft_wrap=True)


def _view_blocks(view: PlanView) -> Iterator[Section | str]:
    """Yield tables and lines of markup."""
    if view.programs:
        yield f"{view.title}: programs\n"
        yield programs_table(view)
        yield from hosts_table(view)
        return
    work = f"{view.task} with {view.method}"
    if view.model is not None:
        work = f"{view.task} {view.model} with {view.method}, {view.batch_size} samples per {view.unit}"
    yield f"{view.title}: {work}\n"
    yield pieces_table(view)
    coordinator = "coordinator"
    if not view.data and not view.samples_everywhere:
        coordinator += ", which holds the data"
    kinds = pass_kinds(view)
    columns = f"FLOP: per {kinds[-1]}" if kinds else f"FLOP, time: per {view.unit}"
    yield f"\n[dim]* {coordinator}; of: share of the device's memory; {columns}[/dim]"
    yield from time_lines(view)
    yield from hosts_table(view)
    if view.data is not None:
        yield from data_table(view.data)
    if view.radio is not None:
        yield from radio_table(view.radio)
    if view.alternatives:
        yield from alternatives_table(view.alternatives)


def programs_table(view: PlanView) -> Section:
    """Return the command of each device."""
    rows = []
    for name, program in view.programs.items():
        note = "in the background" if program["background"] else ""
        rows.append((name, " ".join(program["command"]), note))
    return plain_table([Column("device"), Column("command"), Column("")], rows)


def pass_kinds(view: PlanView) -> list[str]:
    """Return the kinds of passes with times of their own; empty for a single kind."""
    kinds: dict[str, None] = {}
    for assignment in view.assignments:
        kinds |= dict.fromkeys(assignment.pass_times)
    return list(kinds)


def pieces_table(view: PlanView) -> Section:
    """Return the table of assignments by device; the memory share is the total of a device's assignments."""
    rows: list[Sequence[str]] = []
    kinds = pass_kinds(view)
    previous = ""
    for assignment in view.assignments:
        name = ""
        share = ""
        # The assignments of a device are adjacent rows; its name and memory share are on the first of them.
        if assignment.device != previous:
            name = assignment.device
            if name == view.coordinator:
                name += " *"
            share = _memory_share(view, assignment)
        previous = assignment.device
        parameters = formats.count(assignment.parameters)
        if assignment.frozen:
            parameters += f" + {formats.count(assignment.frozen)} frozen"
        times = [assignment.compute_time]
        if kinds:
            times = [assignment.pass_times.get(kind) for kind in kinds]
        rows.append(
            (
                name,
                assignment.unit_range,
                parameters,
                formats.size(assignment.memory),
                share,
                formats.count(assignment.flops),
                *map(formats.seconds, times),
            )
        )
    time_headings = kinds or ["time"]
    # Parameters, memory, share and FLOP have no value, and neither have the times.
    empty_cells = [""] * (4 + len(time_headings))
    for name in view.idle:
        rows.append((name, "-", *empty_cells))
    return plain_table(
        [
            Column("device"),
            Column("units"),
            *number_columns("parameters", "memory", "of", "FLOP", *time_headings),
        ],
        rows,
    )


def _memory_share(view: PlanView, assignment: AssignmentView) -> str:
    """Return the memory of all assignments of a device, as a share of its memory."""
    needed = view.memory[assignment.device]
    share = f"{needed / assignment.memory_available:.0%}"
    return "< 1%" if share == "0%" else share


def time_lines(view: PlanView) -> Iterator[str]:
    """Yield the predicted time of a step or request, and possible improvements."""
    if view.step_time is not None:
        text = f"predicted {view.unit} time: [bold]{formats.seconds(view.step_time)}[/bold]"
        if view.even_step_time is not None:
            text += f" ({formats.seconds(view.even_step_time)} with partition: even)"
        if view.f32_step_time is not None:
            text += f" ({formats.seconds(view.f32_step_time)} if all devices computed in f32)"
        yield text
        if view.fastest_alone is not None:
            alone = formats.seconds(view.fastest_alone["step_time"])
            text = (
                f"{alone} per {view.unit} instead of {formats.seconds(view.step_time)}"
            )
            yield f"[yellow]{view.fastest_alone['device']} alone would be faster: {text}[/yellow]"
    for text in view.advice:
        yield f"[yellow]{escape(text)}[/yellow]"


def hosts_table(view: PlanView) -> Iterator[Section | str]:
    """Yield the devices and the load of each host of a distributed run."""
    if not view.hosts:
        return
    rows = []
    for each in view.hosts:
        devices = ", ".join(each["devices"]) or "-"
        cores = f"{each['busy']:.2g} of {each['cores']}"
        memory = f"{formats.size(each['memory'])} of {formats.size(each['of'])}"
        rows.append((each["host"], devices, cores, memory, str(each["leaving"])))
    yield ""
    yield plain_table(
        [
            Column("host"),
            Column("devices"),
            *number_columns("cores busy", "memory", "links to other hosts"),
        ],
        rows,
    )


def data_table(data: DataView) -> Iterator[Section | str]:
    """Yield the samples of each owner."""
    rows = []
    for owner in data.owners:
        counts = owner["classes"]
        # The most frequent class first; of equally frequent ones, in their own order.
        labels = sorted(counts, key=lambda label: (-counts[label], label))
        largest = [f"{label}: {counts[label]:,}" for label in labels[:CLASSES_SHOWN]]
        if len(labels) > CLASSES_SHOWN:
            largest.append("...")
        samples = f"{owner['samples']:,}"
        classes = str(len(counts))
        rows.append((owner["device"], samples, classes, ", ".join(largest)))
    yield ""
    yield plain_table(
        [
            Column("device"),
            *number_columns("samples", "classes"),
            Column("samples by class"),
        ],
        rows,
    )
    owned = sum(owner["samples"] for owner in data.owners)
    yield f"\n[dim]{owned:,} of {data.samples:,} training samples; the coordinator has the test samples[/dim]"


def radio_table(radio: RadioView) -> Iterator[Section | str]:
    """Yield the reception ratios: one row per sender, one column per receiver, numbered like the rows."""
    numbers = {name: str(index) for index, name in enumerate(radio.prr, 1)}
    rows = []
    for name, (x, y) in radio.positions.items():
        ratios = radio.prr[name]
        received = []
        for other in numbers:
            received.append(f"{ratios[other]:.0%}" if other in ratios else "-")
        rows.append((numbers[name], name, f"{x:.1f}, {y:.1f}", *received))
    all_ratios: list[float] = []
    for row in radio.prr.values():
        all_ratios += row.values()
    mean = f", {fmean(all_ratios):.1%} on average" if all_ratios else ""
    yield ""
    yield plain_table(
        [
            Column(""),
            Column("device"),
            Column("metres"),
            *number_columns(*numbers.values()),
        ],
        rows,
    )
    meaning = "share of the casts of the row's device that the column's receives"
    yield f"\n[dim]packet reception ratio (PRR): {meaning}{mean}[/dim]"


def alternatives_table(alternatives: Sequence[Alternative]) -> Iterator[Section | str]:
    """Yield the requirements of each scheme: those of its largest device, and of the network."""
    rows = []
    for each in alternatives:
        notes = [] if each.fits else ["does not fit"]
        if each.notes:
            notes.append(each.notes)
        step_time = "-" if each.step_time is None else formats.seconds(each.step_time)
        rows.append(
            (
                each.name + (" *" if each.chosen else ""),
                formats.count(max(each.weights.values())),
                formats.size(max(each.memory.values())),
                formats.count(each.longest_path),
                formats.count(each.communication),
                formats.size(each.wire_bytes),
                step_time,
                "; ".join(notes),
            )
        )
    yield ""
    yield plain_table(
        [
            Column("scheme"),
            *number_columns("weights", "memory", "T", "C", "on the wire", "time"),
            Column(""),
        ],
        rows,
    )
    yield (
        "\n[dim]* chosen; weights (elements) and memory: of the device with the most; T: multiplications on the "
        "longest path, C: elements sent, per sample by the paper's formulas; on the wire, time: per request[/dim]"
    )
