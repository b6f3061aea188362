"""Initial weights, distributed before the first timeslot, and final weights, gathered at the end.

The coordinator has, or collects, all of them. Both are sent reliably, and no timeslot waits for them: a plan with given
weights reserves time before its first slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.layers.shard import State, weights_of
from testbed.ml.method import Job
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import SlotDetails, SlotOptions, layers_of


@dataclass(frozen=True)
class Needs(Typed):
    """To the device with the data all others need before the first slot: the sender has started without them."""

    started: float
    """Seconds on its clock."""


class NeedsWeights(Needs, kind="needs_weights"):
    """To the coordinator: request for initial weights."""


@dataclass(frozen=True)
class GivenWeights(Typed, kind="given_weights"):
    """From the coordinator: the weights of the whole network."""

    state: State


@dataclass(frozen=True)
class FinalWeights(Typed, kind="final_weights", key=("sender",)):
    """To the coordinator: a device's weights after the last slot."""

    neurons: dict[str, list[int]]
    """By layer, from 1 on."""
    state: State


K = TypeVar("K", bound=Typed)
KINDS = (NeedsWeights, GivenWeights, FinalWeights)


async def request_data(
    mailbox: Mailbox,
    holder: str,
    need: type[Needs],
    answer: type[K],
    have: Callable[[], K],
) -> K:
    """Return the data of one device, which sends them to all others on request."""
    if mailbox.device.name != holder:
        mailbox.post(holder, need(mailbox.device.now()))
        return await mailbox.take(answer)
    own = have()

    def give(message: Needs) -> None:
        mailbox.post(message.sender, own)

    mailbox.on(need, give)
    return own


async def receive_initial_weights(
    mailbox: Mailbox, job: Job[SlotOptions, SlotDetails]
) -> State | None:
    """Return the initial weights of the whole network; None if they are drawn from the seed."""
    if job.problem.workload.model.weights is None:
        return None
    given = await request_data(
        mailbox,
        job.plan.lead,
        NeedsWeights,
        GivenWeights,
        lambda: GivenWeights(dict(job.weights or {})),
    )
    return given.state


async def send_final_weights(
    mailbox: Mailbox,
    job: Job[SlotOptions, SlotDetails],
    neurons: Neurons,
    held: NeuronAssignment,
    until: float,
) -> None:
    """Send the own weights to the coordinator, which exposes all weights received until an instant, in seconds.

    Devices that are off contribute their initial weights.
    """
    device, lead = mailbox.device, job.plan.lead
    rows = {
        str(layer): list(shard.part.rows) for layer, shard in neurons.shards.items()
    }
    own = {
        name: tensor
        for shard in neurons.shards.values()
        for name, tensor in weights_of(shard.state()).items()
    }
    if device.name != lead:
        await asyncio.wait(
            [mailbox.post(lead, FinalWeights(rows, own))],
            timeout=max(0.0, until - device.now()),
        )
        return
    problem = job.problem
    whole = problem.model.build(0, len(problem.model.units), problem.seed).state_dict()
    others = [name for name in held.devices if name != lead]
    received = [
        await mailbox.take(FinalWeights, name, deadline=until) for name in others
    ]
    for part in (
        FinalWeights(rows, own),
        *(each for each in received if each is not None),
    ):
        for layer, indices in part.neurons.items():
            prefixes = tuple(
                f"{name}." for name in layers_of(problem)[int(layer) - 1].names
            )
            for name, tensor in part.state.items():
                if name.startswith(prefixes):
                    whole[name][torch.tensor(indices)] = tensor
    device.expose(lambda: whole)
