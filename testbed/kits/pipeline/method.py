"""What the methods that train in a pipeline have in common: they differ in options, schedule and partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeVar

from testbed.device import Device
from testbed.kits.pipeline import partitioners, planning
from testbed.kits.pipeline.figures import DECLARED
from testbed.kits.pipeline.partitioners import AsynchronousDetails, AsynchronousOptions, Partitioner
from testbed.kits.pipeline.planning import PipelineDetails, SynchronousOptions
from testbed.method import Job, Method, Problem
from testbed.plan import Plan
from testbed.schedule import SCHEDULES, Action, asynchronous_1f1b, grid

SpecificOptions = TypeVar("SpecificOptions", bound=AsynchronousOptions)


class SynchronousMethod(Method[SynchronousOptions, PipelineDetails]):
    """One update a step, with the gradient of the whole batch, and recovery from checkpoints."""

    tasks = ("train",)
    Options = SynchronousOptions
    timing_only = True
    takes_weights = True
    precisions = True
    judges = True
    replans = True
    Details = PipelineDetails

    def plan(self, problem: Problem[SynchronousOptions]) -> Plan[PipelineDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return planning.plan(self.name, problem)

    def samples_at_once(self, problem: Problem[SynchronousOptions]) -> int:
        """Return the size of the smallest micro-batch."""
        return max(1, problem.workload.batch_size // problem.options.micro_batch_count)

    async def program(self, device: Device, job: Job[SynchronousOptions, PipelineDetails]) -> None:
        """Train on the first device; be a stage there and elsewhere."""
        from testbed.kits.pipeline.program import run_synchronous

        schedule = SCHEDULES[job.problem.options.schedule]
        await run_synchronous(device, job, schedule, partial(planning.stages_over, job.problem))

    def draw(self, plan: Plan[PipelineDetails]) -> str | None:
        """Draw a step as a grid, a row a stage and a column a slot."""
        if len(plan.pieces) < 2:
            return None
        return grid(SCHEDULES[plan.details.schedule], len(plan.pieces), plan.details.micro_batches)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"load", "forward", "backward", "update", "checkpoint", "evaluate"})


class AsynchronousMethod(Method[SpecificOptions, AsynchronousDetails]):
    """Asynchronous 1F1B with weight stashing, vertical sync and replication, and recovery from replicas."""

    tasks = ("train",)
    timing_only = True
    takes_weights = True
    precisions = True
    judges = True
    refuses: ClassVar[Mapping[str, str]] = {"clip.norm": "each update would wait for all stages, which value does not"}
    replans = True
    Details = AsynchronousDetails
    declared = DECLARED
    Partitioner: ClassVar[type[Partitioner[Any]]]
    """What chooses the partitions."""

    def plan(self, problem: Problem[SpecificOptions]) -> Plan[AsynchronousDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return partitioners.plan(self.name, problem, self.Partitioner(problem))

    async def program(self, device: Device, job: Job[SpecificOptions, AsynchronousDetails]) -> None:
        """Coordinate on the first device; be a stage, and keep replicas, there and elsewhere."""
        from testbed.kits.pipeline.program import run_asynchronous

        await run_asynchronous(device, job, self.Partitioner(job.problem))

    def advice(self, problem: Problem[SpecificOptions], plan: Plan[AsynchronousDetails]) -> tuple[str, ...]:
        """Return what momentum does to gradients that are some batches old."""
        return partitioners.momentum_advice(problem, plan.details.in_flight)

    def draw(self, plan: Plan[AsynchronousDetails]) -> str | None:
        """Draw the first batches as a grid, a row a stage and a column a slot; updates take none."""
        stages = len(plan.pieces)
        if stages < 2:
            return None

        def schedule(stages: int, stage: int, batches: int) -> Iterator[Action]:
            return asynchronous_1f1b(stages, stage, batches, plan.details.in_flight)

        return grid(schedule, stages, 2 * stages)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"profile", "load", "forward", "backward", "update", "replicate", "keep", "evaluate"})
