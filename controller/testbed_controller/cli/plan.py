"""`testbed plan`: show the placement of the model and its predicted cost before a run.

A `PlanView` has all facts about one plan, as plain values: `--json` prints it, and the functions at the end of the
module render its tables and lines. A sweep has a view for each of its points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.method import PlanningProblem as CorePlanningProblem
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

if TYPE_CHECKING:
    from testbed.method import Alternative
    from testbed.ml.models.chain import Unit
    from testbed.plan import Assignment
    from testbed_controller.hosts.placement import LabPart

CLASSES_SHOWN = 4
"""Maximum number of classes shown per device, the most frequent ones; the JSON contains all."""


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
    loaded = load(scenario, overrides)
    if runs_code_from_results(loaded):
        raise InputError(
            f"{scenario}: has Python files in a results folder, which only 'testbed run' executes"
        )
    # Repetitions differ only in their seed: the first one stands for all, also for positions drawn from the seed.
    first_trials = [each for each in trials(loaded) if each.repetition == 0]
    prepared_points, refused = prepare_all(first_trials)
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
    """An assignment of units to a device (`testbed.plan.Assignment`), with the properties of the device.

    Speeds are in FLOP/s, rates in bytes/s, memory in bytes, and times in seconds.
    """

    device: str
    profile: str
    speed: float
    memory_rate: float | None
    start: int
    """Number of the first unit."""
    stop: int
    """Number after the last unit."""
    units: list[str]
    """Names of the units; empty for a workload without a model."""
    part: str | None
    copy_for: str | None
    parameters: int
    frozen: int
    memory: float
    memory_available: float
    flops: float
    """FLOPs of a step or request."""
    compute_time: float | None
    pass_times: dict[str, float]
    """Times by kind of pass, such as the prefill of a prompt and one token; empty for a single kind."""

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
    """Number of all training samples."""
    owners: list[dict[str, Any]]
    """``device``, number of ``samples``, and ``classes``: number of samples by class."""


@dataclass(frozen=True)
class RadioView:
    """Positions of devices in metres, and the packet reception ratio (PRR) of each directed pair."""

    area: list[float]
    """Width and height in metres."""
    positions: dict[str, list[float]]
    prr: dict[str, dict[str, float]]
    """Reception ratio by sender and receiver."""


@dataclass(frozen=True)
class PlanView:
    """A plan in display form; the JSON form has the keys of `testbed plan --json`."""

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
        """Name of the scenario, and the swept values of the point, with rich's markup."""
        title = f"[bold]{self.scenario}[/bold]"
        point = point_text(self.point)
        if point:
            title += f" at {escape(point)}"
        return title


def _make_view(prepared: Prepared, hosts: list[dict[str, Any]]) -> PlanView:
    problem, plan = prepared.problem, prepared.plan
    names = [device.name for device in problem.devices]
    programs = programs_of(problem.workload, names)
    assignments = []
    for name in plan.devices:
        for assignment in plan.assignments_of(name):
            assignments.append(_view_assignment(problem, assignment))
    idle = []
    for device in prepared.experiment.devices:
        if device.name not in plan.devices:
            idle.append(device.name)
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
        method=plan.method,
        model=model_name,
        batch_size=batch_size,
        unit=problem.workload.unit,
        coordinator=plan.coordinator,
        assignments=assignments,
        data=_view_data(prepared),
        samples_everywhere="all_samples" in prepared.method.supports,
        radio=_view_radio(prepared),
        memory={name: plan.memory(name) for name in plan.devices},
        idle=idle,
        step_time=plan.step_time,
        even_step_time=_even_step_time(prepared),
        f32_step_time=_f32_step_time(prepared),
        fastest_alone=_fastest_alone(prepared),
        schedule=prepared.method.draw(plan),
        alternatives=list(prepared.method.alternatives(problem)),
        advice=list(prepared.method.advice(problem, plan)),
        details=plan.details.model_dump(mode="json"),
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
        experiment = each.experiment
        devices, links = experiment.devices, experiment.links
        host_of = place_devices(hosts, experiment, where.place, where.placement)
        descriptions.append(describe_placement(host_of, devices, links, hosts))
    return descriptions


def _even_step_time(prepared: Prepared) -> float | None:
    """Return the predicted step time in seconds of an even partition; None if the plan searched no better one."""
    options = prepared.problem.options
    if getattr(options, "partition", None) != "optimal":
        return None
    even_options = options.model_copy(update={"partition": "even"})
    even = replace(prepared.problem, options=even_options)
    return prepared.method.plan(even).step_time


def _f32_step_time(prepared: Prepared) -> float | None:
    """Return the predicted step time in seconds if all devices used float32; None if all do."""
    problem = prepared.problem
    if all(device.precision == "f32" for device in problem.devices):
        return None
    devices = tuple(replace(device, precision="f32") for device in problem.devices)
    # Planned again, since another partition may then be the best.
    return prepared.method.plan(replace(problem, devices=devices)).step_time


def _fastest_alone(prepared: Prepared) -> dict[str, Any] | None:
    """Return the name and step time of the fastest single device, if faster than the plan; else None.

    Training is compared only if the devices together hold one copy of the model: with more copies, a step does more
    work than a single device would.
    """
    problem, plan = prepared.problem, prepared.plan
    if not isinstance(problem, PlanningProblem):
        return None
    if plan.step_time is None or len(plan.devices) < 2:
        return None
    placed_units = 0
    for assignment in plan.assignments:
        placed_units += assignment.stop - assignment.start
    has_one_copy = placed_units == len(problem.model.units)
    if problem.workload.task != "infer" and not has_one_copy:
        return None
    fastest = None
    least_time = plan.step_time
    for device in map(problem.device, plan.devices):
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
    """Return the devices with training samples; None if the coordinator has all samples."""
    from testbed.ml.data.catalog import train_labels

    counts = prepared.workload.sample_counts(prepared)
    if not counts:
        return None
    scenario = prepared.scenario
    labels = train_labels(workload_section(scenario).data, data_folder(scenario))
    owners = []
    for name, by_class in counts.items():
        samples = sum(by_class.values())
        owners.append({"device": name, "samples": samples, "classes": by_class})
    return DataView(len(labels), owners)


def _view_radio(prepared: Prepared) -> RadioView | None:
    """Return positions and reception ratios; None without a radio."""
    experiment, radio_part = prepared.experiment, prepared.scenario.network.radio
    if experiment.radio is None or radio_part is None:
        return None
    positions = experiment.radio.positions
    ratios: dict[str, dict[str, float]] = {name: {} for name in positions}
    for (source, destination), link in experiment.links.items():
        ratios[source][destination] = 1 - link.message_loss
    position_lists = {name: list(position) for name, position in positions.items()}
    return RadioView(list(radio_part.area), position_lists, ratios)


def _view_assignment(
    problem: CorePlanningProblem, assignment: Assignment
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
    # A method that states no time: derived from the cost of the units, if the workload has a model.
    if compute_time is None and units:
        compute_time = device.seconds(cost)
    parameters = assignment.parameters
    if parameters is None:
        parameters = sum(unit.parameters for unit in units)
    flops = cost.of().flops
    # A method that divides layers states the FLOPs of the device's share, for one sample.
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
        yield _programs_table(view)
        yield from _hosts_table(view)
        return
    work = f"{view.task} with {view.method}"
    if view.model is not None:
        work = f"{view.task} {view.model} with {view.method}, {view.batch_size} samples per {view.unit}"
    yield f"{view.title}: {work}\n"
    yield _assignments_table(view)
    coordinator = "coordinator"
    if not view.data and not view.samples_everywhere:
        coordinator += ", which holds the data"
    kinds = _pass_kinds(view)
    costs_note = f"FLOP, time: per {view.unit}"
    if kinds:
        # Each kind has a time column with its own heading; the FLOPs are those of the last kind.
        costs_note = f"FLOP: per {kinds[-1]}"
    yield f"\n[dim]* {coordinator}; share: of the device's memory; {costs_note}[/dim]"
    yield from _time_lines(view)
    yield from _hosts_table(view)
    if view.data is not None:
        yield from _data_table(view.data)
    if view.radio is not None:
        yield from _radio_table(view.radio)
    if view.alternatives:
        yield from alternatives_table(view.alternatives)


def _programs_table(view: PlanView) -> Section:
    """Return the table of each device's command."""
    rows = []
    for name, program in view.programs.items():
        note = "in the background" if program["background"] else ""
        rows.append((name, " ".join(program["command"]), note))
    return plain_table([Column("device"), Column("command"), Column("")], rows)


def _pass_kinds(view: PlanView) -> list[str]:
    """Return the kinds of passes with separate times; empty for a single kind."""
    kinds: dict[str, None] = {}
    for assignment in view.assignments:
        kinds |= dict.fromkeys(assignment.pass_times)
    return list(kinds)


def _assignments_table(view: PlanView) -> Section:
    """Return the table of assignments by device, with idle devices at the end.

    The memory share in the first row of a device is that of all assignments of the device.
    """
    rows: list[Sequence[str]] = []
    kinds = _pass_kinds(view)
    previous_device = ""
    for assignment in view.assignments:
        name = ""
        share = ""
        # The assignments of a device are adjacent rows, and the first row has its name and memory share.
        if assignment.device != previous_device:
            name = assignment.device
            if name == view.coordinator:
                name += " *"
            share = _memory_share(view, assignment)
        previous_device = assignment.device
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
    headings = ("parameters", "memory", "share", "FLOP", *time_headings)
    for name in view.idle:
        rows.append((name, "-", *[""] * len(headings)))
    columns = [Column("device"), Column("units"), *number_columns(*headings)]
    return plain_table(columns, rows)


def _memory_share(view: PlanView, assignment: AssignmentView) -> str:
    """Return the memory of all assignments of a device, as a share of the available memory."""
    needed = view.memory[assignment.device]
    share = f"{needed / assignment.memory_available:.0%}"
    return "< 1%" if share == "0%" else share


def _time_lines(view: PlanView) -> Iterator[str]:
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
            planned = formats.seconds(view.step_time)
            text = f"{alone} per {view.unit} instead of {planned}"
            yield f"[yellow]{view.fastest_alone['device']} alone would be faster: {text}[/yellow]"
    for text in view.advice:
        yield f"[yellow]{escape(text)}[/yellow]"


def _hosts_table(view: PlanView) -> Iterator[Section | str]:
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


def _data_table(data: DataView) -> Iterator[Section | str]:
    """Yield the samples of each owner."""
    rows = []
    for owner in data.owners:
        counts = owner["classes"]
        # The most frequent class first; equally frequent classes in their own order.
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


def _radio_table(radio: RadioView) -> Iterator[Section | str]:
    """Yield a table of reception ratios with a row per sender and a column per receiver, headed by row number."""
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
    meaning = "share of a row's casts that the device with the column's number receives"
    yield f"\n[dim]packet reception ratio (PRR): {meaning}{mean}[/dim]"


def alternatives_table(alternatives: Sequence[Alternative]) -> Iterator[Section | str]:
    """Yield a table of the costs of each scheme, by which a method can divide the work.

    Weights and memory are those of the device that needs the most.
    """
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
