"""Sequential layer mapping: the model's units in order over the devices, for inference."""

from __future__ import annotations

from functools import partial

from testbed.device import Device
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.membership import MEMBERSHIP_KINDS
from testbed.kits.messaging.recovery import persist
from testbed.kits.messaging.roles import RoleHolder
from testbed.kits.pipeline.serving import Serving
from testbed.kits.pipeline.stage import STAGE_KINDS, Configure, Stage, StagePosition
from testbed.kits.pipeline.stages import recover_stages, supervise_stages
from testbed.method import Job, Method, Problem
from testbed.methods.sequential.planner import SequentialDetails, SequentialOptions, plan, stages_over
from testbed.plan import Plan


class Sequential(Method[SequentialOptions, SequentialDetails]):
    """Each device computes its units and passes the result on; the outputs come back to the first device.

    With one request in flight its latency is that of the whole chain; with more the devices work on several at once
    ("layer pipelining"). Devices that die are dealt with as `testbed.kits.pipeline.checkpointing` says; requests that
    got lost with them are sent again, and their latency counts from the first time.
    """

    name = "sequential"
    summary = "sequential layer mapping: inference through the devices in a row, several requests in flight"
    tasks = ("infer",)
    Options = SequentialOptions
    timing_only = True
    replans = True
    takes_weights = True
    Details = SequentialDetails

    def plan(self, problem: Problem[SequentialOptions]) -> Plan[SequentialDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return plan(self.name, problem)

    async def program(self, device: Device, job: Job[SequentialOptions, SequentialDetails]) -> None:
        """Send requests on the first device; be a stage there and elsewhere."""
        problem, coordinator, options = job.problem, job.plan.lead, job.problem.options

        def stage_of(configure: Configure) -> Stage:
            position = StagePosition.told(device.name, coordinator, configure)
            return Stage(mailbox, problem, position, configure.state if configure.given else None)

        async with Mailbox(device, problem.links, (*MEMBERSHIP_KINDS, *STAGE_KINDS)) as mailbox:
            holder = RoleHolder(mailbox, coordinator)
            holder.follow(Configure, stage_of)
            if device.name != coordinator:
                await holder.serve()
            supervisor = supervise_stages(mailbox, holder.presence, problem)
            recovery = recover_stages(supervisor, job, 0, partial(stages_over, problem))
            await persist(Serving(supervisor, job, options.in_flight), recovery, supervisor)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"load", "forward"})
