"""The program of every device of a pipeline: `run_synchronous`, `run_asynchronous` or `run_inference`.

Methods call one of these functions with their schedule, their planner or their options. Every device may become a
stage, in configurations that the coordinator opens. The coordinator's device also has a stage; beside its stage it
supervises the other devices and feeds the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from testbed.ml.pipeline.checkpointing import CheckpointRecovery, PlanStages
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
from testbed.ml.pipeline.placement import BEGINNING, RUNNING_STEP, Point, ReplicaStore
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

SpecificOptions = TypeVar("SpecificOptions", bound=StagesOptions)


async def run_synchronous(
    device: Device,
    context: ProgramContext[SynchronousOptions],
    schedule: Schedule,
    plan_stages: PlanStages,
) -> None:
    """Train with one update a step, and recovery from checkpoints."""
    updates = partial(SynchronousUpdates, schedule, context.problem.options)
    await _run_with_checkpoints(
        device, context, SYNCHRONOUS_KINDS, updates, plan_stages, SynchronousTrainer
    )


async def run_inference(
    device: Device,
    context: ProgramContext[StagesOptions],
    plan_stages: PlanStages,
    in_flight: int,
) -> None:
    """Answer requests by stages, at most ``in_flight`` at once; unanswered ones are sent again after a loss."""

    def make_serving(
        supervisor: Supervisor,
        recovery: CheckpointRecovery,
        context: ProgramContext[StagesOptions],
    ) -> Serving:
        return Serving(supervisor, context, in_flight)

    await _run_with_checkpoints(
        device, context, FORWARD_KINDS, None, plan_stages, make_serving
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
        # Seconds after which a device that answers, but does nothing, counts as lost.
        standstill = max(2 * options.stall_timeout, options.rejoin_timeout)
        supervisor = await _make_supervisor(mailbox, member.holder, context, standstill)
        recovery = ReplicaRecovery(
            supervisor, member.store, partitioner, context, _total_steps(context)
        )
        await recovery.begin()
        work = AsynchronousTrainer(supervisor, recovery, partitioner, context)
        await run_with_recovery(work, recovery, supervisor, recovery.recovering)


async def _run_with_checkpoints(
    device: Device,
    context: ProgramContext[SpecificOptions],
    kinds: Iterable[type[TypedMessage]],
    updates: Callable[[Stage], UpdatePolicy] | None,
    plan_stages: PlanStages,
    make_work: Callable[
        [Supervisor, CheckpointRecovery, ProgramContext[SpecificOptions]], ResumableWork
    ],
) -> None:
    """Run a stage on every device, with the state sent by the coordinator; coordinate on the plan's coordinator.

    ``kinds`` are the messages of the program. ``updates`` makes the update policy of a stage, and is None for
    inference. ``make_work`` makes the coordinator's work: training, or answering requests.
    """
    problem = context.problem
    coordinator = context.plan.coordinator
    async with _open_mailbox(device, context, kinds) as mailbox:
        holder = RoleHolder(mailbox, coordinator)

        def make_stage(configure: Configure) -> Stage:
            position = StagePosition.from_message(device.name, coordinator, configure)
            state = configure.state if configure.given else None
            return Stage(mailbox, problem, position, state, updates)

        holder.follow(Configure, make_stage)
        standstill = problem.options.rejoin_timeout
        supervisor = await _make_supervisor(mailbox, holder, context, standstill)
        configure = partial(configure_stage, supervisor, _total_steps(context))
        recovery = CheckpointRecovery(
            supervisor,
            configure,
            plan_stages,
            units=len(problem.model.units),
            weights=context.weights,
        )
        supervisor.start(context.plan.assignments)
        work = make_work(supervisor, recovery, context)
        await run_with_recovery(work, recovery, supervisor)


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
    """Return the supervisor of the stages on the coordinator; on other devices, serve as a stage until cancelled.

    ``standstill`` is the number of seconds after which an answering device without progress counts as lost.
    """
    problem = context.problem
    options = problem.options
    if mailbox.device.name != context.plan.coordinator:
        # Never returns: the runtime cancels the program at the end of the run.
        await holder.serve()

    def backlog(assignment: Assignment) -> float:
        """Return the bytes that a stage may be sending before its answer: a checkpoint, and a gradient."""
        units = problem.model.units[assignment.start : assignment.stop]
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
        self._resume_point = BEGINNING
        """The point of which the stage needs its units."""
        self._is_seeded = False
        """Whether the stage draws its weights from the seed."""
        self._awaited_units: set[int] = set()
        """Units of the stage that are not at the resume point yet."""
        self._watches: dict[str, LinkWatch] = {}
        """Watches of the links that this device has measured, by the receiving device."""
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
        """Make a stage, and fetch the missing units."""
        problem = self._context.problem
        updates = partial(AsynchronousUpdates, problem.options, self.store)

        def make_stage() -> Stage:
            own_name = self._mailbox.device.name
            coordinator = self._context.plan.coordinator
            position = StagePosition.from_message(own_name, coordinator, prepare)
            self._stage = Stage(self._mailbox, problem, position, updates=updates)
            return self._stage

        # The holder refuses an outdated configuration, and then makes no stage.
        if not self.holder.assume(prepare.configuration, make_stage):
            return
        self._resume_point = Point(prepare.made, prepare.step)
        self._is_seeded = prepare.seeded
        self._awaited_units = set()
        for units in prepare.fetch.values():
            self._awaited_units.update(units)
        if prepare.origins is None:
            for owner, units in prepare.fetch.items():
                self._fetch(owner, self._resume_point, units)
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
        """Assemble the resume point from several other points: fetch some units, and copy the units on the device.

        ``fetch`` maps each device to the units to fetch there, and ``origins`` has (configuration, step, units) for
        each of the other points.
        """
        local_units: dict[Point, list[int]] = {}
        for configuration, step, units in origins:
            origin = Point(configuration, step)
            for owner, units_of_owner in fetch.items():
                fetched_units = [unit for unit in units_of_owner if unit in units]
                if fetched_units:
                    self._fetch(owner, origin, fetched_units)
            copied_units = [unit for unit in units if unit not in self._awaited_units]
            if copied_units:
                local_units[origin] = copied_units
        for units in local_units.values():
            self._awaited_units.update(units)
        if local_units:
            self._mailbox.start_in_configuration(self._copy_local(local_units))

    async def _copy_local(self, units_by_origin: Mapping[Point, Sequence[int]]) -> None:
        """Copy the device's units at other points to the resume point."""
        replicas = self.store.replicas
        for origin, units in units_by_origin.items():
            if origin.step == RUNNING_STEP:
                await self.store.copy_running_stage()
            state = replicas.state(origin, units)
            replicas.put(self._resume_point, state, units)
            self._awaited_units.difference_update(units)
        self._report_prepared()

    def _store_unit(self, fetched: FetchedUnit) -> None:
        # Without a stage there is no preparation to complete.
        if self._stage is None:
            return
        # Whatever point the unit was fetched from, the stage resumes with it.
        self.store.replicas.put(self._resume_point, fetched.state, [fetched.unit])
        self._awaited_units.discard(fetched.unit)
        self._stage.actions += 1
        self._report_prepared()

    def _report_prepared(self) -> None:
        """Report to the coordinator if all units of the stage are at the resume point."""
        if not self._awaited_units:
            self.holder.ready()

    def _commit_stage(self, commit: Commit) -> None:
        """Begin the work of the prepared stage, and free replicas no longer needed by any recovery."""
        if self._stage is None:
            return
        replicas = self.store.replicas
        units = range(*self._stage.position.units)
        self._stage.state = None
        if not self._is_seeded:
            self._stage.state = replicas.state(self._resume_point, units)
        kept_points = [Point(made, step) for made, step in commit.keep]
        replicas.free_except(kept_points, keeps_newer=False)
        offers_weights = self._context.problem.options.resume == "next-batch"
        self.store.running_stage = self._stage if offers_weights else None
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
        """Report a link's deviation from the measured rate to the coordinator, once."""
        watch = self._watches.get(peer)
        if watch is None:
            return
        acknowledged = self._mailbox.device.now()
        if watch.deviates(size, posted, acknowledged):
            del self._watches[peer]
            deviates = Deviates(self._mailbox.configuration, peer)
            self._mailbox.post(self._context.plan.coordinator, deviates)


def _total_steps(context: ProgramContext) -> int:
    """Return the number of training steps of the workload; 0 for inference."""
    workload = context.problem.workload
    if workload.task != "train":
        return 0
    assert context.dataset is not None
    return Training(context.dataset, workload, context.problem.seed).steps


def configure_stage(
    supervisor: Supervisor,
    steps: int,
    assignment: Assignment,
    state: State | None,
) -> Configure:
    """Return the message that makes a device a stage, with the stage's units of ``state``.

    Without a state the stage draws its weights from the seed.
    """
    stage_state: State = {}
    if state is not None:
        stage_state = restrict(state, assignment.start, assignment.stop)
    return Configure(
        configuration=supervisor.mailbox.configuration,
        stages=supervisor.stages,
        steps=steps,
        given=state is not None,
        state=stage_state,
    )
