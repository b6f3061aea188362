"""Sequential layer mapping: the model's units in order over the devices, for inference."""

from __future__ import annotations

from testbed.device import Device
from testbed.methods.base import Job, Method, Problem
from testbed.methods.parts.lead import Temper
from testbed.methods.parts.node import run_stages
from testbed.methods.parts.server import Server
from testbed.methods.sequential.planner import SequentialDetails, SequentialOptions, plan, stages_over
from testbed.plan import Plan


class Sequential(Method[SequentialOptions, SequentialDetails]):
    """Each device computes its units and passes the result on; the outputs come back to the first device.

    With one request in flight its latency is that of the whole chain; with more the devices work on several at once
    ("layer pipelining"). Devices that die are dealt with as `testbed.methods.parts.lead` says; requests that
    got lost with them are sent again, and their latency counts from the first time.
    """

    name = "sequential"
    summary = "sequential layer mapping: inference through the devices in a row, several requests in flight"
    tasks = ("infer",)
    Options = SequentialOptions
    Details = SequentialDetails

    def plan(self, problem: Problem[SequentialOptions]) -> Plan[SequentialDetails]:
        """Cut the model over the devices. Raises `InputError` where that cannot be."""
        return plan(self.name, problem)

    async def program(self, device: Device, job: Job[SequentialOptions, SequentialDetails]) -> None:
        """Send requests on the first device, serve as a stage elsewhere."""
        problem, options = job.problem, job.problem.options
        temper = Temper(options.patience, options.return_window, options.return_window)
        await run_stages(
            device,
            job,
            None,
            lambda worker, outbox: Server(
                device, job, worker, outbox, temper, lambda there: stages_over(problem, there), options.in_flight
            ),
        )

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of a stage; a device that the plan leaves out becomes one after a recovery at most."""
        return frozenset({"load", "forward"})
