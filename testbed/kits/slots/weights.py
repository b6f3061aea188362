"""Weights that a run begins with, handed out before the first timeslot, and those that it leaves, gathered at its end.

The device that leads has, or collects, all of them. Both travel reliably, and no timeslot waits for them: a plan that
begins with given weights leaves time before its first slot.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from testbed.kits.layers.shard import State, weights_of
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.typed import Typed
from testbed.kits.slots.arrangement import Arrangement
from testbed.kits.slots.neurons import Neurons
from testbed.kits.slots.planner import SlotDetails, SlotOptions, layers_of
from testbed.method import Job


@dataclass(frozen=True)
class NeedsWeights(Typed, kind="needs_weights"):
    """To the device that leads: the sender has started, and has no weights to begin with."""

    started: float
    """Seconds on its clock."""


@dataclass(frozen=True)
class GivenWeights(Typed, kind="given_weights"):
    """From the device that leads: the weights of the whole network."""

    state: State


@dataclass(frozen=True)
class FinalWeights(Typed, kind="final_weights", key=("sender",)):
    """To the device that leads: what a device holds after the last slot."""

    neurons: dict[str, list[int]]
    """By layer, from 1 on."""
    state: State


KINDS = (NeedsWeights, GivenWeights, FinalWeights)


async def given_weights(mailbox: Mailbox, job: Job[SlotOptions, SlotDetails]) -> State | None:
    """Return the weights of the whole network to begin with; None where they are drawn from the seed."""
    if job.plan.details.begin is None:
        return None
    if mailbox.device.name != job.plan.lead:
        mailbox.post(job.plan.lead, NeedsWeights(mailbox.device.now()))
        return (await mailbox.take(GivenWeights)).state
    state = dict(job.weights or {})

    def give(message: NeedsWeights) -> None:
        mailbox.post(message.sender, GivenWeights(state))

    mailbox.on(NeedsWeights, give)
    return state


async def leave_weights(
    mailbox: Mailbox, job: Job[SlotOptions, SlotDetails], neurons: Neurons, held: Arrangement, until: float
) -> None:
    """Send the own weights to the device that leads, and there expose all that have come until an instant, in seconds.

    Those of a device that is off are the first weights.
    """
    device, lead = mailbox.device, job.plan.lead
    rows = {str(layer): list(shard.part.rows) for layer, shard in neurons.shards.items()}
    own = {name: tensor for shard in neurons.shards.values() for name, tensor in weights_of(shard.state()).items()}
    if device.name != lead:
        await asyncio.wait([mailbox.post(lead, FinalWeights(rows, own))], timeout=max(0.0, until - device.now()))
        return
    problem = job.problem
    whole = problem.model.build(0, len(problem.model.units), problem.seed).state_dict()
    others = [name for name in held.devices if name != lead]
    found = [await mailbox.take(FinalWeights, name, deadline=until) for name in others]
    for part in (FinalWeights(rows, own), *(each for each in found if each is not None)):
        for layer, indices in part.neurons.items():
            prefixes = tuple(f"{name}." for name in layers_of(problem)[int(layer) - 1].names)
            for name, tensor in part.state.items():
                if name.startswith(prefixes):
                    whole[name][torch.tensor(indices)] = tensor
    device.expose(lambda: whole)
