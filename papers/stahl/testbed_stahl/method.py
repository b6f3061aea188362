"""Fully distributed inference (Stahl et al.): every layer is divided among the devices.

The source is the device with the images, and coordinates the others, the workers; all devices are members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from testbed.common.formats import size
from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import MEMBERSHIP_KINDS, RoleHolder
from testbed.messaging.supervision import Supervisor, Timeouts, run_with_recovery
from testbed.ml.layers.shard import State
from testbed.ml.method import (
    Alternative,
    Method,
    PlannedMessage,
    PlanningProblem,
    ProgramContext,
)
from testbed.ml.models.sliced import cut_copies
from testbed.ml.pipeline.checkpointing import CheckpointRecovery
from testbed.ml.pipeline.forwarding import Serving
from testbed.plan import Assignment, Plan
from testbed.trace.events import EventType
from testbed.trace.metrics_spec import Metric, Metrics, MetricsSpec, Row
from testbed.trace.record import RunView
from testbed_stahl.dataflow import stored_layers
from testbed_stahl.member import InferenceMember
from testbed_stahl.messages import (
    MEMBER_KINDS,
    ConfigureMember,
    TileInput,
    TileOutput,
    TileOverlap,
)
from testbed_stahl.options import DistributedOptions
from testbed_stahl.plan import DistributedPlan
from testbed_stahl.planner import (
    DistributedDetails,
    alternatives,
    assignments_for,
    distributed,
    flow_of,
    part_messages,
    plan,
)
from testbed_stahl.request_work import SPAN

DistributedContext = ProgramContext[DistributedOptions, DistributedDetails]


TILE_KINDS = (TileInput.kind, TileOverlap.kind, TileOutput.kind)
"""Kinds of messages that carry tiles."""


def _fullest_device(metrics: Metrics) -> tuple[str, Mapping[str, Any]]:
    """Return the device with the highest reported memory use, and the device's metrics."""

    def memory_use(item: tuple[str, Mapping[str, Any]]) -> float:
        _, device_metrics = item
        return float(device_metrics["weights"] + device_metrics["activations"])

    candidates = []
    for name, device_metrics in metrics["devices"].items():
        if "weights" in device_metrics:
            candidates.append((name, device_metrics))
    return max(candidates, key=memory_use)


def _peak_memory(metrics: Metrics) -> str:
    _, row = _fullest_device(metrics)
    return size(row["weights"] + row["activations"])


def _part_bytes(metrics: Metrics) -> str:
    name, row = _fullest_device(metrics)
    return f"at most, on {name}: {size(row['weights'])} weights, {size(row['activations'])} activations"


def _has_memory_metrics(metrics: Metrics) -> bool:
    """Return whether a run has requests, and at least one report of a device's memory."""
    if "requests" not in metrics:
        return False
    devices = metrics["devices"].values()
    return any("weights" in row for row in devices)


def _tile_bytes(record: RunView) -> int | None:
    """Return the bytes of all messages of tiles; None without messages of tiles."""
    total = 0
    for event in record.of("send"):
        if event.fields["message"] in TILE_KINDS:
            total += event.fields["bytes"]
    return total or None


def _stolen_tiles(record: RunView) -> int | None:
    """Return the number of tiles computed by another device than the owner; None without stealing."""
    # Events of tiles are recorded only if idle devices may steal tiles.
    events = record.of("tile")
    if not events:
        return None
    stolen = 0
    for event in events:
        if event.fields["owner"] != event.fields["by"]:
            stolen += 1
    return stolen


DECLARED = MetricsSpec(
    events=(
        EventType(
            "tile",
            "assignment of a tile to a device",
            ("batch",),
            ("request", "tile", "owner", "by"),
        ),
    ),
    metrics=(
        Metric(
            "tiles_stolen",
            "number",
            "tiles computed by idle devices instead of the devices of the plan",
            _stolen_tiles,
        ),
        Metric(
            "tile_bytes",
            "bytes",
            "bytes sent for tiles: image, reused overlaps, results",
            _tile_bytes,
        ),
    ),
    rows=(Row("Memory", _peak_memory, _part_bytes, when=_has_memory_metrics),),
)


class Distributed(Method[DistributedOptions, DistributedDetails]):
    """The source distributes an image, all devices compute their parts of each layer, and the source gets the result.

    A device stores only the weights of its parts. After the loss of a device the layers are divided again among the
    remaining devices; `testbed.ml.pipeline.checkpointing` describes the recovery.
    """

    name = "distributed"
    summary = "fully distributed inference: layers divided by output (LOP), input (LIP), in fused pairs or tiles"
    tasks = ("infer",)
    Options = DistributedOptions
    Details = DistributedDetails
    supports = frozenset({"all_links", "initial_weights", "timing_only"})
    declared = DECLARED
    span_names = frozenset({"load", SPAN})

    def plan(
        self, problem: PlanningProblem[DistributedOptions]
    ) -> Plan[DistributedDetails]:
        """Divide every layer among the devices. Raises `InputError` if no division fits into their memory."""
        return plan(self.name, problem)

    def largest_messages(
        self,
        problem: PlanningProblem[DistributedOptions],
        plan: Plan[DistributedDetails],
    ) -> Iterator[PlannedMessage]:
        """Return the largest messages with parts of layer outputs, and the initial weights."""
        return part_messages(problem, plan)

    def alternatives(
        self, problem: PlanningProblem[DistributedOptions]
    ) -> tuple[Alternative, ...]:
        """Return the plan of every scheme over the same devices, for comparison."""
        return alternatives(problem)

    async def program(self, device: Device, context: DistributedContext) -> None:
        """Compute as a member on every device; on the source, also coordinate the members and send the requests."""
        problem = context.problem
        options = problem.options
        source = context.plan.coordinator

        def make_member(configure: ConfigureMember) -> InferenceMember:
            plan = DistributedPlan.model_validate(configure.plan)
            state = configure.state if configure.given else None
            return InferenceMember(
                mailbox, problem, flow_of(problem, plan), source, state
            )

        kinds = (*MEMBERSHIP_KINDS, *MEMBER_KINDS)
        async with Mailbox(device, problem.links, kinds) as mailbox:
            holder = RoleHolder(mailbox, source)
            holder.follow(ConfigureMember, make_member)
            if device.name != source:
                # Never returns: the runtime cancels the program at the end of the run.
                await holder.serve()
            timeouts = Timeouts(
                options.stall_timeout, options.rejoin_timeout, options.rejoin_timeout
            )
            supervisor = Supervisor(
                mailbox,
                holder.presence,
                problem,
                timeouts,
                # A member may be sending activations before it answers, at most all that its memory contains.
                backlog=lambda assignment: assignment.memory,
            )
            recovery = CheckpointRecovery(
                supervisor,
                configure=partial(_configuration_for, context, supervisor),
                plan_stages=partial(assignments_for, problem),
                units=len(problem.model.units),
                weights=context.weights,
            )
            supervisor.start(context.plan.assignments)
            serving = Serving(
                supervisor,
                context,
                options.in_flight,
                gives_up=options.on_loss == "fail",
            )
            await run_with_recovery(serving, recovery, supervisor)


def _configuration_for(
    context: DistributedContext,
    supervisor: Supervisor,
    assignment: Assignment,
    state: State | None,
) -> ConfigureMember:
    """Return the message that configures a member, with the member's slices of ``state``.

    Without a state the member draws its weights from the seed.
    """
    problem = context.problem
    present = {part.device for part in supervisor.layout}
    planned = {part.device for part in context.plan.assignments}
    plan = context.plan.details.distributed
    # After the loss or the return of a device, the layers are divided again among the present devices.
    if present != planned:
        plan = distributed(problem, present)
    slices: State = {}
    if state is not None:
        slices = _slices_of(problem, plan, assignment.device, state)
    return ConfigureMember(
        configuration=supervisor.mailbox.configuration,
        plan=plan.model_dump(mode="json"),
        given=state is not None,
        state=slices,
    )


def _slices_of(
    problem: PlanningProblem[DistributedOptions],
    plan: DistributedPlan,
    device: str,
    state: State,
) -> State:
    """Return a device's slices of the weights of the whole network."""
    index = plan.devices.index(device)
    layers = stored_layers(flow_of(problem, plan), index)
    return cut_copies(layers, state)
