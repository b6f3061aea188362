"""The program of every device of a pipeline: one executor, with method-specific arguments.

Every device may become a stage, in configurations that the coordinator opens. The coordinator is also a device with a
stage, and beside it supervises the others and feeds the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.membership import RoleHolder, Status
from testbed.messaging.supervision import (
    ResumableWork,
    Supervisor,
    Timeouts,
    run_with_recovery,
)
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers import costs
from testbed.ml.layers.feed import Training
from testbed.ml.layers.shard import State, restrict
from testbed.ml.method import ProgramContext
from testbed.ml.pipeline.checkpointing import CheckpointRecovery
from testbed.ml.pipeline.forwarding import Serving
from testbed.ml.pipeline.measuring import LinkWatch, measure_link
from testbed.ml.pipeline.messages import (
    ASYNCHRONOUS_KINDS,
    FORWARD_KINDS,
    SYNCHRONOUS_KINDS,
    Commit,
    Configure,
    Deviates,
    Fetch,
    FetchedUnit,
    Measure,
    Measured,
    Packet,
    Prepare,
)
from testbed.ml.pipeline.placement import BEGINNING, RUNNING, Point, ReplicaStore
from testbed.ml.pipeline.planning import (
    AsynchronousOptions,
    Partitioner,
    StagesOptions,
    SynchronousOptions,
)
from testbed.ml.pipeline.recovery import ReplicaRecovery
from testbed.ml.pipeline.stage import Stage, StagePosition, UpdatePolicy
from testbed.ml.pipeline.training import AsynchronousTrainer, SynchronousTrainer
from testbed.ml.pipeline.updates import AsynchronousUpdates, SynchronousUpdates
from testbed.ml.schedule import Schedule
from testbed.ml.transfer import make_codecs
from testbed.plan import Assignment

PlanStages = Callable[[Collection[str]], Sequence[Assignment]]
"""Present devices -> their stages; raises `InputError` if no partition fits."""


async def run_synchronous(
    device: Device,
    context: ProgramContext[SynchronousOptions],
    schedule: Schedule,
    partition: PlanStages,
) -> None:
    """Train with one update a step, and recovery from checkpoints."""
    updates = partial(SynchronousUpdates, schedule, context.problem.options)
    await _run_with_checkpoints(
        device, context, SYNCHRONOUS_KINDS, updates, partition, SynchronousTrainer
    )


async def run_inference(
    device: Device,
    context: ProgramContext[StagesOptions],
    partition: PlanStages,
    in_flight: int,
) -> None:
    """Answer requests by stages without updates; requests under way are sent again after a loss."""

    def serving(
        supervisor: Supervisor,
        recovery: CheckpointRecovery,
        context: ProgramContext[StagesOptions],
    ) -> Serving:
        return Serving(supervisor, context, in_flight)

    await _run_with_checkpoints(
        device, context, FORWARD_KINDS, None, partition, serving
    )


async def run_asynchronous(
    device: Device,
    context: ProgramContext[AsynchronousOptions],
    partitioner: Partitioner,
) -> None:
    """Train with an update after every batch, and recovery from replicas."""
    options = context.problem.options
    async with _open_mailbox(device, context, ASYNCHRONOUS_KINDS) as mailbox:
        member = ReplicatingMember(mailbox, context)
        # Devices that answer, but do nothing for this many seconds, count as lost.
        standstill = max(2 * options.stall_timeout, options.rejoin_timeout)
        supervisor = await _make_supervisor(mailbox, member.holder, context, standstill)
        recovery = ReplicaRecovery(
            supervisor, member.store, partitioner, context, _total_steps(context)
        )
        await recovery.begin()
        work = AsynchronousTrainer(supervisor, recovery, partitioner, context)
        await run_with_recovery(work, recovery, supervisor, recovery.recovering)


O = TypeVar("O", bound=StagesOptions)  # noqa: E741


async def _run_with_checkpoints(
    device: Device,
    context: ProgramContext[O],
    kinds: Iterable[type[TypedMessage]],
    updates: Callable[[Stage], UpdatePolicy] | None,
    partition: PlanStages,
    work: Callable[[Supervisor, CheckpointRecovery, ProgramContext[O]], ResumableWork],
) -> None:
    """Coordinate on the plan's coordinator; run a stage on every device, with the state the coordinator sends.

    ``updates`` is None for inference, and ``work`` makes the coordinator's work: training, or answering requests.
    """
    problem = context.problem
    coordinator = context.plan.coordinator
    async with _open_mailbox(device, context, kinds) as mailbox:
        holder = RoleHolder(mailbox, coordinator)

        def stage_of(configure: Configure) -> Stage:
            position = StagePosition.from_message(device.name, coordinator, configure)
            state = configure.state if configure.given else None
            return Stage(mailbox, problem, position, state, updates)

        holder.follow(Configure, stage_of)
        standstill = problem.options.rejoin_timeout
        supervisor = await _make_supervisor(mailbox, holder, context, standstill)
        configure = partial(configure_stage, supervisor, _total_steps(context))
        recovery = CheckpointRecovery(
            supervisor, configure, partition, len(problem.model.units), context.weights
        )
        supervisor.start(context.plan.assignments)
        own_work = work(supervisor, recovery, context)
        await run_with_recovery(own_work, recovery, supervisor)


def _open_mailbox(
    device: Device,
    context: ProgramContext[StagesOptions],
    kinds: Iterable[type[TypedMessage]],
) -> Mailbox:
    encoding = context.problem.options.transfer
    codecs = make_codecs(
        context.problem.codes,
        activation=encoding.activations,
        gradient=encoding.gradients,
    )
    return Mailbox(device, context.problem.links, kinds, codecs=codecs)


async def _make_supervisor(
    mailbox: Mailbox,
    holder: RoleHolder,
    context: ProgramContext[StagesOptions],
    standstill: float,
) -> Supervisor:
    """Return the supervisor of the stages on the coordinator; elsewhere, serve as a stage until cancelled.

    ``standstill`` is the number of seconds after which an answering device without progress counts as lost.
    """
    problem = context.problem
    options = problem.options
    if mailbox.device.name != context.plan.coordinator:
        # Never returns: the runtime cancels the program at the end of the run.
        await holder.serve()

    def backlog(part: Assignment) -> float:
        """Return the bytes a stage may be sending to the coordinator: a checkpoint, and inputs."""
        units = problem.model.units[part.start : part.stop]
        checkpoint = costs.state_bytes(units, problem.training)
        inputs = problem.workload.batch_size * units[0].input_bytes
        return checkpoint + inputs

    timeouts = Timeouts(options.stall_timeout, options.rejoin_timeout, standstill)
    return Supervisor(mailbox, holder.presence, problem, timeouts, backlog)


class ReplicatingMember:
    """A device that keeps replicas, and becomes a stage of a configuration in two phases.

    After `Prepare` the device fetches the units that its stage misses, and reports once it has all. After `Commit`,
    which follows when all stages have reported, it begins to work. In between it keeps all previous units for others to
    fetch, also in a later configuration if this preparation fails.
    """

    def __init__(
        self, mailbox: Mailbox, context: ProgramContext[AsynchronousOptions]
    ) -> None:
        self.store = ReplicaStore(mailbox)
        self.holder = RoleHolder(mailbox, context.plan.coordinator, self._with_replicas)
        self._mailbox = mailbox
        self._context = context
        self._stage: Stage | None = None
        """The stage being prepared or running."""
        self._point = BEGINNING
        """The resume point."""
        self._seeded = False
        """Whether the units come from the seed."""
        self._awaited: set[int] = set()
        """Units not yet received."""
        self._watches: dict[str, LinkWatch] = {}
        """Watches of the links that this device has measured, by their targets."""
        mailbox.outbox.on_acknowledgement = self._watch_link
        mailbox.on_open(self._abandon_stage)
        mailbox.on(Prepare, self._prepare_stage)
        mailbox.on(FetchedUnit, self._store_unit)
        mailbox.on(Commit, self._commit_stage)
        mailbox.on(Measure, self._start_measuring)
        # A packet only has to be acknowledged, but without a handler it would stay in the mailbox.
        mailbox.on(Packet, lambda packet: None)

    def _abandon_stage(self) -> None:
        """Drop the stage of the previous configuration."""
        self._stage = None

    def _with_replicas(self, status: Status) -> Status:
        return replace(status, held=self.store.inventory())

    def _prepare_stage(self, prepare: Prepare) -> None:
        """Make a stage, and fetch its missing units."""
        problem = self._context.problem
        updates = partial(AsynchronousUpdates, problem.options, self.store)
        stages: list[Stage] = []

        def role() -> Stage:
            own_name = self._mailbox.device.name
            coordinator = self._context.plan.coordinator
            position = StagePosition.from_message(own_name, coordinator, prepare)
            stage = Stage(self._mailbox, problem, position, updates=updates)
            stages.append(stage)
            return stage

        # The holder refuses an outdated configuration, and then makes no stage.
        if not self.holder.assume(prepare.configuration, role):
            return
        self._stage = stages[0]
        self._point = Point(prepare.made, prepare.step)
        self._seeded = prepare.seeded
        self._awaited = set()
        for units in prepare.fetch.values():
            self._awaited.update(units)
        if prepare.origins is None:
            for owner, units in prepare.fetch.items():
                self._fetch(owner, self._point, units)
        else:
            self._collect_newest(prepare.fetch, prepare.origins)
        self._report_prepared()

    def _fetch(self, owner: str, point: Point, units: Sequence[int]) -> None:
        fetch = Fetch(
            configuration=self._mailbox.configuration,
            made=point.configuration,
            step=point.step,
            units=units,
        )
        self._mailbox.post(owner, fetch)

    def _collect_newest(
        self,
        fetch: Mapping[str, Sequence[int]],
        origins: Sequence[tuple[int, int, Sequence[int]]],
    ) -> None:
        """Fetch units whose newest weights are at other points, and copy the units that this device holds.

        ``fetch`` has the units to fetch by device, and ``origins`` (configuration, step, units) of each point.
        """
        local: dict[Point, list[int]] = {}
        for made, step, units in origins:
            point = Point(made, step)
            for owner, wanted in fetch.items():
                of_point = [unit for unit in wanted if unit in units]
                if of_point:
                    self._fetch(owner, point, of_point)
            here = [unit for unit in units if unit not in self._awaited]
            if here:
                local[point] = here
        for units in local.values():
            self._awaited.update(units)
        if local:
            self._mailbox.start_in_configuration(self._copy_local(local))

    async def _copy_local(self, units_by_origin: Mapping[Point, Sequence[int]]) -> None:
        """Add units that this device holds to the state to resume with."""
        replicas = self.store.replicas
        for origin, units in units_by_origin.items():
            if origin.step == RUNNING:
                await self.store.keep_running()
            state = replicas.state(origin, units)
            replicas.put(self._point, state, units)
            self._awaited.difference_update(units)
        self._report_prepared()

    def _store_unit(self, fetched: FetchedUnit) -> None:
        # Without a stage there is no preparation to complete.
        if self._stage is None:
            return
        # A unit from another point becomes part of the state to resume with.
        self.store.replicas.put(self._point, fetched.state, [fetched.unit])
        self._awaited.discard(fetched.unit)
        self._stage.actions += 1
        self._report_prepared()

    def _report_prepared(self) -> None:
        """Report to the coordinator if all units of the new configuration are present."""
        if not self._awaited:
            self.holder.ready()

    def _commit_stage(self, commit: Commit) -> None:
        """Begin the work of the prepared stage, and free the points that no recovery needs any more."""
        if self._stage is None:
            return
        replicas = self.store.replicas
        units = range(*self._stage.position.units)
        self._stage.state = None
        if not self._seeded:
            self._stage.state = replicas.state(self._point, units)
        kept = [Point(made, step) for made, step in commit.keep]
        replicas.keep(kept, later=False)
        offers_weights = self._context.problem.options.resume == "next-batch"
        self.store.running = self._stage if offers_weights else None
        self.holder.begin()

    def _start_measuring(self, measure: Measure) -> None:
        if self._stage is not None:
            self._mailbox.start_in_configuration(self._measure_link(measure))

    async def _measure_link(self, measure: Measure) -> None:
        """Measure the link to another device for the coordinator."""
        # Replicas under way would share the link with the measurement.
        await self.store.finish_sending()
        link = await measure_link(self._mailbox, measure.target)
        self._watches[measure.target] = LinkWatch(link)
        # JSON has no infinity.
        rate = None if math.isinf(link.rate) else link.rate
        measured = Measured(measure.configuration, measure.target, rate)
        self._mailbox.post(self._context.plan.coordinator, measured)

    def _watch_link(self, peer: str, size: float, posted: float) -> None:
        """Report to the coordinator, once, that a link deviates from the measured rate."""
        watch = self._watches.get(peer)
        if watch is None:
            return
        acknowledged = self._mailbox.device.now()
        if watch.deviates(size, posted, acknowledged):
            del self._watches[peer]
            deviates = Deviates(self._mailbox.configuration, peer)
            self._mailbox.post(self._context.plan.coordinator, deviates)


def _total_steps(context: ProgramContext) -> int:
    """Return the total training steps of the workload."""
    workload = context.problem.workload
    if workload.task != "train":
        return 0
    assert context.dataset is not None
    return Training(context.dataset, workload, context.problem.seed).steps


def configure_stage(
    supervisor: Supervisor,
    steps: int,
    part: Assignment,
    state: State | None,
) -> Configure:
    """Return the message that makes a device a stage, with the stage's units of ``state``; None: of the seed."""
    own_state: State = {}
    if state is not None:
        own_state = restrict(state, part.start, part.stop)
    return Configure(
        configuration=supervisor.mailbox.configuration,
        stages=supervisor.stages,
        steps=steps,
        given=state is not None,
        state=own_state,
    )
