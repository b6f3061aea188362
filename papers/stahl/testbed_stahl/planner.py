"""Assignment of layer parts to devices, at the start and after the loss of a device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from itertools import permutations

from pydantic import BaseModel, ConfigDict

from testbed.common.errors import InputError, nearest
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.method import Alternative, PlannedMessage, PlanningProblem
from testbed.ml.models.graph import Graph, graph_of
from testbed.ml.models.shapes import BYTES_PER_VALUE
from testbed.plan import Assignment, Plan, PlanDetails
from testbed_stahl.candidates import Candidate, candidate, fitting_plan
from testbed_stahl.communication import elements, interval, of_tiles, phases, transfers
from testbed_stahl.dataflow import Dataflow, dataflow
from testbed_stahl.demands import (
    costs,
    longest_path,
    memory,
    multiplications,
    parameters,
    weights,
)
from testbed_stahl.options import SCHEMES, DistributedOptions, PlanSettings
from testbed_stahl.plan import DistributedPlan, equal
from testbed_stahl.schemes import REUSES, Reuse, WorkerTotals, pairs_of, total
from testbed_stahl.tiles import redundant_multiplications

_DEFAULTS = DistributedOptions.model_fields


class PlanDemands(BaseModel):
    """Resource demands of a plan for one sample, with devices in plan order."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    weight_elements: tuple[int, ...]
    """Elements of each device."""
    weights_bytes: float
    """Bytes on the device with most."""
    memory_bytes: float
    """Bytes on the device with most."""
    longest_path: int
    """Multiplications one after the other."""
    communication: float
    """C, in elements, without values that the receiving devices already hold."""
    communication_bytes: float
    communication_as_printed: float
    """C by the paper's equation (9), in elements."""
    communication_as_printed_bytes: float
    sent_elements: int
    """Elements that are sent."""
    output_elements: tuple[int, ...]
    """Elements of each layer's output."""
    wire_bytes: float
    messages: int
    tile_bytes: float = 0.0
    """Bytes on the wire about tiles: parts of the image, what tiles take of each other, what they become."""
    saved_tile_bytes: float = 0.0
    """How many less than with the same grid where nothing is reused; below 0 where what is reused weighs more."""
    saved_multiplications: int = 0
    """Multiplications that reuse saves all tiles."""


class DistributedDetails(PlanDetails):
    """Plan details of a distributed inference."""

    model_config = ConfigDict(extra="forbid")
    distributed: DistributedPlan
    demands: PlanDemands


def plan(
    method: str, problem: PlanningProblem[DistributedOptions]
) -> Plan[DistributedDetails]:
    """Plan for all devices. Raises `InputError` for an unknown source, missing links or insufficient memory."""
    names = [device.name for device in problem.devices]
    source = problem.options.source or names[0]
    if source not in names:
        raise InputError(
            f"unknown device '{source}': {nearest(source, names)}", ("method", "source")
        )
    _check_links(problem, source)
    spread = flow_of(problem, distributed(problem, names))
    options = problem.options
    about = [
        key
        for key in ("tile_grid", "tile_overlap", "tile_stealing")
        if getattr(options, key) != _DEFAULTS[key].default
    ]
    if (
        about
        and spread.plan.tiling is None
        and options.scheme not in ("single", "sequential")
    ):
        raise InputError(
            f"no layer of {problem.model.name} is tiled: leave it out, or tile some of the first layers "
            "by method.tiled_layers",
            ("method", about[0]),
        )
    described = plan_demands(spread).model_copy(update=_reuse_savings(problem, spread))
    return Plan(
        method=method,
        coordinator=source,
        assignments=assignments(problem, spread),
        step_time=_step_time(problem, spread),
        details=DistributedDetails(distributed=spread.plan, demands=described),
    )


def plan_demands(flow: Dataflow) -> PlanDemands:
    """Return the resource demands of a plan, without the savings of tile reuse."""
    sent, graph = transfers(flow), flow.graph
    held = tuple(weights(flow, device) for device in flow.devices)
    communication, printed = (formula(flow, reuse) for reuse in REUSES)
    return PlanDemands(
        weight_elements=held,
        weights_bytes=BYTES_PER_VALUE * max(held),
        memory_bytes=max(memory(flow)),
        longest_path=longest_path(flow),
        communication=communication,
        communication_bytes=BYTES_PER_VALUE * communication,
        communication_as_printed=printed,
        communication_as_printed_bytes=BYTES_PER_VALUE * printed,
        sent_elements=elements(sent),
        output_elements=tuple(layer.outputs for layer in graph.layers),
        wire_bytes=sum(each.wire_bytes(flow.settings.samples) for each in sent),
        messages=sum(len(each.messages) for each in sent),
        tile_bytes=_tile_bytes(flow),
    )


def formula(flow: Dataflow, reuse: Reuse) -> float:
    """Return C by the paper's formulas; sequential layer mapping counts the elements crossing between devices."""
    graph, plan = flow.graph, flow.plan
    if flow.way == "row":
        # The result's way back is left out.
        return float(
            elements(
                [
                    each
                    for each in transfers(flow)
                    if each.value != len(graph.layers) - 1
                ]
            )
        )
    # As shares they are ratios of small numbers, of which a plan that travels as JSON keeps the nearest float.
    shares = [
        Fraction(share).limit_denominator(10**9) for share in plan.shares
    ] or equal(len(plan.devices))
    return float(
        total(
            graph,
            [part.scheme for part in plan.layers],
            WorkerTotals.of(shares, plan.source),
            reuse,
        )
    )


def _reuse_savings(
    problem: PlanningProblem[DistributedOptions], flow: Dataflow
) -> dict[str, float]:
    """Return the savings of tile reuse over the same grid without reuse."""
    tiling = flow.plan.tiling
    if tiling is None or not flow.overlaps:
        return {}
    grid = (tiling.rows, tiling.columns)
    alone = settings_of(problem, problem.devices).with_options(
        tile_grid=grid, tile_overlap="compute"
    )
    without = candidate(flow.graph, problem.devices, alone).flow
    return {
        "saved_tile_bytes": _tile_bytes(without) - _tile_bytes(flow),
        "saved_multiplications": _of_tiles(without) - _of_tiles(flow),
    }


def _tile_bytes(flow: Dataflow) -> float:
    return sum(each.wire_bytes(flow.settings.samples) for each in of_tiles(flow))


def _of_tiles(flow: Dataflow) -> int:
    return sum(sum(row) for row in multiplications(flow)[: flow.tiled])


def distributed(
    problem: PlanningProblem[DistributedOptions], there: Collection[str]
) -> DistributedPlan:
    """Return the distributed plan over the present devices; raises `InputError` if their memory is insufficient."""
    devices = _present_devices(problem, there)
    return fitting_plan(graph_of(problem.model), devices, settings_of(problem, devices))


def over(
    problem: PlanningProblem[DistributedOptions], there: Collection[str]
) -> tuple[Assignment, ...]:
    """Plan for the present devices; raises `InputError` if their memory is insufficient."""
    return assignments(problem, flow_of(problem, distributed(problem, there)))


def assignments(
    problem: PlanningProblem[DistributedOptions], spread: Dataflow
) -> tuple[Assignment, ...]:
    """Return the placements of a plan, one part of every unit per device, with the source first as coordinator."""
    needs, work = (
        memory(spread),
        [2.0 * sum(column) for column in zip(*multiplications(spread), strict=True)],
    )
    charged = [sum(column, Cost()) for column in zip(*costs(spread), strict=True)]
    placements = [
        Assignment(
            device=name,
            start=0,
            stop=len(problem.model.units),
            memory=needs[index],
            part="a part",
            parameters=parameters(spread, index),
            flops=work[index],
            seconds=problem.device(name).seconds(charged[index]),
        )
        for index, name in enumerate(spread.plan.devices)
    ]
    return (placements.pop(spread.plan.source), *placements)


def flow_of(
    problem: PlanningProblem[DistributedOptions], decided: DistributedPlan
) -> Dataflow:
    """Return the dataflow of a plan."""
    settings = PlanSettings(
        problem.options, decided.source, problem.workload.batch_size
    )
    return dataflow(graph_of(problem.model), decided, settings)


def alternatives(
    problem: PlanningProblem[DistributedOptions],
) -> tuple[Alternative, ...]:
    """Return every scheme over the same devices, except schemes requiring a missing link."""
    candidates = compare(
        graph_of(problem.model), problem.devices, settings_of(problem, problem.devices)
    )
    return tuple(
        _describe_alternative(problem, each)
        for each in candidates
        if _has_links(problem, each.flow)
    )


def compare(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> list[Candidate]:
    """Return a plan for every scheme; the configured scheme uses the configured pairs.

    Impossible schemes are omitted. Raises `InputError` if the configured scheme is impossible.
    """
    candidates = []
    for name in SCHEMES:
        try:
            candidates.append(
                candidate(graph, devices, settings.with_options(scheme=name))
            )
        except InputError:
            if name == settings.options.scheme:
                raise
    return candidates


def _has_links(problem: PlanningProblem[DistributedOptions], flow: Dataflow) -> bool:
    names = flow.plan.devices
    return all(
        (names[transfer.sender], names[transfer.receiver]) in problem.links
        for transfer in transfers(flow)
    )


def _describe_alternative(
    problem: PlanningProblem[DistributedOptions], candidate: Candidate
) -> Alternative:
    flow, plan = candidate.flow, candidate.flow.plan
    names, layers, schemes = (
        plan.devices,
        flow.graph.layers,
        tuple(part.scheme for part in plan.layers),
    )
    pairs = [f"{one}+{other}" for one, other in pairs_of(schemes)]
    lip = [
        str(index)
        for index, scheme in enumerate(schemes)
        if scheme == "lip" and plan.scheme != "lip"
    ]
    notes = [f"fused {', '.join(pairs)}"] * bool(pairs) + [
        f"LIP {', '.join(lip)}"
    ] * bool(lip)
    demands = plan_demands(flow)
    return Alternative(
        name=plan.scheme,
        chosen=plan.scheme == problem.options.scheme,
        fits=not candidate.excess(problem.devices),
        weights=dict(zip(names, demands.weight_elements, strict=True)),
        memory=dict(zip(names, candidate.needs, strict=True)),
        longest_path=demands.longest_path,
        communication=formula(flow, problem.options.communication_formula),
        elements=demands.sent_elements,
        wire_bytes=demands.wire_bytes,
        messages=demands.messages,
        step_time=_step_time(problem, flow),
        notes="; ".join(notes),
        details={
            "layers": {
                layer.name: scheme
                for layer, scheme in zip(layers, schemes, strict=True)
            },
            "tiled_elements": elements(of_tiles(flow)),
            "redundant_multiplications": (
                redundant_multiplications(layers[: plan.tiled], flow.computed)
                if plan.tiling
                else 0
            ),
        },
    )


def _step_time(problem: PlanningProblem[DistributedOptions], spread: Dataflow) -> float:
    """Predict the seconds between two results; with one concurrent request, its latency."""
    devices = _present_devices(problem, spread.plan.devices)
    return interval(
        phases(spread, devices, problem.links), spread.settings.options.in_flight
    )


def _present_devices(
    problem: PlanningProblem[DistributedOptions], there: Collection[str]
) -> list[DeviceSpec]:
    return [device for device in problem.devices if device.name in there]


def settings_of(
    problem: PlanningProblem[DistributedOptions], devices: Collection[DeviceSpec]
) -> PlanSettings:
    """Return the common settings of all plans over these devices."""
    options, names = problem.options, [device.name for device in devices]
    source = names.index(options.source) if options.source else 0
    return PlanSettings(options, source, problem.workload.batch_size)


def _check_links(problem: PlanningProblem[DistributedOptions], source: str) -> None:
    """Raise `InputError` for a missing link: between source and workers, or between any two devices.

    Idle devices need links too: they register with the source and may take over work.
    """
    options = problem.options
    everyone = options.scheme != "single" and (
        options.exchange == "direct" or options.scheme == "sequential"
    )
    for one, other in permutations([device.name for device in problem.devices], 2):
        if (everyone or source in (one, other)) and (one, other) not in problem.links:
            raise InputError(
                f"{one} and {other} exchange data in a distributed inference, but no link leads from {one} to "
                f"{other}: use the topology mesh or add the link",
                ("network", "topology"),
            )


def part_messages(
    problem: PlanningProblem[DistributedOptions], plan: Plan[DistributedDetails]
) -> Iterator[PlannedMessage]:
    """Yield each transmitted part of an output, and the initial weights of each device."""
    decided, value_bytes = (
        plan.details.distributed,
        BYTES_PER_VALUE * problem.workload.batch_size,
    )
    for each in transfers(flow_of(problem, decided)):
        elements = max(each.messages, default=0)
        yield (
            decided.devices[each.sender],
            decided.devices[each.receiver],
            value_bytes * elements,
        )
    if problem.workload.model.weights is not None:
        for assignment in plan.assignments:
            yield (
                plan.coordinator,
                assignment.device,
                BYTES_PER_VALUE * (assignment.parameters or 0),
            )
