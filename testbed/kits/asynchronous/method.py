"""What the methods that train asynchronously have in common: they differ in how they partition the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from testbed.device import Device
from testbed.kits.asynchronous import partitioners
from testbed.kits.asynchronous.figures import DECLARED
from testbed.kits.asynchronous.messages import KINDS, Prepare
from testbed.kits.asynchronous.partitioners import (
    AsynchronousDetails,
    AsynchronousOptions,
    HomogeneousPartitioner,
)
from testbed.kits.asynchronous.preparation import Preparation
from testbed.kits.asynchronous.recovery import FromReplicas
from testbed.kits.asynchronous.store import ReplicaStore
from testbed.kits.asynchronous.trainer import AsynchronousTrainer
from testbed.kits.asynchronous.updates import AsynchronousUpdates
from testbed.kits.layers.feed import Training
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import Status
from testbed.kits.messaging.recovery import persist
from testbed.kits.messaging.roles import RoleHolder
from testbed.kits.pipeline.stage import Stage, StagePosition
from testbed.kits.pipeline.stages import supervise_stages
from testbed.method import Job, Method, Problem
from testbed.plan import Plan
from testbed.schedule import Action, asynchronous_1f1b, grid

SpecificOptions = TypeVar("SpecificOptions", bound=AsynchronousOptions)


class AsynchronousMethod(Method[SpecificOptions, AsynchronousDetails]):
    """Asynchronous 1F1B with weight stashing, vertical sync and replication, partitioned as a subclass says."""

    tasks = ("train",)
    timing_only = True
    replans = True
    takes_weights = True
    Details = AsynchronousDetails
    declared = DECLARED

    @abstractmethod
    def partitioner(self, problem: Problem[SpecificOptions]) -> HomogeneousPartitioner:
        """Return what chooses the partitions."""

    def plan(self, problem: Problem[SpecificOptions]) -> Plan[AsynchronousDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return partitioners.plan(self.name, problem, self.partitioner(problem))

    async def program(self, device: Device, job: Job[SpecificOptions, AsynchronousDetails]) -> None:
        """Coordinate on the first device; be a stage, and keep replicas, there and elsewhere."""
        problem, coordinator, options = job.problem, job.plan.lead, job.problem.options

        def stage_of(prepare: Prepare) -> Stage:
            stage = Stage(mailbox, problem, StagePosition.told(device.name, coordinator, prepare))
            stage.train = AsynchronousUpdates(stage, options.asynchrony, store).train
            return stage

        def with_replicas(status: Status) -> Status:
            computing = status.computing or mailbox.sends.waiting()
            return replace(status, computing=computing, held=store.replicas.inventory())

        async with Mailbox(device, problem.links, KINDS) as mailbox:
            store = ReplicaStore(mailbox)
            holder = RoleHolder(mailbox, coordinator, with_replicas)
            Preparation(mailbox, holder, store, coordinator, stage_of)
            if device.name != coordinator:
                await holder.serve()
            assert job.dataset is not None
            standstill = max(2 * options.patience, options.return_window)
            supervisor = supervise_stages(mailbox, holder.presence, problem, standstill)
            partitioner = self.partitioner(problem)
            steps = Training(job.dataset, problem.workload, problem.seed).steps
            recovery = FromReplicas(supervisor, holder.presence, store, partitioner, job, steps)
            device.expose(recovery.points.weights)
            await recovery.begin()
            trainer = AsynchronousTrainer(supervisor, recovery, partitioner, problem, job.dataset)
            await persist(trainer, recovery, supervisor, recovery.recovering)

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
