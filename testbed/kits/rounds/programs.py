"""The programs of the family, put together from their parts."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.device import Device
from testbed.kits.layers.feed import Requests
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.rounds.layers import Layers
from testbed.kits.rounds.messages import KINDS
from testbed.kits.rounds.options import RoundOptions
from testbed.kits.rounds.participant import Alone, Participant, WithServer
from testbed.kits.rounds.planner import CollaborativeDetails, Team
from testbed.kits.rounds.rounds import Rounds, Terms
from testbed.kits.rounds.server import GlobalModel, Server, ServerSide
from testbed.kits.rounds.share import Share
from testbed.method import Job

LATE = 3.0
"""How many times what a round should take it may take by default."""

FamilyJob = Job[RoundOptions, CollaborativeDetails]


@dataclass(frozen=True)
class Style:
    """How the methods of the family differ once there is a plan."""

    split: bool
    """Whether the server trains layers of its own; else each device trains the whole model."""
    in_turn: bool = False
    """Whether one device trains after the other, with one copy of the server's layers for all."""
    fraction: float = 1.0
    """Of the devices that take part in a round."""
    min_devices: int = 1
    """Updates that a round needs."""


async def run(device: Device, job: FamilyJob, style: Style) -> None:
    """Be the server on the plan's lead, train when it says so elsewhere."""
    async with Mailbox(device, job.problem.links, KINDS) as mailbox:
        if device.name == job.plan.lead:
            await _serve(mailbox, job, style)
        else:
            await _participate(mailbox, job, style)


async def _serve(mailbox: Mailbox, job: FamilyJob, style: Style) -> None:
    problem, portions = job.problem, job.plan.details.portions
    assert job.dataset is not None
    device, options, depth = mailbox.device, problem.options, len(problem.model.units)
    model = GlobalModel(device, Layers(device, problem, 0, depth), job.weights)
    splits = {name: portion.split for name, portion in portions.items()}
    side = None
    if style.split:
        shared = {first: Layers(device, problem, first, depth) for first in splits.values()} if style.in_turn else {}
        copies = {name: shared.get(first) or Layers(device, problem, first, depth) for name, first in splits.items()}
        side = ServerSide(mailbox, {name: portion.choice for name, portion in portions.items()}, copies)
    deadline = options.round_deadline or LATE * max(portion.round_time for portion in portions.values())
    terms = Terms(style.fraction, 0 if style.in_turn else style.min_devices, deadline)
    server = Server(mailbox, Rounds(mailbox, terms, problem.seed), model, splits, side, style.in_turn)
    if few := [name for name, there in problem.samples.items() if there < problem.workload.batch_size]:
        text = (
            f"{', '.join(few)}: fewer samples than a batch of {problem.workload.batch_size}, which is all of them there"
        )
        device.record("log", text=text)
    tests = Requests(job.dataset, problem.workload.batch_size)
    await server.run(Team(problem).length.rounds, tests, options.evaluate_every)


async def _participate(mailbox: Mailbox, job: FamilyJob, style: Style) -> None:
    problem, device, server = job.problem, mailbox.device, job.plan.lead
    assert job.dataset is not None
    portion = job.plan.details.portions[device.name]
    share = Share(job.dataset, problem.workload.batch_size, portion.parallel, problem.seed)
    layers = Layers(device, problem, 0, portion.split)
    training = WithServer(layers, mailbox, server) if style.split else Alone(layers)
    await Participant(mailbox, server, share, Team(problem).length, layers, training).serve()
