"""Which device computes which part of which layer, at the start and with the devices that are left after a loss."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import permutations

from pydantic import BaseModel, ConfigDict

from testbed.common.errors import InputError
from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.method import Alternative, Problem
from testbed.methods.distributed.candidates import Candidate, PlanRequest, candidate, fitting_plan
from testbed.methods.distributed.communication import interval, of_tiles, phases, transfers
from testbed.methods.distributed.dataflow import Dataflow, dataflow
from testbed.methods.distributed.demands import costs, memory, multiplications, parameters
from testbed.methods.distributed.options import DistributedOptions
from testbed.methods.distributed.plan import DistributedPlan, Execution
from testbed.methods.distributed.scheme_figures import SchemeFigures, compare, figures, formula
from testbed.methods.distributed.schemes import pairs_of
from testbed.models.graph import Graph, graph_of
from testbed.models.shapes import BYTES_PER_VALUE
from testbed.plan import Details, Piece, Plan

_DEFAULTS = DistributedOptions.model_fields


class PlanFigures(BaseModel):
    """What a plan takes for one sample; by device in the order of the plan."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    weights: tuple[int, ...]
    """Elements of each device."""
    weights_bytes: float
    """Of the device with most."""
    memory_bytes: float
    """Of the device with most."""
    longest_path: int
    """Multiplications one after the other."""
    communication: float
    """C with what devices hold taken into account everywhere, in elements."""
    communication_bytes: float
    communication_as_printed: float
    """C by the paper's equation (9), in elements."""
    communication_as_printed_bytes: float
    elements: int
    """That are sent."""
    outputs: tuple[int, ...]
    """Elements of each layer's output."""
    wire_bytes: float
    messages: int
    tile_bytes: float = 0.0
    """On the wire, of what is sent about tiles: parts of the image, what tiles take of each other, what they become."""
    saved_tile_bytes: float = 0.0
    """How many less than with the same grid where nothing is reused; below 0 where what is reused weighs more."""
    saved_multiplications: int = 0
    """Of all tiles, by reuse."""


class DistributedDetails(Details):
    """What the plan of a distributed inference tells."""

    model_config = ConfigDict(extra="forbid")
    distributed: DistributedPlan
    figures: PlanFigures


def plan(method: str, problem: Problem[DistributedOptions]) -> Plan[DistributedDetails]:
    """Plan for all devices. Raises `InputError` for an unknown source, missing links and too little memory."""
    names = [device.name for device in problem.devices]
    source = problem.options.source or names[0]
    if source not in names:
        raise InputError(f"there is no device '{source}'; choose one of {', '.join(names)}", ("method", "source"))
    _check_links(problem, source)
    spread = flow_of(problem, distributed(problem, names))
    options = problem.options
    about = [key for key in ("grid", "overlap", "stealing") if getattr(options, key) != _DEFAULTS[key].default]
    if about and spread.plan.tiling is None and options.scheme not in ("single", "sequential"):
        raise InputError(
            f"no layer of {problem.model.name} is tiled: leave it out, or tile some of the first layers "
            "by method.early",
            ("method", about[0]),
        )
    return Plan(
        method=method,
        lead=source,
        pieces=pieces(problem, spread),
        step_time=_step_time(problem, spread),
        details=DistributedDetails(distributed=spread.plan, figures=_figures(problem, spread)),
    )


def _figures(problem: Problem[DistributedOptions], spread: Dataflow) -> PlanFigures:
    found = figures(Candidate.of(spread), problem.devices, "everywhere")
    printed = formula(spread, "paper")
    without = _without_reuse(problem, spread)
    return PlanFigures(
        weights=found.weights,
        weights_bytes=BYTES_PER_VALUE * max(found.weights),
        memory_bytes=max(found.memory),
        longest_path=found.longest_path,
        communication=found.formula,
        communication_bytes=BYTES_PER_VALUE * found.formula,
        communication_as_printed=printed,
        communication_as_printed_bytes=BYTES_PER_VALUE * printed,
        elements=found.elements,
        outputs=tuple(layer.outputs for layer in spread.graph.layers),
        wire_bytes=found.wire_bytes,
        messages=found.messages,
        tile_bytes=_tile_bytes(spread),
        saved_tile_bytes=_tile_bytes(without) - _tile_bytes(spread),
        saved_multiplications=_of_tiles(without) - _of_tiles(spread),
    )


def _without_reuse(problem: Problem[DistributedOptions], spread: Dataflow) -> Dataflow:
    """Return a plan with the same grid in which no tile takes anything of another."""
    tiling = spread.plan.tiling
    if tiling is None or not spread.overlaps:
        return spread
    asked = _request(problem, problem.devices)
    alone = replace(asked, grid=(tiling.rows, tiling.columns), execution=replace(asked.execution, overlap="compute"))
    return candidate(spread.graph, problem.devices, alone).flow


def _tile_bytes(spread: Dataflow) -> float:
    return sum(each.wire_bytes(spread.execution.samples) for each in of_tiles(spread))


def _of_tiles(spread: Dataflow) -> int:
    return sum(sum(row) for row in multiplications(spread)[: spread.tiled])


def distributed(problem: Problem[DistributedOptions], there: Collection[str]) -> DistributedPlan:
    """Return who does what, over the devices that are there; raises `InputError` where they are too small."""
    devices = _among(problem, there)
    return fitting_plan(graph_of(problem.model), devices, _request(problem, devices))


def over(problem: Problem[DistributedOptions], there: Collection[str]) -> tuple[Piece, ...]:
    """Plan for the devices that are there; raises `InputError` where they are too small."""
    return pieces(problem, flow_of(problem, distributed(problem, there)))


def pieces(problem: Problem[DistributedOptions], spread: Dataflow) -> tuple[Piece, ...]:
    """Return what each device holds and computes: a part of every unit; the source first, as the lead has it."""
    needs, work = memory(spread), [2.0 * sum(column) for column in zip(*multiplications(spread), strict=True)]
    charged = [sum(column, Cost()) for column in zip(*costs(spread), strict=True)]
    found = [
        Piece(
            device=name,
            first=0,
            last=len(problem.model.units),
            memory=needs[index],
            part="a part",
            parameters=parameters(spread, index),
            flops=work[index],
            seconds=problem.device(name).seconds(charged[index]),
        )
        for index, name in enumerate(spread.plan.devices)
    ]
    return (found.pop(spread.plan.source), *found)


def flow_of(problem: Problem[DistributedOptions], decided: DistributedPlan) -> Dataflow:
    """Return what every device does and sends."""
    return dataflow(graph_of(problem.model), decided, execution(problem))


def execution(problem: Problem[DistributedOptions]) -> Execution:
    """Return how every plan is carried out."""
    options = problem.options
    return Execution(
        exchange=options.exchange,
        samples=problem.workload.batch_size,
        in_flight=options.in_flight,
        chunks=options.chunks,
        least_chunk=options.least_chunk,
        overlap=options.overlap,
        stealing=options.stealing,
    )


def alternatives(problem: Problem[DistributedOptions]) -> tuple[Alternative, ...]:
    """Return every scheme over the same devices; those that need a link which the scenario lacks are left out."""
    graph, request = graph_of(problem.model), _request(problem, problem.devices)
    found = compare(graph, problem.devices, request)
    return tuple(_alternative(problem, graph, each) for each in found if _linked(problem, each.flow))


def _linked(problem: Problem[DistributedOptions], spread: Dataflow) -> bool:
    names = spread.plan.devices
    return all((names[transfer.sender], names[transfer.receiver]) in problem.links for transfer in transfers(spread))


def _alternative(problem: Problem[DistributedOptions], graph: Graph, found: SchemeFigures) -> Alternative:
    names = found.flow.plan.devices
    pairs = [f"{one}+{other}" for one, other in pairs_of(found.schemes)]
    lip = [str(index) for index, scheme in enumerate(found.schemes) if scheme == "lip" and found.scheme != "lip"]
    notes = [f"fused {', '.join(pairs)}"] * bool(pairs) + [f"LIP {', '.join(lip)}"] * bool(lip)
    return Alternative(
        name=found.scheme,
        chosen=found.scheme == problem.options.scheme,
        fits=found.fits,
        weights=dict(zip(names, found.weights, strict=True)),
        memory=dict(zip(names, found.memory, strict=True)),
        longest_path=found.longest_path,
        communication=found.formula,
        elements=found.elements,
        wire_bytes=found.wire_bytes,
        messages=found.messages,
        step_time=_step_time(problem, found.flow),
        notes="; ".join(notes),
        details={
            "layers": {layer.name: scheme for layer, scheme in zip(graph.layers, found.schemes, strict=True)},
            "tiled_elements": found.tiled,
            "redundant_multiplications": found.redundant,
        },
    )


def _step_time(problem: Problem[DistributedOptions], spread: Dataflow) -> float:
    """Predict the seconds from one result to the next; with one request under way, its latency."""
    devices = _among(problem, spread.plan.devices)
    return interval(phases(spread, devices, problem.links), spread.execution.in_flight)


def _among(problem: Problem[DistributedOptions], there: Collection[str]) -> list[DeviceSpec]:
    return [device for device in problem.devices if device.name in there]


def _request(problem: Problem[DistributedOptions], devices: Collection[DeviceSpec]) -> PlanRequest:
    options, names = problem.options, [device.name for device in devices]
    return PlanRequest(
        scheme=options.scheme,
        fused=options.fused,
        reuse=options.reuse,
        shares=options.shares,
        early=options.early,
        grid=options.grid,
        source=names.index(options.source) if options.source else 0,
        execution=execution(problem),
    )


def _check_links(problem: Problem[DistributedOptions], source: str) -> None:
    """Raise `InputError` where devices that talk to each other have no link: the source and each, or all of them.

    Also those that the plan leaves idle: they greet the source, and may have to take over.
    """
    options = problem.options
    everyone = options.scheme != "single" and (options.exchange == "direct" or options.scheme == "sequential")
    for one, other in permutations([device.name for device in problem.devices], 2):
        if (everyone or source in (one, other)) and (one, other) not in problem.links:
            raise InputError(
                f"{one} and {other} talk to each other in a distributed inference, but no link leads from {one} to "
                f"{other}: use the topology mesh or add the link",
                ("network", "topology"),
            )
