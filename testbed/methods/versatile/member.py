"""One device of VersatileFL: EdgePipe's member with other policies, whose neurons may change between slots."""

from __future__ import annotations

from contextlib import aclosing

from testbed.data.batches import steps_per_epoch
from testbed.device import Device
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.exchange import CastExchange
from testbed.kits.slots.member import Member, recovery
from testbed.kits.slots.neurons import Neurons
from testbed.kits.slots.planner import answering_time, neuron_values, timetable_of
from testbed.method import Job
from testbed.methods.versatile.confirming import Confirming, Ideal
from testbed.methods.versatile.course import Course
from testbed.methods.versatile.credibility import Reception
from testbed.methods.versatile.decisions import Setting
from testbed.methods.versatile.handover import Handover
from testbed.methods.versatile.knowledge import Knowledge, Telling
from testbed.methods.versatile.maintenance import Maintenance
from testbed.methods.versatile.messages import KINDS
from testbed.methods.versatile.planner import VersatileDetails, VersatileOptions, arrangement
from testbed.methods.versatile.windows import Windows
from testbed.wire.message import Message

VersatileJob = Job[VersatileOptions, VersatileDetails]
STARTED = "started"
"""What a device keeps on its disk, to know when it boots that it was there before."""


async def run(device: Device, job: VersatileJob) -> None:
    """Train and test, slot by slot; a device that has booted waits until the others have given it neurons."""
    problem, details = job.problem, job.plan.details
    assert job.dataset is not None
    first = arrangement(problem, details)
    booted = device.saved(STARTED) is not None and problem.options.rearrangement
    await device.save(STARTED, Message(STARTED))
    knowledge, reception = Knowledge(device.name, len(first.sizes)), Reception()
    maintenance = Maintenance(problem.options, knowledge)
    table = timetable_of(details)
    async with Mailbox(device, problem.links, KINDS) as mailbox:
        telling = Telling(knowledge, reception)
        transmit = recovery(mailbox, job)
        if problem.options.sharing == "ideal":
            transmit = Ideal(mailbox, transmit, knowledge.layers - 1)
        exchange = CastExchange(mailbox, knowledge, transmit, table.staleness(1), neuron_values(problem), telling)
        by_layer = (problem.options.sharing == "layer", problem.options.backward == "layer")
        confirming = Confirming(mailbox, knowledge, answering_time(problem, device.name), *by_layer)
        missing = maintenance.missing(confirming if any(by_layer) else None)
        neurons = Neurons(device, problem, {}, missing.learn)
        handover = Handover(mailbox, knowledge, neurons, maintenance, first)
        if not booted:
            handover.apply(first)
        epoch = steps_per_epoch(len(job.dataset.train_labels), problem.workload.batch_size)
        steps = details.window or max(epoch, details.grace + 1)
        ratios = {pair: 1 - link.message_loss for pair, link in problem.links.items()}
        windows = Windows(knowledge, reception, ratios, problem.options.alpha, steps, details.grace)
        names = tuple(each.name for each in problem.devices)
        setting = Setting(details.threshold, job.plan.lead, problem.seed, names, steps * table.period * details.slot)
        course = Course(mailbox, knowledge, windows, handover, setting)
        member = Member(device, job, knowledge, exchange, neurons, missing)
        reported = 0
        while (group := await course.enter()) is not None:
            async with aclosing(member.slots(group, table)) as work:
                async for segment, action in work:
                    step = None if segment.tests or action is None else action.batch
                    if not segment.tests and (step is None or step // steps > reported):
                        reported = segment.batches.stop // steps if step is None else step // steps
                        maintenance.report(device, segment.trained if step is None else step)
                    if problem.options.rearrangement and course.attend(step):
                        break
                    await member.work(segment, action)
                else:
                    return
