"""Which device gets which units, for all devices at the start and for those left after a failure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from testbed.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.methods.base import Assignment, Plan, Problem
from testbed.methods.parts import costs
from testbed.methods.pipeline.options import PipelineOptions
from testbed.partition.cuts import Cuts
from testbed.partition.pipeline import Pipeline
from testbed.schedule import SCHEDULES


@dataclass(frozen=True)
class LedPipeline(Pipeline):
    """A pipeline whose first stage also keeps the last checkpoint and gathers the next one."""

    checkpoint_bytes: float = 0.0

    def memory(self, stage: int, first: int, last: int) -> float:
        """Return the bytes that units ``first`` up to but without ``last`` need as this stage."""
        return super().memory(stage, first, last) + (2 * self.checkpoint_bytes if stage == 0 else 0.0)


def plan(method: str, problem: Problem) -> Plan:
    """Plan for all devices. Raises `InputError` for too many stages, missing links and too little memory."""
    options = _options(problem)
    count = len(problem.devices) if options.stages is None else options.stages
    if count > len(problem.devices):
        raise InputError(f"method.stages: {count} stages need {count} devices, there are {len(problem.devices)}")
    _check_links(problem)
    pipeline, cuts = _cut(problem, problem.devices[:count])
    return Plan(
        method=method,
        lead=problem.devices[0].name,
        assignments=_assignments(pipeline, cuts),
        step_time=pipeline.step_time(cuts),
        details={
            "schedule": options.schedule,
            "micro_batches": options.pieces,
            "partition": options.partition,
            "bottleneck": pipeline.bottleneck(cuts),
        },
    )


def stages_over(problem: Problem, there: Collection[str]) -> tuple[Assignment, ...]:
    """Plan for the devices that are there; raises `InputError` where they are too few or too small."""
    devices = [device for device in problem.devices if device.name in there]
    count = min(_options(problem).stages or len(devices), len(devices), len(problem.model.units))
    return _assignments(*_cut(problem, devices[:count]))


def _options(problem: Problem) -> PipelineOptions:
    assert isinstance(problem.options, PipelineOptions)
    return problem.options


def _check_links(problem: Problem) -> None:
    """Refuse devices that the first one cannot talk to: it tells them what to do and gathers their weights."""
    lead, *others = (device.name for device in problem.devices)
    for other in others:
        if (lead, other) not in problem.links or (other, lead) not in problem.links:
            raise InputError(
                f"the pipeline needs links between {lead}, which keeps the checkpoints, and every other device, but "
                f"there is none between {lead} and {other}: use topology mesh or add the link"
            )


def _cut(problem: Problem, devices: Collection[DeviceSpec]) -> tuple[LedPipeline, Cuts]:
    options, workload, units = _options(problem), problem.workload, problem.model.units
    pipeline = LedPipeline(
        units=units,
        devices=tuple(devices),
        links=problem.links,
        batch_size=workload.batch_size,
        micro_batches=options.pieces,
        schedule=SCHEDULES[options.schedule],
        momentum=workload.optimizer.momentum > 0,
        update_flops=costs.update_flops(workload.optimizer),
        checkpoint_bytes=costs.state_bytes(units, workload.optimizer),
    )
    return pipeline, pipeline.even() if options.partition == "even" else pipeline.least_step_time()


def _assignments(pipeline: LedPipeline, cuts: Cuts) -> tuple[Assignment, ...]:
    return tuple(
        Assignment(device=device.name, first=first, last=last, memory=pipeline.memory(stage, first, last))
        for stage, (device, (first, last)) in enumerate(zip(pipeline.devices, pairwise(cuts), strict=True))
    )
