"""Plans of the method: assignment of layer parts to devices, at the start and after the loss of a device.

`testbed_stahl.candidates` chooses the division of the layers; this module describes it as a `testbed.plan.Plan`, with
its demands, predicted times and alternatives.
"""

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
from testbed_stahl.candidates import Candidate, best_candidate, fitting_plan
from testbed_stahl.communication import (
    all_transfers,
    make_phases,
    predict_interval,
    sent_elements,
    tile_transfers,
)
from testbed_stahl.dataflow import Dataflow, make_dataflow
from testbed_stahl.demands import (
    count_multiplications,
    count_parameters,
    count_weights,
    layer_costs,
    longest_path,
    memory_needs,
)
from testbed_stahl.options import SCHEMES, DistributedOptions, PlanSettings
from testbed_stahl.plan import DistributedPlan, equal_shares
from testbed_stahl.schemes import (
    Reuse,
    WorkerTotals,
    pairs_of,
    total_communication,
)
from testbed_stahl.tiles import redundant_multiplications

_DEFAULTS = DistributedOptions.model_fields


class PlanDemands(BaseModel):
    """Resource demands of a plan for one sample, with devices in plan order."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    weight_elements: tuple[int, ...]
    """F: weight elements of each device, biases excluded."""
    weights_bytes: float
    """Bytes of weights on the device with the most weights."""
    memory_bytes: float
    """Bytes of memory on the device with the highest demand."""
    longest_path: int
    """T: sequential multiplications."""
    communication: float
    """C, in elements, without values that the receiving devices already hold."""
    communication_bytes: float
    communication_as_printed: float
    """C with the paper's equation (9) as printed, in elements."""
    communication_as_printed_bytes: float
    sent_elements: int
    """Elements in all transfers of the plan."""
    output_elements: tuple[int, ...]
    """Elements of each layer's output."""
    wire_bytes: float
    """Bytes of all transfers, headers included."""
    messages: int
    """Number of messages in all transfers."""
    tile_bytes: float = 0.0
    """Bytes on the wire for tiles: regions of the image, reused overlaps, and results."""
    saved_tile_bytes: float = 0.0
    """Bytes saved by reuse, compared with the same grid without reuse; negative if the reused overlaps are larger."""
    saved_multiplications: int = 0
    """Multiplications saved by reuse in all tiles."""


class DistributedDetails(PlanDetails):
    """Plan details of a distributed inference."""

    model_config = ConfigDict(extra="forbid")
    distributed: DistributedPlan
    demands: PlanDemands


def plan(
    method: str, problem: PlanningProblem[DistributedOptions]
) -> Plan[DistributedDetails]:
    """Return the plan for all devices; raises `InputError` for an unknown source, missing links or lack of memory."""
    names = [device.name for device in problem.devices]
    source = problem.options.source or names[0]
    if source not in names:
        raise InputError(
            f"unknown device '{source}': {nearest(source, names)}", ("method", "source")
        )
    _check_links(problem, source)
    flow = flow_of(problem, distributed(problem, names))
    _check_tile_options(problem, flow)
    savings = _reuse_savings(problem, flow)
    demands = plan_demands(flow).model_copy(update=savings)
    return Plan(
        method=method,
        coordinator=source,
        assignments=assignments(problem, flow),
        step_time=_step_time(problem, flow),
        details=DistributedDetails(distributed=flow.plan, demands=demands),
    )


def _check_tile_options(
    problem: PlanningProblem[DistributedOptions], flow: Dataflow
) -> None:
    """Raise `InputError` if an option of tiles is set, but the plan has no tiles although it divides layers."""
    options = problem.options
    if flow.plan.tiling is not None or options.scheme in ("single", "sequential"):
        return
    for key in ("tile_grid", "tile_overlap", "tile_stealing"):
        if getattr(options, key) != _DEFAULTS[key].default:
            raise InputError(
                f"no layer of {problem.model.name} is tiled: remove the key, or tile some of the first layers "
                "by method.tiled_layers",
                ("method", key),
            )


def plan_demands(flow: Dataflow) -> PlanDemands:
    """Return the resource demands of a plan, without the savings of tile reuse."""
    transfers = all_transfers(flow)
    wire_bytes = 0.0
    messages = 0
    for transfer in transfers:
        wire_bytes += transfer.wire_bytes(flow.settings.samples)
        messages += len(transfer.messages)
    stored_weights = tuple(count_weights(flow, device) for device in flow.devices)
    communication = paper_communication(flow, "with-reuse")
    printed = paper_communication(flow, "equation-9")
    return PlanDemands(
        weight_elements=stored_weights,
        weights_bytes=BYTES_PER_VALUE * max(stored_weights),
        memory_bytes=max(memory_needs(flow)),
        longest_path=longest_path(flow),
        communication=communication,
        communication_bytes=BYTES_PER_VALUE * communication,
        communication_as_printed=printed,
        communication_as_printed_bytes=BYTES_PER_VALUE * printed,
        sent_elements=sent_elements(transfers),
        output_elements=tuple(layer.outputs for layer in flow.graph.layers),
        wire_bytes=wire_bytes,
        messages=messages,
        tile_bytes=_tile_bytes(flow),
    )


def paper_communication(flow: Dataflow, reuse: Reuse) -> float:
    """Return C by the paper's formulas, in elements.

    Sequential layer mapping counts the elements that cross from one device to the next.
    """
    graph = flow.graph
    plan = flow.plan
    if flow.exchange == "row":
        result = len(graph.layers) - 1
        # The paper does not count the transfer of the result to the source.
        counted_transfers = []
        for transfer in all_transfers(flow):
            if transfer.value != result:
                counted_transfers.append(transfer)
        return float(sent_elements(counted_transfers))
    shares: Sequence[Fraction] = equal_shares(len(plan.devices))
    if plan.shares:
        # The plan has the nearest float of each share, as JSON has no fractions. Shares are ratios of small numbers, so
        # that the nearest fraction with a small denominator is the exact share.
        nearest_fractions = map(Fraction, plan.shares)
        shares = [share.limit_denominator(10**9) for share in nearest_fractions]
    schemes = [layer.scheme for layer in plan.layers]
    workers = WorkerTotals.of(shares, plan.source)
    return float(total_communication(graph, schemes, workers, reuse))


def _reuse_savings(
    problem: PlanningProblem[DistributedOptions], flow: Dataflow
) -> dict[str, float]:
    """Return the savings of tile reuse over the best distribution of the same tiles without reuse.

    Only the tiled layers count, which both plans have in common.
    """
    tiling = flow.plan.tiling
    if tiling is None or not flow.overlaps:
        return {}
    grid = (tiling.rows, tiling.columns)
    # With the same grid: the tiles of another grid have other halos, whose sizes would distort the savings.
    settings = settings_of(problem, problem.devices).with_options(
        tile_grid=grid, tile_overlap="compute"
    )
    without = best_candidate(flow.graph, problem.devices, settings).flow
    saved_multiplications = _tile_multiplications(without) - _tile_multiplications(flow)
    return {
        "saved_tile_bytes": _tile_bytes(without) - _tile_bytes(flow),
        "saved_multiplications": saved_multiplications,
    }


def _tile_bytes(flow: Dataflow) -> float:
    total = 0.0
    for transfer in tile_transfers(flow):
        total += transfer.wire_bytes(flow.settings.samples)
    return total


def _tile_multiplications(flow: Dataflow) -> int:
    tiled_rows = count_multiplications(flow)[: flow.tiled_count]
    return sum(map(sum, tiled_rows))


def distributed(
    problem: PlanningProblem[DistributedOptions], present: Collection[str]
) -> DistributedPlan:
    """Return the distributed plan over the devices ``present``; raises `InputError` if their memory is insufficient.

    The source is always present, since it is the device that plans.
    """
    devices = _present_devices(problem, present)
    settings = settings_of(problem, devices)
    return fitting_plan(graph_of(problem.model), devices, settings)


def assignments_for(
    problem: PlanningProblem[DistributedOptions], present: Collection[str]
) -> tuple[Assignment, ...]:
    """Return the assignments of `distributed`; raises `InputError` if the memory is insufficient."""
    distributed_plan = distributed(problem, present)
    return assignments(problem, flow_of(problem, distributed_plan))


def assignments(
    problem: PlanningProblem[DistributedOptions], flow: Dataflow
) -> tuple[Assignment, ...]:
    """Return the assignment of each device, the source first; every device has a part of every unit."""
    needs = memory_needs(flow)
    # Transposed from one row for each layer to one row for each device.
    products = list(zip(*count_multiplications(flow), strict=True))
    costs = list(zip(*layer_costs(flow), strict=True))
    by_device = []
    for index, name in enumerate(flow.plan.devices):
        cost = sum(costs[index], Cost())
        assignment = Assignment(
            device=name,
            # Every device has a part of every layer.
            start=0,
            stop=len(problem.model.units),
            memory=needs[index],
            part="a part",
            parameters=count_parameters(flow, index),
            # Each multiplication is followed by an addition.
            flops=2.0 * sum(products[index]),
            seconds=problem.device(name).seconds(cost),
        )
        by_device.append(assignment)
    source = by_device.pop(flow.plan.source)
    return (source, *by_device)


def flow_of(
    problem: PlanningProblem[DistributedOptions], plan: DistributedPlan
) -> Dataflow:
    """Return the dataflow of a plan."""
    settings = PlanSettings(problem.options, plan.source, problem.workload.batch_size)
    return make_dataflow(graph_of(problem.model), plan, settings)


def alternatives(
    problem: PlanningProblem[DistributedOptions],
) -> tuple[Alternative, ...]:
    """Return the plan of every scheme over the same devices, except schemes that need a missing link."""
    settings = settings_of(problem, problem.devices)
    graph = graph_of(problem.model)
    described = []
    for candidate in compare_schemes(graph, problem.devices, settings):
        if _has_links(problem, candidate.flow):
            described.append(_describe_alternative(problem, candidate))
    return tuple(described)


def compare_schemes(
    graph: Graph, devices: Sequence[DeviceSpec], settings: PlanSettings
) -> list[Candidate]:
    """Return a plan for every scheme, without schemes made impossible by the options.

    Raises `InputError` if the configured scheme is impossible.
    """
    candidates = []
    for name in SCHEMES:
        with_scheme = settings.with_options(scheme=name)
        try:
            candidates.append(best_candidate(graph, devices, with_scheme))
        except InputError:
            # Other schemes than the configured one are only for comparison.
            if name == settings.options.scheme:
                raise
    return candidates


def _has_links(problem: PlanningProblem[DistributedOptions], flow: Dataflow) -> bool:
    names = flow.plan.devices
    used_links = set()
    for transfer in all_transfers(flow):
        pair = (names[transfer.sender], names[transfer.receiver])
        used_links.add(pair)
    return used_links <= problem.links.keys()


def _describe_alternative(
    problem: PlanningProblem[DistributedOptions], candidate: Candidate
) -> Alternative:
    flow = candidate.flow
    plan = flow.plan
    layers = flow.graph.layers
    demands = plan_demands(flow)
    redundant = 0
    if plan.tiling:
        redundant = redundant_multiplications(
            layers[: plan.tiled_count], flow.computed_regions
        )
    weights = dict(zip(plan.devices, demands.weight_elements, strict=True))
    memory = dict(zip(plan.devices, candidate.needs, strict=True))
    schemes = {}
    for layer, layer_plan in zip(layers, plan.layers, strict=True):
        schemes[layer.name] = layer_plan.scheme
    return Alternative(
        name=plan.scheme,
        chosen=plan.scheme == problem.options.scheme,
        fits=not candidate.excess(problem.devices),
        weights=weights,
        memory=memory,
        longest_path=demands.longest_path,
        communication=paper_communication(flow, problem.options.communication_formula),
        elements=demands.sent_elements,
        wire_bytes=demands.wire_bytes,
        messages=demands.messages,
        step_time=_step_time(problem, flow),
        notes="; ".join(_notes_on(plan)),
        details={
            "layers": schemes,
            "tiled_elements": sent_elements(tile_transfers(flow)),
            "redundant_multiplications": redundant,
        },
    )


def _notes_on(plan: DistributedPlan) -> list[str]:
    """Return notes with the fused pairs of a plan, and with its layers divided by input if others are not."""
    schemes = [layer.scheme for layer in plan.layers]
    notes = []
    # Written as in the paper's Table 2: 18+19.
    pairs = [f"{one}+{other}" for one, other in pairs_of(schemes)]
    if pairs:
        notes.append(f"fused {', '.join(pairs)}")
    by_input = []
    for index, scheme in enumerate(schemes):
        if scheme == "lip":
            by_input.append(str(index))
    if by_input and plan.scheme != "lip":
        notes.append(f"LIP {', '.join(by_input)}")
    return notes


def _step_time(problem: PlanningProblem[DistributedOptions], flow: Dataflow) -> float:
    """Return the predicted seconds between two results: with one request in flight, the latency."""
    devices = _present_devices(problem, flow.plan.devices)
    phases = make_phases(flow, devices, problem.links)
    return predict_interval(phases, flow.settings.options.in_flight)


def _present_devices(
    problem: PlanningProblem[DistributedOptions], present: Collection[str]
) -> list[DeviceSpec]:
    return [device for device in problem.devices if device.name in present]


def settings_of(
    problem: PlanningProblem[DistributedOptions], devices: Collection[DeviceSpec]
) -> PlanSettings:
    """Return the common settings of all plans over these devices."""
    options = problem.options
    source = 0
    if options.source:
        # The source's index among ``devices``, since other devices may have been lost.
        names = [device.name for device in devices]
        source = names.index(options.source)
    return PlanSettings(options, source, problem.workload.batch_size)


def _check_links(problem: PlanningProblem[DistributedOptions], source: str) -> None:
    """Raise `InputError` for a missing link between the source and another device, or between any two devices.

    All devices need links to and from the source, also idle ones: they may take over work later.
    """
    options = problem.options
    is_direct = options.exchange == "direct" or options.scheme == "sequential"
    needs_all_links = is_direct and options.scheme != "single"
    names = [device.name for device in problem.devices]
    for sender, receiver in permutations(names, 2):
        is_needed = needs_all_links or source in (sender, receiver)
        if is_needed and (sender, receiver) not in problem.links:
            raise InputError(
                f"{sender} and {receiver} exchange data in a distributed inference, but no link leads from {sender} to "
                f"{receiver}: use the topology mesh or add the link",
                ("network", "topology"),
            )


def part_messages(
    problem: PlanningProblem[DistributedOptions], plan: Plan[DistributedDetails]
) -> Iterator[PlannedMessage]:
    """Yield the largest message of each transfer, and the initial weights of each device."""
    devices = plan.details.distributed.devices
    element_bytes = BYTES_PER_VALUE * problem.workload.batch_size
    flow = flow_of(problem, plan.details.distributed)
    for transfer in all_transfers(flow):
        largest = max(transfer.messages, default=0)
        sender = devices[transfer.sender]
        receiver = devices[transfer.receiver]
        yield sender, receiver, element_bytes * largest
    # Weights drawn from the seed are not sent.
    if problem.workload.model.weights is not None:
        for assignment in plan.assignments:
            weight_bytes = BYTES_PER_VALUE * (assignment.parameters or 0)
            yield plan.coordinator, assignment.device, weight_bytes
