"""The program of every device of a pipeline: one executor, with what distinguishes methods as its arguments."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from testbed.device import Device
from testbed.kits.layers import costs
from testbed.kits.layers.feed import Training
from testbed.kits.layers.shard import State, restrict
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import RoleHolder, Status
from testbed.kits.messaging.supervision import RecoveryPolicy, ResumableWork, Supervisor, Timeouts, run_with_recovery
from testbed.kits.messaging.transfer import codecs
from testbed.kits.messaging.typed import Typed
from testbed.kits.pipeline.checkpointing import FromCheckpoint
from testbed.kits.pipeline.forwarding import Serving
from testbed.kits.pipeline.measuring import LinkWatch, bandwidth
from testbed.kits.pipeline.messages import (
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
from testbed.kits.pipeline.partitioners import AsynchronousOptions, Partitioner
from testbed.kits.pipeline.placement import BEGINNING, Point, ReplicaStore
from testbed.kits.pipeline.planning import StagesOptions, SynchronousOptions
from testbed.kits.pipeline.recovery import FromReplicas
from testbed.kits.pipeline.stage import Stage, StagePosition, UpdatePolicy
from testbed.kits.pipeline.training import AsynchronousTrainer, SynchronousTrainer
from testbed.kits.pipeline.updates import AsynchronousUpdates, SynchronousUpdates
from testbed.method import Job, Problem
from testbed.plan import Piece
from testbed.schedule import Schedule

OptionsT = TypeVar("OptionsT", bound=StagesOptions)
PlanStages = Callable[[Collection[str]], Sequence[Piece]]
"""Devices that are there -> stages over them; raises `InputError` where there are none."""


class Member(Protocol):
    """One device, from the start of its program on."""

    holder: RoleHolder


class PipelineRecovery(RecoveryPolicy, Protocol):
    """A recovery policy that may begin with a recovery."""

    recovering: bool
    """Whether devices were lost before the work began."""


M = TypeVar("M", bound=Member)
R = TypeVar("R", bound=PipelineRecovery)


@dataclass(frozen=True)
class PipelineHooks(Generic[OptionsT, M, R]):
    """What distinguishes pipelines; `synchronous`, `asynchronous` and `inference` return those there are."""

    kinds: tuple[type[Typed], ...]
    """The messages that its devices send."""
    member: Callable[[Mailbox, Job[OptionsT]], M]
    """Makes a device a stage whenever the coordinator says so; the device's side of the recovery."""
    recovery: Callable[[M, Supervisor, Job[OptionsT]], Awaitable[R]]
    """Returns the coordinator's side of the recovery, which also sets the stages up at first."""
    work: Callable[[Supervisor, R, Job[OptionsT]], ResumableWork]
    """What the coordinator does with the stages."""
    standstill: float | None = None
    """Seconds without anything done, though all devices answer, until they count as lost; None: the return window."""


async def run_pipeline(device: Device, job: Job[OptionsT], hooks: PipelineHooks[OptionsT, M, R]) -> None:
    """Coordinate on the plan's lead; be a stage there and elsewhere."""
    problem, options = job.problem, job.problem.options
    carried = codecs(activation=options.transfer.activations, gradient=options.transfer.gradients)
    async with Mailbox(device, problem.links, hooks.kinds, codecs=carried) as mailbox:
        member = hooks.member(mailbox, job)
        if device.name != job.plan.lead:
            await member.holder.serve()
        timeouts = Timeouts(options.patience, options.return_window, hooks.standstill or options.return_window)
        supervisor = Supervisor(mailbox, member.holder.presence, problem, timeouts, partial(_backlog, problem))
        recovery = await hooks.recovery(member, supervisor, job)
        await run_with_recovery(hooks.work(supervisor, recovery, job), recovery, supervisor, recovery.recovering)


def _backlog(problem: Problem, part: Piece) -> float:
    """Return how many bytes a stage may be sending to the coordinator: a checkpoint, and inputs."""
    workload, units = problem.workload, problem.model.units[part.first : part.last]
    return costs.state_bytes(units, problem.training) + workload.batch_size * units[0].input_bytes


class CheckpointedMember(Generic[OptionsT]):
    """A device that is a stage as soon as the coordinator says so, with the state that it is sent."""

    def __init__(
        self, updates: Callable[[OptionsT, Stage], UpdatePolicy] | None, mailbox: Mailbox, job: Job[OptionsT]
    ) -> None:
        self.holder = RoleHolder(mailbox, job.plan.lead)

        def stage_of(configure: Configure) -> Stage:
            position = StagePosition.from_message(mailbox.device.name, job.plan.lead, configure)
            state = configure.state if configure.given else None
            policy = None if updates is None else partial(updates, job.problem.options)
            return Stage(mailbox, job.problem, position, state, policy)

        self.holder.follow(Configure, stage_of)


class Preparation:
    """How a device becomes a stage that has replicas: it fetches what it lacks, and begins when all have theirs.

    One configuration comes after the other. Between `Prepare` and `Commit` the device has whatever it had before:
    others may fetch it, also those of a later configuration if the preparation comes to nothing.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        holder: RoleHolder,
        store: ReplicaStore,
        coordinator: str,
        stage_of: Callable[[Prepare], Stage],
    ) -> None:
        self._mailbox = mailbox
        self._holder = holder
        self._store = store
        self._coordinator = coordinator
        self._stage_of = stage_of
        self._stage: Stage | None = None
        """The one that is prepared or runs."""
        self._point = BEGINNING
        """Where it goes on from."""
        self._seeded = False
        """Whether its units come from the seed."""
        self._awaited: set[int] = set()
        """Units that are still to come."""
        self._watches: dict[str, LinkWatch] = {}
        """Watches of the links that this device has measured, by their targets."""
        mailbox.sends.acknowledged = self._acknowledged
        mailbox.on_open(self._give_up)
        mailbox.on(Prepare, self._prepare)
        mailbox.on(FetchedUnit, self._take_in)
        mailbox.on(Commit, self._commit)
        mailbox.on(Measure, self._measure)
        mailbox.on(Packet, lambda packet: None)

    def _give_up(self) -> None:
        self._stage = None

    def _prepare(self, prepare: Prepare) -> None:
        stages: list[Stage] = []

        def role() -> Stage:
            stages.append(self._stage_of(prepare))
            return stages[0]

        if not self._holder.assume(prepare.configuration, role):
            return
        self._stage = stages[0]
        self._point, self._seeded = Point(prepare.made, prepare.step), prepare.seeded
        self._awaited = {unit for units in prepare.fetch.values() for unit in units}
        for owner, units in prepare.fetch.items():
            self._mailbox.post(owner, Fetch(prepare.configuration, prepare.made, prepare.step, units))
        self._report()

    def _take_in(self, found: FetchedUnit) -> None:
        if self._stage is None:
            return
        self._store.replicas.put(Point(found.made, found.step), found.state, [found.unit])
        self._awaited.discard(found.unit)
        self._stage.actions += 1
        self._report()

    def _report(self) -> None:
        """Report that all that the new configuration needs is here, once it is."""
        if not self._awaited:
            self._holder.ready()

    def _commit(self, commit: Commit) -> None:
        if self._stage is None:
            return
        replicas = self._store.replicas
        units = range(*self._stage.position.units)
        self._stage.state = None if self._seeded else replicas.state(self._point, units)
        replicas.keep([Point(*point) for point in commit.keep], later=False)
        self._holder.begin()

    def _measure(self, measure: Measure) -> None:
        if self._stage is not None:
            self._mailbox.start_in_configuration(self._measure_link(measure))

    async def _measure_link(self, measure: Measure) -> None:
        """Measure the link to another device for the coordinator."""
        await self._store.spread()
        found = await bandwidth(self._mailbox, measure.target)
        self._watches[measure.target] = LinkWatch(found)
        finite = None if math.isinf(found.rate) else found.rate
        self._mailbox.post(self._coordinator, Measured(measure.configuration, measure.target, finite))

    def _acknowledged(self, peer: str, size: float, posted: float) -> None:
        """Report, once, that a link does not do any more what was measured."""
        watch = self._watches.get(peer)
        if watch is not None and watch.deviates(size, posted, self._mailbox.device.now()):
            del self._watches[peer]
            self._mailbox.post(self._coordinator, Deviates(self._mailbox.configuration, peer))


class ReplicatingMember:
    """A device that keeps replicas, and becomes a stage once all stages have what they need."""

    def __init__(
        self,
        updates: Callable[[AsynchronousOptions, ReplicaStore, Stage], UpdatePolicy],
        mailbox: Mailbox,
        job: Job[AsynchronousOptions],
    ) -> None:
        lead = job.plan.lead
        self.store = store = ReplicaStore(mailbox)

        def stage_of(prepare: Prepare) -> Stage:
            position = StagePosition.from_message(mailbox.device.name, lead, prepare)
            return Stage(mailbox, job.problem, position, updates=partial(updates, job.problem.options, store))

        def with_replicas(status: Status) -> Status:
            computing = status.computing or mailbox.sends.waiting()
            return replace(status, computing=computing, held=store.replicas.inventory())

        self.holder = RoleHolder(mailbox, lead, with_replicas)
        Preparation(mailbox, self.holder, store, lead, stage_of)


def synchronous(
    schedule: Schedule, partition: PlanStages
) -> PipelineHooks[SynchronousOptions, CheckpointedMember[SynchronousOptions], FromCheckpoint]:
    """Return the hooks of training with one update a step, and recovery from checkpoints."""
    return PipelineHooks(
        SYNCHRONOUS_KINDS,
        partial(CheckpointedMember, partial(SynchronousUpdates, schedule)),
        partial(_from_checkpoint, partition),
        SynchronousTrainer,
    )


def inference(
    partition: PlanStages, in_flight: int
) -> PipelineHooks[StagesOptions, CheckpointedMember[StagesOptions], FromCheckpoint]:
    """Return the hooks of inference: stages without updates, requests that are sent again after a loss."""

    def serving(supervisor: Supervisor, recovery: FromCheckpoint, job: Job[StagesOptions]) -> Serving:
        return Serving(supervisor, job, in_flight)

    return PipelineHooks(
        FORWARD_KINDS, partial(CheckpointedMember, None), partial(_from_checkpoint, partition), serving
    )


def asynchronous(
    partitioner: Partitioner, options: AsynchronousOptions
) -> PipelineHooks[AsynchronousOptions, ReplicatingMember, FromReplicas]:
    """Return the hooks of training with an update after every batch, and recovery from replicas."""

    async def recovery(
        member: ReplicatingMember, supervisor: Supervisor, job: Job[AsynchronousOptions]
    ) -> FromReplicas:
        policy = FromReplicas(supervisor, member.holder.presence, member.store, partitioner, job, _steps(job))
        await policy.begin()
        return policy

    def trainer(supervisor: Supervisor, recovery: FromReplicas, job: Job[AsynchronousOptions]) -> AsynchronousTrainer:
        return AsynchronousTrainer(supervisor, recovery, partitioner, job)

    return PipelineHooks(
        ASYNCHRONOUS_KINDS,
        partial(ReplicatingMember, AsynchronousUpdates),
        recovery,
        trainer,
        max(2 * options.patience, options.return_window),
    )


async def _from_checkpoint(partition: PlanStages, member: Member, supervisor: Supervisor, job: Job) -> FromCheckpoint:
    """Set up the stages of the plan, to go on from checkpoints."""
    configure = partial(configure_stage, supervisor, _steps(job))
    recovery = FromCheckpoint(supervisor, configure, partition, len(job.problem.model.units), job.weights)
    supervisor.start(job.plan.pieces)
    return recovery


def _steps(job: Job) -> int:
    """Return the training steps of the whole workload."""
    workload = job.problem.workload
    if workload.task != "train":
        return 0
    assert job.dataset is not None
    return Training(job.dataset, workload, job.problem.seed).steps


def configure_stage(supervisor: Supervisor, steps: int, part: Piece, state: State | None) -> Configure:
    """Return the message that makes a device a stage, with its units of a state; None: from the seed."""
    given = {} if state is None else restrict(state, part.first, part.last)
    return Configure(supervisor.mailbox.configuration, supervisor.stages, steps, state is not None, given)
