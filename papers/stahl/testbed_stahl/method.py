"""Fully distributed inference (Stahl et al.): every layer is divided over the devices."""

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
from testbed_stahl.dataflow import layers_stored
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


def _fullest_device(metrics: Metrics) -> tuple[str, Mapping[str, Any]]:
    """Return the device with the highest reported memory use."""
    held = {name: row for name, row in metrics["devices"].items() if "weights" in row}
    return max(
        held.items(),
        key=lambda item: float(item[1]["weights"] + item[1]["activations"]),
    )


def _peak_memory(metrics: Metrics) -> str:
    _, row = _fullest_device(metrics)
    return size(row["weights"] + row["activations"])


def _part_bytes(metrics: Metrics) -> str:
    name, row = _fullest_device(metrics)
    return f"at most, on {name}: {size(row['weights'])} weights, {size(row['activations'])} activations"


def _has_plan_metrics(metrics: Metrics) -> bool:
    return "requests" in metrics and any(
        "weights" in row for row in metrics["devices"].values()
    )


def _tile_bytes(record: RunView) -> int | None:
    about = [
        event.fields["bytes"]
        for event in record.of("send")
        if event.fields["message"] in TILE_KINDS
    ]
    return sum(about) if about else None


def _stolen_tiles(record: RunView) -> int | None:
    given = [event.fields for event in record.of("tile")]
    return sum(fields["owner"] != fields["by"] for fields in given) if given else None


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
    rows=(Row("Memory", _peak_memory, _part_bytes, when=_has_plan_metrics),),
)


class Distributed(Method[DistributedOptions, DistributedDetails]):
    """The source distributes an image, workers exchange the data their schemes need, and the source gets the result.

    A device holds the weights of its own parts and no others. Devices that die are dealt with as
    `testbed.ml.pipeline.checkpointing` says, the layers being divided again over those that are left.
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
        """Divide every layer over the devices. Raises `InputError` if no division fits."""
        return plan(self.name, problem)

    def largest_messages(
        self,
        problem: PlanningProblem[DistributedOptions],
        plan: Plan[DistributedDetails],
    ) -> Iterator[PlannedMessage]:
        """Return the largest pieces of layer outputs and initial weights."""
        return part_messages(problem, plan)

    def alternatives(
        self, problem: PlanningProblem[DistributedOptions]
    ) -> tuple[Alternative, ...]:
        """Return every scheme over the same devices."""
        return alternatives(problem)

    async def program(self, device: Device, context: DistributedContext) -> None:
        """Send requests from the source; act as a member on every device."""
        problem, source, options = (
            context.problem,
            context.plan.coordinator,
            context.problem.options,
        )

        def member_of(configure: ConfigureMember) -> InferenceMember:
            flow = flow_of(problem, DistributedPlan.model_validate(configure.plan))
            return InferenceMember(
                mailbox,
                problem,
                flow,
                source,
                configure.state if configure.given else None,
            )

        async with Mailbox(
            device, problem.links, (*MEMBERSHIP_KINDS, *MEMBER_KINDS)
        ) as mailbox:
            holder = RoleHolder(mailbox, source)
            holder.follow(ConfigureMember, member_of)
            if device.name != source:
                await holder.serve()
            timeouts = Timeouts(
                options.stall_timeout, options.rejoin_timeout, options.rejoin_timeout
            )
            # A member may be sending its share of the activations of the requests in flight.
            supervisor = Supervisor(
                mailbox,
                holder.presence,
                problem,
                timeouts,
                lambda assignment: assignment.memory,
            )
            recovery = CheckpointRecovery(
                supervisor,
                partial(_configuration_for, context, supervisor),
                partial(assignments_for, problem),
                len(problem.model.units),
                context.weights,
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
    part: Assignment,
    state: State | None,
) -> ConfigureMember:
    """Return the message for a member, with its slices of a state; None draws the weights from the seed."""
    there = {assignment.device for assignment in supervisor.layout}
    planned = there == {assignment.device for assignment in context.plan.assignments}
    decided = (
        context.plan.details.distributed
        if planned
        else distributed(context.problem, there)
    )
    given = (
        {}
        if state is None
        else _slices_of(context.problem, decided, part.device, state)
    )
    configuration = supervisor.mailbox.configuration
    return ConfigureMember(
        configuration, decided.model_dump(mode="json"), state is not None, given
    )


def _slices_of(
    problem: PlanningProblem[DistributedOptions],
    decided: DistributedPlan,
    device: str,
    state: State,
) -> State:
    return cut_copies(
        layers_stored(flow_of(problem, decided), decided.devices.index(device)), state
    )
