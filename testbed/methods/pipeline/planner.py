"""Which device gets which units, for all devices at the start and for those left after a failure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from testbed.hardware import DeviceSpec
from testbed.kits.layers import costs
from testbed.kits.pipeline.arrangement import all_devices, devices_among, pieces
from testbed.method import Problem
from testbed.methods.pipeline.options import PipelineOptions
from testbed.partition import Cuts, SynchronousPipeline
from testbed.plan import Details, Piece, Plan
from testbed.schedule import SCHEDULES


@dataclass(frozen=True)
class LedPipeline(SynchronousPipeline):
    """A pipeline whose first stage also keeps the last checkpoint and gathers the next one."""

    checkpoint_bytes: float = 0.0

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes that units ``first`` up to but without ``last`` need as this stage."""
        return super().memory(stage, first, last) + (2 * self.checkpoint_bytes if stage == 0 else 0.0)


class PipelineDetails(Details):
    """What the plan of a synchronous pipeline tells."""

    model_config = ConfigDict(extra="forbid")
    schedule: str
    micro_batches: int
    """Of a batch."""
    partition: str
    """How the cuts were chosen."""
    bottleneck: float
    """Seconds that the slowest stage or link is busy for one micro-batch."""


def plan(method: str, problem: Problem[PipelineOptions]) -> Plan[PipelineDetails]:
    """Plan for all devices. Raises `InputError` for too many stages, missing links and too little memory."""
    options = problem.options
    pipeline, cuts = _cut(problem, all_devices(problem))
    return Plan(
        method=method,
        lead=problem.devices[0].name,
        pieces=pieces(pipeline, cuts),
        step_time=pipeline.step_time(cuts),
        details=PipelineDetails(
            schedule=options.schedule,
            micro_batches=options.pieces,
            partition=options.partition,
            bottleneck=pipeline.bottleneck(cuts),
        ),
    )


def stages_over(problem: Problem[PipelineOptions], there: Collection[str]) -> tuple[Piece, ...]:
    """Plan for the devices that are there; raises `InputError` where they are too few or too small."""
    return pieces(*_cut(problem, devices_among(problem, there)))


def _cut(problem: Problem[PipelineOptions], devices: Sequence[DeviceSpec]) -> tuple[LedPipeline, Cuts]:
    options, workload, units = problem.options, problem.workload, problem.model.units
    pipeline = LedPipeline(
        model=problem.model,
        devices=tuple(devices),
        links=problem.links,
        batch_size=workload.batch_size,
        micro_batches=options.pieces,
        schedule=SCHEDULES[options.schedule],
        momentum=workload.optimizer.momentum > 0,
        update_flops=costs.update_flops(workload.optimizer),
        recompute=options.recompute,
        checkpoint_bytes=costs.state_bytes(units, workload.optimizer),
    )
    return pipeline, pipeline.even() if options.partition == "even" else pipeline.least_step_time()
