"""Which device becomes which stage, at the start and after a failure: options and planners, with nothing that runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import ConfigDict, Field

from testbed.common.errors import InputError
from testbed.common.quantities import Duration
from testbed.hardware import DeviceSpec
from testbed.kits.layers import costs
from testbed.kits.messaging.transfer import CrossingPart, share
from testbed.method import Options, Problem, StepsOrTime
from testbed.partition import Chain, Cuts, SynchronousPipeline
from testbed.plan import Details, Piece, Plan
from testbed.schedule import SCHEDULES

MICRO_BATCHES = {"model-parallelism": 1, "gpipe": 4, "1f1b": 4}
"""What ``micro_batches`` is where it is not given."""


class StagesOptions(Options):
    """Options of every method that has its devices in a row."""

    stages: int | None = Field(
        None, ge=1, description="use only the first N devices; the others stand by; default: all"
    )
    patience: Duration = Field(
        2.0,
        gt=0,
        description="without progress before devices are polled, and without a reply before they count as lost",
    )
    return_window: Duration = Field(15.0, description="how long a lost device may take to come back")
    transfer: CrossingPart = Field(CrossingPart(), description="how what crosses between stages travels")

    @property
    def shares(self) -> tuple[float, float]:
        """Bytes that travel for each byte of activations and of their gradients."""
        return share(self.transfer.activations), share(self.transfer.gradients)


class SynchronousOptions(StagesOptions):
    """Options of every pipeline whose micro-batches of a step all meet the same weights."""

    schedule: Literal["model-parallelism", "gpipe", "1f1b"] = "1f1b"
    micro_batches: int | None = Field(None, ge=1, description="of a batch; 4, or 1 for model-parallelism")
    partition: Literal["even", "optimal"] = Field(
        "optimal", description="even: by number of units; optimal: least predicted time of a step"
    )
    recompute: bool = Field(
        False,
        description="all stages but the last keep no activations and compute them again before backward, as in GPipe",
    )
    checkpoint_every: int = Field(20, ge=1, description="steps after which the first device gathers all weights")
    evaluate_every: StepsOrTime | None = Field(None, description="steps, or a time; default: at the end only")

    @property
    def micro_batch_count(self) -> int:
        """Micro-batches of a batch."""
        return self.micro_batches or MICRO_BATCHES[self.schedule]

    def checkpoints(self, step: int, steps: int) -> bool:
        """Return whether the state after ``step`` of ``steps`` is kept: the last one is in any case."""
        return step % self.checkpoint_every == 0 or step == steps


@dataclass(frozen=True)
class CheckpointedPipeline(SynchronousPipeline):
    """A pipeline whose first stage also keeps the last checkpoint and gathers the next one."""

    checkpoint_bytes: float = 0.0

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes that units ``first`` up to but without ``last`` need as this stage."""
        return super().memory(stage, first, last) + (2 * self.checkpoint_bytes if stage == 0 else 0.0)


class PipelineDetails(Details):
    """What the plan of a synchronous pipeline shows."""

    model_config = ConfigDict(extra="forbid")
    schedule: str
    micro_batches: int
    """Micro-batches of a batch."""
    partition: str
    """How the cuts were chosen."""
    bottleneck: float
    """Seconds that the slowest stage or link is busy for one micro-batch."""


def plan(method: str, problem: Problem[SynchronousOptions]) -> Plan[PipelineDetails]:
    """Plan for all devices. Raises `InputError` for too many stages, missing links and too little memory."""
    options = problem.options
    pipeline, cuts = _cut(problem, all_devices(problem))
    return Plan(
        method=method,
        lead=problem.devices[0].name,
        pieces=stage_pieces(pipeline, cuts),
        step_time=pipeline.step_time(cuts),
        details=PipelineDetails(
            schedule=options.schedule,
            micro_batches=options.micro_batch_count,
            partition=options.partition,
            bottleneck=pipeline.bottleneck(cuts),
        ),
    )


def stages_over(problem: Problem[SynchronousOptions], there: Collection[str]) -> tuple[Piece, ...]:
    """Plan for the devices that are there. Raises `InputError` where they are too few or too small."""
    return stage_pieces(*_cut(problem, devices_among(problem, there)))


def _cut(problem: Problem[SynchronousOptions], devices: Sequence[DeviceSpec]) -> tuple[CheckpointedPipeline, Cuts]:
    options, workload, units = problem.options, problem.workload, problem.model.units
    pipeline = CheckpointedPipeline(
        model=problem.model,
        devices=tuple(devices),
        links=problem.links,
        shares=options.shares,
        batch_size=workload.batch_size,
        micro_batches=options.micro_batch_count,
        schedule=SCHEDULES[options.schedule],
        state_values=problem.training.state_values,
        update_flops=problem.training.update_flops,
        recompute=options.recompute,
        checkpoint_bytes=costs.state_bytes(units, problem.training),
    )
    return pipeline, pipeline.even() if options.partition == "even" else pipeline.least_step_time()


def all_devices(problem: Problem[StagesOptions]) -> tuple[DeviceSpec, ...]:
    """Return the devices to begin with.

    Raises `InputError` for more stages than devices, and for devices that the first one cannot talk to: it sends them
    what to do and receives how they are.
    """
    count = problem.options.stages or len(problem.devices)
    if count > len(problem.devices):
        raise InputError(f"{count} stages need {count} devices, there are {len(problem.devices)}", ("method", "stages"))
    lead, *others = (device.name for device in problem.devices)
    for other in others:
        if (lead, other) not in problem.links or (other, lead) not in problem.links:
            raise InputError(
                f"{lead} leads the others and needs a link to each and back, but there is none between {lead} and "
                f"{other}: use the topology mesh or add the link",
                ("network", "topology"),
            )
    return problem.devices[:count]


def devices_among(problem: Problem[StagesOptions], there: Collection[str]) -> tuple[DeviceSpec, ...]:
    """Return the devices to go on with, of those that are there, in the scenario's order."""
    devices = [device for device in problem.devices if device.name in there]
    return tuple(devices[: min(problem.options.stages or len(devices), len(problem.model.units))])


def stage_pieces(chain: Chain, cuts: Cuts) -> tuple[Piece, ...]:
    """Return the stages that the cuts make, with the memory that each needs."""
    return tuple(
        Piece(device=device.name, first=first, last=last, memory=chain.memory(stage, first, last))
        for stage, (device, (first, last)) in enumerate(zip(chain.devices, pairwise(cuts), strict=True))
    )
