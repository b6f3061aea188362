"""Assignment of stages to devices, at the start and after a failure: options and planners, without execution.

A model is a row of units. Cuts divide the row into stages, consecutive units on one device each; the stages with their
devices are a partition. `synchronous_cut` chooses the cuts of synchronous pipelines. A `Partitioner`, which methods
override, chooses the partitions of asynchronous ones: at the start, after the loss of a device, and whenever another
partition is worth a change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from typing_extensions import TypeVar

from testbed.common.errors import InputError
from testbed.common.quantities import Duration
from testbed.hardware import DeviceSpec
from testbed.ml.data.batches import is_due
from testbed.ml.layers import costs
from testbed.ml.method import Options, PlannedMessage, PlanningProblem, StepsOrTime
from testbed.ml.partition import Chain, Cuts, SynchronousPipeline
from testbed.ml.partition.asynchronous import (
    AsynchronousPipeline,
    UnitTimes,
    relative_capacities,
)
from testbed.ml.partition.redistribution import StagePartition
from testbed.ml.schedule import SCHEDULES
from testbed.ml.transfer import CrossingPart, encoded_share
from testbed.network.link import Pair
from testbed.plan import Assignment, Plan, PlanDetails

MICRO_BATCHES = {"model-parallelism": 1, "gpipe": 4, "1f1b": 4}
"""Default of ``micro_batches`` by schedule."""


class StagesOptions(Options):
    """Options of every method whose devices are the stages of a pipeline, in the order of the scenario."""

    stages: int | None = Field(
        None,
        ge=1,
        description="use only the first N devices, others are spares; default: all",
    )
    stall_timeout: Duration = Field(
        2.0,
        gt=0,
        description=(
            "time without progress before devices are polled, and without a reply "
            "before they count as lost"
        ),
    )
    rejoin_timeout: Duration = Field(
        15.0, description="time in which a lost device may return"
    )
    transfer: CrossingPart = Field(
        CrossingPart(),
        description="encoding of activations and gradients between stages",
    )

    @property
    def shares(self) -> tuple[float, float]:
        """Transmitted bytes for each byte of activations and of their gradients."""
        activations = encoded_share(self.transfer.activations)
        gradients = encoded_share(self.transfer.gradients)
        return activations, gradients


class SynchronousOptions(StagesOptions):
    """Options of every pipeline in which all micro-batches of a step use the same weights."""

    schedule: Literal["model-parallelism", "gpipe", "1f1b"] = "1f1b"
    micro_batches: int = Field(
        None,
        ge=1,
        validate_default=True,
        description="micro-batches of a batch; default: 4, or 1 for model-parallelism",
    )
    partition: Literal["even", "optimal"] = Field(
        "optimal",
        description="even: equal numbers of units; optimal: minimum predicted step time",
    )
    recompute: bool = Field(
        False,
        description="all stages but the last discard activations and recompute them before backward, as in GPipe",
    )
    checkpoint_every: int = Field(
        20,
        ge=1,
        description="interval in steps after which the first device gathers all weights",
    )
    evaluate_every: StepsOrTime | None = Field(
        None,
        description=(
            "interval between evaluations, in steps or time; default: only at the end"
        ),
    )

    @field_validator("micro_batches", mode="before")
    @classmethod
    def _default_of_schedule(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        # pydantic leaves an invalid schedule out of `info.data`, and reports it separately.
        return MICRO_BATCHES.get(info.data.get("schedule", ""), 1)

    def checkpoints(self, step: int, steps: int) -> bool:
        """Return whether the state after ``step`` of ``steps`` becomes a checkpoint; the final state always does.

        >>> SynchronousOptions(checkpoint_every=20).checkpoints(40, steps=100)
        True
        """
        return step % self.checkpoint_every == 0 or step == steps


@dataclass(frozen=True)
class CheckpointedPipeline(SynchronousPipeline):
    """A pipeline whose first stage also stores the newest checkpoint and collects the next one."""

    checkpoint_bytes: float = 0.0
    """Bytes of a checkpoint: all weights and the optimizer's state."""

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes needed by a stage with units ``first`` to ``last`` (exclusive)."""
        memory = super().memory(stage, first, last)
        if stage == 0:
            # The newest complete checkpoint, and the next one, which arrives unit by unit.
            memory += 2 * self.checkpoint_bytes
        return memory


class PipelineDetails(PlanDetails):
    """Plan details of a synchronous pipeline."""

    model_config = ConfigDict(extra="forbid")
    schedule: str
    micro_batches: int
    """Micro-batches of a batch."""
    partition: str
    """How the cuts were chosen: ``even`` or ``optimal``."""
    bottleneck: float
    """Seconds that the slowest stage or link is busy for one micro-batch."""


def synchronous_cut(
    problem: PlanningProblem[SynchronousOptions], devices: Sequence[DeviceSpec]
) -> tuple[CheckpointedPipeline, Cuts]:
    """Return the pipeline over these devices, and the cuts of the model; raises `InputError` if no cuts fit."""
    options = problem.options
    pipeline = CheckpointedPipeline(
        model=problem.model,
        devices=tuple(devices),
        links=problem.links,
        shares=options.shares,
        batch_size=problem.workload.batch_size,
        micro_batches=options.micro_batches,
        schedule=SCHEDULES[options.schedule],
        state_values=problem.training.state_values,
        update_flops=problem.training.update_flops,
        recompute=options.recompute,
        checkpoint_bytes=costs.state_bytes(problem.model.units, problem.training),
    )
    if options.partition == "even":
        return pipeline, pipeline.even()
    return pipeline, pipeline.least_step_time()


def initial_devices(problem: PlanningProblem[StagesOptions]) -> tuple[DeviceSpec, ...]:
    """Return the devices of the initial stages: the first ``stages`` devices of the scenario, by default all.

    Raises `InputError` for too few devices, or if a device has no link to or from the first one, the coordinator.
    """
    count = problem.options.stages or len(problem.devices)
    if count > len(problem.devices):
        raise InputError(
            f"{count} stages need {count} devices, but the scenario has {len(problem.devices)}",
            ("method", "stages"),
        )
    coordinator, *others = [device.name for device in problem.devices]
    for other in others:
        # Spare devices are included: they may become stages later.
        has_link_to_other = (coordinator, other) in problem.links
        has_link_from_other = (other, coordinator) in problem.links
        if not has_link_to_other or not has_link_from_other:
            raise InputError(
                f"{coordinator} coordinates all other devices and needs links to and from each of them; a link between "
                f"{coordinator} and {other} is missing: use the topology mesh or add the link",
                ("network", "topology"),
            )
    return problem.devices[:count]


def devices_among(
    problem: PlanningProblem[StagesOptions], names: Collection[str]
) -> tuple[DeviceSpec, ...]:
    """Return the devices among ``names`` that become stages, in the scenario's order."""
    devices = [device for device in problem.devices if device.name in names]
    stages = problem.options.stages or len(devices)
    # A stage has at least one unit, so a short model leaves devices without a stage.
    count = min(stages, len(problem.model.units))
    return tuple(devices[:count])


def stage_assignments(chain: Chain, cuts: Cuts) -> tuple[Assignment, ...]:
    """Return the stages made by the cuts, with the memory required by each stage."""
    assignments = []
    for stage, device in enumerate(chain.devices):
        first, last = cuts[stage : stage + 2]
        assignment = Assignment(
            device=device.name,
            start=first,
            stop=last,
            memory=chain.memory(stage, first, last),
        )
        assignments.append(assignment)
    return tuple(assignments)


RESUME_HELP = (
    "batch to resume with after a loss; next-batch: the first one without gradients, where remaining devices keep "
    "their weights and lost units come from their newest replicas; last-replica: the one after the newest replicated "
    "state, to which all units return"
)
"""Description of the option ``resume``, which methods with another default repeat."""


class AsynchronousOptions(StagesOptions):
    """Options of every asynchronous training method."""

    former_keys: ClassVar[Mapping[str, str]] = {
        "aggregate": "aggregation_interval",
        "chain_every": "chain_replication_interval",
        "copies": "replicas",
        "fetch": "redistribution",
        "global_every": "global_replication_interval",
        "objective": "partition_objective",
        "selection": "join_timeout",
    }
    in_flight: int | None = Field(
        None,
        ge=1,
        description=(
            "maximum number of batches in flight; default and upper limit: the "
            "number of stages"
        ),
    )
    vertical_sync: bool = Field(
        True, description="all stages use the same weight version for a batch"
    )
    aggregation_interval: int = Field(
        0,
        ge=0,
        description="stage i of n averages its weight versions every aggregation_interval * (n - i) batches; 0: never",
    )
    evaluate_every: StepsOrTime | None = Field(
        None,
        description=(
            "interval between evaluations, in steps or time; default: only at the end"
        ),
    )
    rejoin_timeout: Duration = Field(
        0.0, description="time in which a lost device may return"
    )
    join_timeout: Duration = Field(
        5.0,
        description="time in which devices must answer to take part in the training",
    )
    chain_replication_interval: int = Field(
        50,
        ge=0,
        description=(
            "interval in batches after which each stage sends its weights to the "
            "next; 0: never"
        ),
    )
    global_replication_interval: int = Field(
        100,
        ge=0,
        description=(
            "interval in batches after which all weights are sent to the first "
            "device; 0: never"
        ),
    )
    replicas: int = Field(
        1,
        ge=1,
        description=(
            "number of following devices that keep replicas of a stage's weights, "
            "and thus of neighbours that can be lost"
        ),
    )
    replication: Literal["background", "blocking"] = Field(
        "background",
        description=(
            "sending of replicas. background: while training continues; blocking: a stage continues after all of its "
            "replicas have arrived"
        ),
    )
    partition_objective: Literal["equation-5", "link-traffic"] = Field(
        "equation-5",
        description=(
            "time of links in the objective of the partition. equation-5: as in FTPipeHD's equation (5), "
            "which counts the activations of a link twice; link-traffic: each "
            "direction of a link separately, including replicas"
        ),
    )
    redistribution: Literal["algorithm-1", "local-first"] = Field(
        "algorithm-1",
        description=(
            "source of a device's new units after a loss or repartition. algorithm-1: as in "
            "FTPipeHD's Algorithm 1, the unit's device or the next one; local-first: the device's own replicas, if it "
            "has any"
        ),
    )
    resume: Literal["next-batch", "last-replica"] = Field(
        "last-replica", description=RESUME_HELP
    )

    def window(self, stages: int) -> int:
        """Return the maximum number of batches in flight with this number of stages.

        >>> AsynchronousOptions(in_flight=2).window(stages=3)
        2
        """
        if self.in_flight is None:
            return stages
        # With one batch at each stage all stages are busy; further batches would only wait.
        return min(stages, self.in_flight)

    def is_chain_replication_due(self, batches: int) -> bool:
        """Return whether each stage replicates its units to the following stages after ``batches`` batches."""
        return is_due(batches, self.chain_replication_interval)

    def is_global_replication_due(self, batches: int) -> bool:
        """Return whether all stages replicate their units to the coordinator after ``batches`` batches."""
        return is_due(batches, self.global_replication_interval)

    def keepers(self, stage: int, stages: int) -> list[int]:
        """Return the stages keeping a chain replica of ``stage``, by their numbers from 0.

        Keepers are the following stages; if fewer than ``replicas`` stages follow, also stage 0, the coordinator's.

        >>> AsynchronousOptions(replicas=2).keepers(stage=1, stages=3)
        [2, 0]
        """
        first = stage + 1
        end = min(stages, first + self.replicas)
        keepers = list(range(first, end))
        # Stage 0 is no keeper of itself: its device has its units anyway.
        if len(keepers) < self.replicas and stage > 0:
            keepers.append(0)
        return keepers


def stage_messages(
    problem: PlanningProblem[StagesOptions], plan: Plan, *, by_unit: bool = False
) -> Iterator[PlannedMessage]:
    """Yield the largest messages of a pipeline as (sender, receiver, bytes).

    They contain activations of a whole batch, the state of a unit on its way to the coordinator, and initial weights,
    which the coordinator sends unit by unit (``by_unit``) or as one message for each stage.
    """
    model = problem.model
    coordinator = plan.coordinator
    samples = problem.workload.batch_size
    activation_share, _ = problem.options.shares
    # The coordinator sends the samples to the first stage, and the last stage returns the outputs.
    previous_device = coordinator
    for assignment in plan.assignments:
        activations = samples * activation_share * model.cut_bytes(assignment.start)
        yield previous_device, assignment.device, activations
        previous_device = assignment.device
        if problem.workload.task == "train":
            gathered = largest_unit_bytes(problem, assignment)
            yield assignment.device, coordinator, gathered
        if problem.workload.model.weights is not None:
            units = model.units[assignment.start : assignment.stop]
            parts = [[unit] for unit in units] if by_unit else [units]
            sizes = [costs.weight_bytes(part, problem.training) for part in parts]
            yield coordinator, assignment.device, max(sizes)
    outputs = samples * model.cut_bytes(len(model.units))
    yield previous_device, coordinator, outputs


def replica_messages(
    problem: PlanningProblem[AsynchronousOptions], plan: Plan
) -> Iterator[PlannedMessage]:
    """Yield the largest chain replicas as (sender, receiver, bytes); stages send replicas unit by unit."""
    options = problem.options
    if not options.chain_replication_interval:
        return
    stages = len(plan.assignments)
    for stage, assignment in enumerate(plan.assignments):
        size = largest_unit_bytes(problem, assignment)
        for keeper in options.keepers(stage, stages):
            yield assignment.device, plan.assignments[keeper].device, size


def largest_unit_bytes(
    problem: PlanningProblem[StagesOptions], assignment: Assignment
) -> float:
    """Return the maximum bytes of the weights and optimizer state of one unit of an assignment."""
    sizes = []
    for unit in problem.model.units[assignment.start : assignment.stop]:
        sizes.append(costs.state_bytes([unit], problem.training))
    return max(sizes)


SpecificOptions = TypeVar(
    "SpecificOptions", bound=AsynchronousOptions, default=AsynchronousOptions
)


def pipeline_over(
    problem: PlanningProblem[AsynchronousOptions],
    names: Sequence[str],
    profile: UnitTimes | None = None,
    capacities: Sequence[float] | None = None,
) -> AsynchronousPipeline:
    """Return the asynchronous pipeline over the devices ``names``, the coordinator first.

    ``profile`` are the unit times on the coordinator, by default computed from FLOPs and bytes. ``capacities`` are the
    times of the devices relative to the coordinator's, by default 1 for each: all devices as fast as the coordinator.
    """
    options = problem.options
    training = problem.training
    units = problem.model.units
    batch_size = problem.workload.batch_size
    has_chain_replication = options.chain_replication_interval > 0
    if profile is None:
        # The first device is the coordinator, to which capacities refer.
        profile = UnitTimes.by_formula(
            units, batch_size, problem.devices[0], training.update_flops
        )

    def stored_replicas(stage: int, start: int, end: int) -> float:
        """Return the maximum bytes of replicas on a stage with units ``start`` to ``end`` (exclusive).

        A stage keeps copies of its own units, and with chain replication copies of previous stages' units, for which
        the planner counts all units before the stage's own. Replicas of up to three points of the training are kept:
        the newest complete one, the next, still incomplete one, and the resume point of a repartition. The first device
        has all units at two points, and may have the last stage's units of a chain replication.
        """
        if stage == 0:
            points = 3 if has_chain_replication else 2
            return points * costs.state_bytes(units, training)
        first = 0 if has_chain_replication else start
        is_replicated = has_chain_replication or options.global_replication_interval
        points = 3 if is_replicated else 2
        return points * costs.state_bytes(units[first:end], training)

    def sent_replicas(stage: int, start: int, end: int) -> dict[int, float]:
        """Return the bytes of replicas sent per batch from a stage to each other stage.

        A replication sends the state of all units of the stage once in an interval of batches.
        """
        state = costs.state_bytes(units[start:end], training)
        sent = dict.fromkeys(range(len(names)), 0.0)
        if has_chain_replication:
            for keeper in options.keepers(stage, len(names)):
                sent[keeper] += state / options.chain_replication_interval
        if options.global_replication_interval:
            sent[0] += state / options.global_replication_interval
        # Stage 0 is the target of global replication, and keeps its own units without sending them.
        del sent[stage]
        return {target: size for target, size in sent.items() if size}

    devices = [problem.device(name) for name in names]
    if not capacities:
        capacities = [1.0] * len(names)
    return AsynchronousPipeline(
        model=problem.model,
        devices=tuple(devices),
        links=problem.links,
        shares=options.shares,
        batch_size=batch_size,
        profile=profile,
        capacities=tuple(capacities),
        state_values=training.state_values,
        vertical_sync=options.vertical_sync,
        counts_traffic=options.partition_objective == "link-traffic",
        window=options.in_flight,
        extra=stored_replicas,
        replicas=sent_replicas,
    )


class Partitioner(Generic[SpecificOptions]):
    """Chooses the partitions of an asynchronous pipeline, at the start and whenever devices leave or return.

    This class chooses as PipeDream does: the smallest bottleneck for equal devices, whatever is measured. Training
    methods override

    - `cut` and `pipeline` to choose other partitions,
    - `after_loss`, `is_repartition_due` and `propose_repartition` to change partitions in other situations,
    - `unmeasured_links` to request measurements, and functions beginning with ``store`` to use the results.
    """

    admits_devices = True
    """Whether a returning or standby device may become a stage."""
    profile_runs = 0
    """Profiling runs of each unit before training; 0 disables profiling."""

    def __init__(self, problem: PlanningProblem[SpecificOptions]) -> None:
        self.problem = problem

    def initial(self) -> StagePartition:
        """Return the initial partition; raises `InputError` if none fits."""
        names = [device.name for device in initial_devices(self.problem)]
        return self.partition_for(names)

    def partition_for(self, names: Sequence[str]) -> StagePartition:
        """Return the partition over the devices ``names``; surplus devices at the end get no stage.

        Raises `InputError` if no partition fits.
        """
        model = self.problem.model
        stages = self.problem.options.stages
        if stages is None:
            stages = len(names)
            # Units with a tied weight stay together. If they allow no cut at all, the planning below fails for several
            # devices, with a message that names the weights.
            if model.untied_parts > 1:
                stages = min(stages, model.untied_parts)
        # Every stage needs a unit.
        count = min(stages, len(model.units))
        chosen = names[:count]
        cuts = self.cut(self.pipeline(chosen))
        return StagePartition(tuple(chosen), cuts)

    def cut(self, pipeline: AsynchronousPipeline) -> tuple[int, ...]:
        """Return the cuts of the model; raises `InputError` if none fit."""
        return pipeline.least_bottleneck()

    def pipeline(self, names: Sequence[str]) -> AsynchronousPipeline:
        """Return the pipeline over the devices ``names``, with the unit times and links used for planning."""
        return pipeline_over(self.problem, names)

    def assignments(self, partition: StagePartition) -> tuple[Assignment, ...]:
        """Return the partition with the memory required by each stage."""
        pipeline = self.pipeline(partition.devices)
        return stage_assignments(pipeline, partition.cuts)

    def after_loss(self, old: StagePartition, present: Sequence[str]) -> StagePartition:
        """Return the partition to replace ``old`` over the ``present`` devices; raises `InputError` if none fits."""
        return self.partition_for(present)

    def is_repartition_due(self, batches: int) -> bool:
        """Return whether `propose_repartition` is asked after ``batches`` batches: by default at each replication."""
        options = self.problem.options
        chain_interval = options.chain_replication_interval
        return is_due(batches, chain_interval or options.global_replication_interval)

    def propose_repartition(
        self, old: StagePartition, present: Sequence[str]
    ) -> StagePartition | None:
        """Return a partition worth a change from ``old``, or None; the default reacts to new devices only."""
        if set(present) == set(old.devices):
            return None
        candidate = self.partition_for(present)
        # A change pauses the training, so a new device must become a further stage.
        if len(candidate.devices) <= len(old.devices):
            return None
        return candidate

    def unmeasured_links(self, partition: StagePartition) -> list[Pair]:
        """Return the (sender, receiver) pairs whose links lack a measurement needed for planning; none by default."""
        return []

    def store_profile(self, profile: UnitTimes) -> None:
        """Store the measured seconds of each unit on the first device."""

    def store_times(
        self, partition: StagePartition, times: Sequence[float | None]
    ) -> None:
        """Store the mean seconds of a batch on each stage; None for a stage without a finished batch."""

    def store_rate(self, pair: Pair, rate: float) -> None:
        """Store the measured bit/s of a link."""

    def discard_rate(self, one: str, other: str) -> None:
        """Discard the measurement between two devices because the link has changed."""


def momentum_advice(
    problem: PlanningProblem[AsynchronousOptions], window: int
) -> tuple[str, ...]:
    """Return a warning about momentum with stale gradients, or nothing; at most ``window`` batches are in flight."""
    momentum = problem.workload.training.optimizer.momentum
    staleness = window - 1
    if not momentum or not staleness:
        return ()
    # A gradient changes the weights again in each later batch, by m, m^2, ... of its first change with momentum m. The
    # sum of 1 + m + m^2 + ... is the number of updates that a gradient amounts to.
    repeats = f"{1 / (1 - momentum):.0f}"
    return (
        f"with momentum {momentum:g} an update affects {repeats} batches, but gradients are up to {staleness} batches "
        "old when they arrive: training may not converge; remove momentum, or use a learning_rate "
        f"{repeats} times smaller",
    )


class AsynchronousDetails(PlanDetails):
    """Plan details of an asynchronous pipeline, predicted with the devices' speeds in the scenario."""

    model_config = ConfigDict(extra="forbid")
    in_flight: int
    """Maximum number of batches in the pipeline."""
    bottleneck: float
    """Seconds per batch of the slowest stage or link."""
    slowest_stage: float
    """Seconds per batch of the slowest stage, without links."""
    least_bottleneck: float
    """The smallest bottleneck of any partition, in seconds per batch."""
    least_slowest_stage: float
    """The smallest bottleneck of any partition if links took no time, in seconds per batch."""
    divisible_limit: float
    """Slowdown of equal parts relative to optimal ones, for an infinitely divisible model."""
    stage_times: tuple[float, ...]
    """Seconds per batch of each stage."""


def pipeline_at_scenario_speeds(
    problem: PlanningProblem[AsynchronousOptions], names: Sequence[str]
) -> AsynchronousPipeline:
    """Return the pipeline over the devices ``names`` with their speeds in the scenario.

    The partitioner of a run does not know these speeds unless it measures them.
    """
    devices = [problem.device(name) for name in names]
    units = problem.model.units
    batch_size = problem.workload.batch_size
    capacities = relative_capacities(devices, units, batch_size)
    return pipeline_over(problem, names, capacities=capacities)
