"""Fully distributed inference (Stahl et al.): every layer divided over the devices, for inference."""

from __future__ import annotations

from typing import Any

from testbed.device import Device
from testbed.methods.base import Alternative, Job, Method, Problem
from testbed.methods.distributed.figures import DECLARED
from testbed.methods.distributed.member import SPAN, Member
from testbed.methods.distributed.options import DistributedOptions
from testbed.methods.distributed.partition.distributed_plan import DistributedPlan
from testbed.methods.distributed.partition.storage import operations_stored
from testbed.methods.distributed.planner import DistributedDetails, alternatives, distributed, flow_of, over, plan
from testbed.methods.parts.background import Background
from testbed.methods.parts.lead import Temper
from testbed.methods.parts.node import run_node
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.server import Server
from testbed.methods.parts.shard import State
from testbed.methods.parts.worker import Worker
from testbed.plan import Piece, Plan
from testbed.wire import Message


class Distributed(Method[DistributedOptions, DistributedDetails]):
    """The source spreads an image, workers exchange what the schemes need, the source has the result.

    A device holds the weights of its own parts and no others. Devices that die are dealt with as
    `testbed.methods.parts.lead` says, the layers being divided anew over those that are left.
    """

    name = "distributed"
    summary = "fully distributed inference: layers divided by output (LOP), input (LIP), in fused pairs or tiles"
    tasks = ("infer",)
    Options = DistributedOptions
    Details = DistributedDetails
    declared = DECLARED

    def plan(self, problem: Problem[DistributedOptions]) -> Plan[DistributedDetails]:
        """Divide every layer. Raises `InputError` where that cannot be."""
        return plan(self.name, problem)

    def alternatives(self, problem: Problem[DistributedOptions]) -> tuple[Alternative, ...]:
        """Return every scheme over the same devices."""
        return alternatives(problem)

    async def program(self, device: Device, job: Job[DistributedOptions, DistributedDetails]) -> None:
        """Send requests on the source, take part in them everywhere."""
        problem = job.problem
        options = problem.options

        def make_worker(background: Background, outbox: Outbox) -> Worker:
            return Participant(device, problem, job.plan.lead, background, outbox)

        temper = Temper(options.patience, options.return_window, options.return_window)

        def make_lead(worker: Worker, outbox: Outbox) -> SourceLead:
            return SourceLead(
                device,
                job,
                worker,
                outbox,
                temper,
                lambda there: over(problem, there),
                options.in_flight,
                options.on_loss == "fail",
            )

        await run_node(device, job, make_worker, make_lead)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a member; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"load", SPAN})


class Participant(Worker):
    """A worker that is a member, whatever it is told to do."""

    _problem: Problem[DistributedOptions]

    def _duty(self, message: Message) -> Member:
        decided = DistributedPlan.model_validate(message["plan"])
        flow = flow_of(self._problem, decided)
        return Member(self._device, self._problem, flow, message["configuration"], self)


class SourceLead(Server):
    """The lead of members instead of stages."""

    job: Job[DistributedOptions, DistributedDetails]

    def orders(self) -> dict[str, Any]:
        """Return the plan that all members follow."""
        return {"plan": self._decided().model_dump(mode="json")}

    def state_of(self, part: Piece) -> State:
        """Return a member's slices of the weights that were given; nothing where it is to draw them from the seed."""
        from testbed.models.sliced import cut

        state = self.checkpoint.state
        if state is None:
            return {}
        decided = self._decided()
        held = operations_stored(flow_of(self.job.problem, decided), decided.devices.index(part.device))
        # Copies, so that the whole may go.
        return {name: tensor.clone() for one in held for name, tensor in cut(*one, state).items()}

    def backlog(self, part: Piece) -> float:
        """Return how many bytes a member may be sending: its share of the activations of the requests in flight."""
        return part.memory

    def _decided(self) -> DistributedPlan:
        there = {part.device for part in self.layout}
        if there == set(self.job.plan.devices):
            return self.job.plan.details.distributed
        return distributed(self.job.problem, there)
