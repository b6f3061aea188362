"""Synchronous pipeline training, by any schedule that keeps all micro-batches of a step on the same weights."""

from __future__ import annotations

from testbed.device import Device
from testbed.methods.base import Job, Method, Problem
from testbed.methods.parts.lead import Temper
from testbed.methods.parts.node import run_stages
from testbed.methods.parts.stage import Routine
from testbed.methods.pipeline.options import PipelineOptions
from testbed.methods.pipeline.planner import PipelineDetails, plan, stages_over
from testbed.methods.pipeline.training import Trainer
from testbed.plan import Plan
from testbed.schedule import SCHEDULES, grid


class Pipeline(Method[PipelineOptions, PipelineDetails]):
    """Model parallelism, GPipe and 1F1B: the update is that of the whole batch, whatever the schedule and the cuts.

    A batch is cut into micro-batches whose gradients add up to the batch's, so weights equal the undivided model's
    to round-off; batch normalisation alone sees micro-batches, as in GPipe, and so differs. Stages that die, come back
    or stay away are dealt with as `testbed.methods.parts.lead` says.
    """

    name = "pipeline"
    summary = "synchronous pipeline training: model parallelism, GPipe or 1F1B, with recovery from checkpoints"
    tasks = ("train",)
    Options = PipelineOptions
    Details = PipelineDetails

    def plan(self, problem: Problem[PipelineOptions]) -> Plan[PipelineDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return plan(self.name, problem)

    async def program(self, device: Device, job: Job[PipelineOptions, PipelineDetails]) -> None:
        """Lead on the first device, serve as a stage elsewhere."""
        problem, options = job.problem, job.problem.options
        routine = Routine(SCHEDULES[options.schedule], options.checkpoint_every, options.recompute)
        temper = Temper(options.patience, options.return_window, options.return_window)

        await run_stages(
            device,
            job,
            routine,
            lambda worker, outbox: Trainer(
                device, job, worker, outbox, temper, lambda there: stages_over(problem, there), routine
            ),
        )

    def draw(self, plan: Plan[PipelineDetails]) -> str | None:
        """Draw a step as a grid, a row a stage and a column a slot."""
        if len(plan.pieces) < 2:
            return None
        return grid(SCHEDULES[plan.details.schedule], len(plan.pieces), plan.details.micro_batches)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"load", "forward", "backward", "update", "checkpoint", "evaluate"})
