"""The program of one device under a lead, whichever role it has."""

from __future__ import annotations

from collections.abc import Callable

from testbed.device import Device
from testbed.methods.base import Job
from testbed.methods.parts.background import Background
from testbed.methods.parts.lead import Lead
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.worker import MakeDuty, Worker
from testbed.wire import Message

MakeLead = Callable[[Worker, Outbox], Lead]


async def run_node(device: Device, job: Job, make_duty: MakeDuty, make_lead: MakeLead) -> None:
    """Run the lead on the plan's lead, till all work is done; elsewhere a worker, till it is stopped."""
    background = Background()
    handle: Callable[[Message], None]
    outbox = Outbox(device, job.problem.links, background, lambda message: handle(message))
    worker = Worker(device, job.plan.lead, background, outbox, make_duty)

    async def listen() -> None:
        while True:
            handle(await device.receive())

    if device.name == job.plan.lead:
        lead = make_lead(worker, outbox)
        handle = lead.handle
        background.start(listen())
        await background.run(lead.run())
    else:
        handle = worker.handle
        worker.greet()
        await background.run(listen())
