"""What the methods that train asynchronously have in common: they differ in how they arrange devices."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from testbed.device import Device
from testbed.methods.asynchronous.figures import DECLARED
from testbed.methods.base import Job, Method, Problem
from testbed.methods.parts import arranging
from testbed.methods.parts.arranging import AsynchronousDetails, AsynchronousOptions, Homogeneous
from testbed.methods.parts.background import Background
from testbed.methods.parts.central import Central
from testbed.methods.parts.keeper import Keeper
from testbed.methods.parts.lead import Temper
from testbed.methods.parts.node import run_node
from testbed.methods.parts.outbox import Outbox
from testbed.plan import Plan

SpecificOptions = TypeVar("SpecificOptions", bound=AsynchronousOptions)


class AsynchronousMethod(Method[SpecificOptions, AsynchronousDetails]):
    """Asynchronous 1F1B with weight stashing, vertical sync and replication, arranged by what a subclass brings."""

    tasks = ("train",)
    Details = AsynchronousDetails
    declared = DECLARED

    @abstractmethod
    def arranger(self, problem: Problem[SpecificOptions]) -> Homogeneous:
        """Return what chooses the partitions."""

    def plan(self, problem: Problem[SpecificOptions]) -> Plan[AsynchronousDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return arranging.plan(self.name, problem, self.arranger(problem))

    async def program(self, device: Device, job: Job[SpecificOptions, AsynchronousDetails]) -> None:
        """Be the central node on the first device, a stage elsewhere."""
        problem, options = job.problem, job.problem.options
        patience, window = options.patience, options.return_window
        temper = Temper(patience, window, max(2 * patience, window))

        def keeper(background: Background, outbox: Outbox) -> Keeper:
            return Keeper(device, problem, job.plan.lead, background, outbox, options.asynchrony)

        def central(kept: Keeper, outbox: Outbox) -> Central:
            return Central(
                device, job, kept, outbox, temper, self.arranger(problem), options.asynchrony, options.evaluate_every
            )

        await run_node(device, job, keeper, central)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"profile", "load", "forward", "backward", "update", "replicate", "keep", "evaluate"})
