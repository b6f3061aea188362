"""Synchronous pipeline training, by any schedule that keeps all micro-batches of a step on the same weights."""

from __future__ import annotations

from functools import partial

from testbed.device import Device
from testbed.kits.layers.feed import Requests, Training
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import MEMBERSHIP_KINDS
from testbed.kits.messaging.recovery import persist
from testbed.kits.messaging.roles import RoleHolder
from testbed.kits.pipeline.stage import Configure, Stage, StagePosition
from testbed.kits.pipeline.stages import recover_stages, supervise_stages
from testbed.method import Job, Method, Problem
from testbed.methods.pipeline.options import PipelineOptions
from testbed.methods.pipeline.planner import PipelineDetails, plan, stages_over
from testbed.methods.pipeline.trainer import Trainer
from testbed.methods.pipeline.updates import TRAINING_KINDS, Routine, SynchronousUpdates
from testbed.plan import Plan
from testbed.schedule import SCHEDULES, grid


class Pipeline(Method[PipelineOptions, PipelineDetails]):
    """Model parallelism, GPipe and 1F1B: the update is that of the whole batch, whatever the schedule and the cuts.

    A batch is cut into micro-batches whose gradients add up to the batch's, so weights equal the undivided model's
    to round-off; batch normalisation alone sees micro-batches, as in GPipe, and so differs. Stages that die, come back
    or stay away are dealt with as `testbed.kits.pipeline.checkpointing` says.
    """

    name = "pipeline"
    summary = "synchronous pipeline training: model parallelism, GPipe or 1F1B, with recovery from checkpoints"
    tasks = ("train",)
    Options = PipelineOptions
    timing_only = True
    replans = True
    takes_weights = True
    Details = PipelineDetails

    def plan(self, problem: Problem[PipelineOptions]) -> Plan[PipelineDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return plan(self.name, problem)

    def samples_at_once(self, problem: Problem[PipelineOptions]) -> int:
        """Return the size of the smallest micro-batch."""
        return max(1, problem.workload.batch_size // problem.options.pieces)

    async def program(self, device: Device, job: Job[PipelineOptions, PipelineDetails]) -> None:
        """Coordinate on the first device; be a stage there and elsewhere."""
        problem, coordinator, options = job.problem, job.plan.lead, job.problem.options
        routine = Routine(
            SCHEDULES[options.schedule],
            options.pieces,
            options.checkpoint_every,
            options.evaluate_every,
            options.recompute,
        )

        def stage_of(configure: Configure) -> Stage:
            position = StagePosition.told(device.name, coordinator, configure)
            stage = Stage(mailbox, problem, position, configure.state if configure.given else None)
            stage.train = SynchronousUpdates(stage, routine).train
            return stage

        async with Mailbox(device, problem.links, (*MEMBERSHIP_KINDS, *TRAINING_KINDS)) as mailbox:
            holder = RoleHolder(mailbox, coordinator)
            holder.follow(Configure, stage_of)
            if device.name != coordinator:
                await holder.serve()
            assert job.dataset is not None
            training = Training(job.dataset, problem.workload, problem.seed)
            tests = Requests(job.dataset, problem.workload.batch_size)
            supervisor = supervise_stages(mailbox, holder.presence, problem)
            recovery = recover_stages(supervisor, job, training.steps, partial(stages_over, problem))
            await persist(Trainer(supervisor, recovery, training, tests, routine), recovery, supervisor)

    def draw(self, plan: Plan[PipelineDetails]) -> str | None:
        """Draw a step as a grid, a row a stage and a column a slot."""
        if len(plan.pieces) < 2:
            return None
        return grid(SCHEDULES[plan.details.schedule], len(plan.pieces), plan.details.micro_batches)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"load", "forward", "backward", "update", "checkpoint", "evaluate"})
