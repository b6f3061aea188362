"""The program of one device under a lead, whichever role it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from testbed.device import Device
from testbed.methods.base import Job
from testbed.methods.parts.background import Background
from testbed.methods.parts.former_stage import Routine
from testbed.methods.parts.lead import Lead
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.worker import StageWorker, Worker
from testbed.wire import Message

W = TypeVar("W", bound=Worker)
MakeWorker = Callable[[Background, Outbox], W]
MakeLead = Callable[[W, Outbox], Lead]


async def run_stages(device: Device, job: Job, routine: Routine | None, make_lead: MakeLead[Worker]) -> None:
    """Run a device whose stages do as the routine says."""

    def make_worker(background: Background, outbox: Outbox) -> Worker:
        return StageWorker(device, job.problem, job.plan.lead, background, outbox, routine)

    await run_node(device, job, make_worker, make_lead)


async def run_node(device: Device, job: Job, make_worker: MakeWorker[W], make_lead: MakeLead[W]) -> None:
    """Run the lead on the plan's lead, till all work is done; elsewhere a worker, till it is stopped."""
    background = Background()
    handle: Callable[[Message], None]
    outbox = Outbox(device, job.problem.links, background, lambda message: handle(message))
    worker = make_worker(background, outbox)

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
