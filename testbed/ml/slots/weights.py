"""Initial weights, distributed before the first timeslot, and final weights, gathered at the end.

The coordinator distributes and collects the weights of all devices. Both kinds are sent reliably, and no timeslot waits
for them: a plan of a scenario with initial weights reserves time before the first slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.shard import State, weights_of
from testbed.ml.method import ProgramContext
from testbed.ml.models.graph import GraphLayer
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import SlotDetails, SlotOptions, layers_of


@dataclass(frozen=True)
class DataRequest(TypedMessage):
    """Request for data that one device has and all others need before the first slot, such as initial weights."""

    started: float
    """Start of the sender, in seconds on its clock."""


class WeightsRequest(DataRequest, kind="needs_weights"):
    """To the coordinator: request for initial weights."""


@dataclass(frozen=True)
class InitialWeights(TypedMessage, kind="given_weights"):
    """From the coordinator: the initial weights of the whole network."""

    state: State


@dataclass(frozen=True)
class FinalWeights(TypedMessage, kind="final_weights", key=("sender",)):
    """To the coordinator: a device's weights after the last slot."""

    neurons: dict[str, list[int]]
    """Layer, from 1 on, -> the sender's neurons."""
    state: State


Answer = TypeVar("Answer", bound=TypedMessage)
KINDS = (WeightsRequest, InitialWeights, FinalWeights)
"""Kinds of messages of this module."""


async def request_data(
    mailbox: Mailbox,
    holder: str,
    request: type[DataRequest],
    answer_type: type[Answer],
    make_answer: Callable[[], Answer],
) -> Answer:
    """Return the data of the device ``holder``: all other devices send a request and wait for the answer.

    ``make_answer`` is called on the holder only.
    """
    if mailbox.device.name != holder:
        mailbox.post(holder, request(mailbox.device.now()))
        return await mailbox.take(answer_type)
    answer = make_answer()

    def send_answer(message: DataRequest) -> None:
        mailbox.post(message.sender, answer)

    # The handler stays for the whole run, since a device that restarts requests the data again.
    mailbox.on(request, send_answer)
    return answer


async def receive_initial_weights(
    mailbox: Mailbox, context: ProgramContext[SlotOptions, SlotDetails]
) -> State | None:
    """Return the initial weights of the whole network; None if every device draws weights from the seed."""
    if context.problem.workload.model.weights is None:
        return None

    def make_answer() -> InitialWeights:
        return InitialWeights(dict(context.weights or {}))

    answer = await request_data(
        mailbox,
        holder=context.plan.coordinator,
        request=WeightsRequest,
        answer_type=InitialWeights,
        make_answer=make_answer,
    )
    return answer.state


async def send_final_weights(
    mailbox: Mailbox,
    context: ProgramContext[SlotOptions, SlotDetails],
    neurons: Neurons,
    assignment: NeuronAssignment,
    until: float,
) -> None:
    """Send this device's weights to the coordinator; on the coordinator, receive and expose the weights of all devices.

    The exposed network has the weights that arrive until the instant ``until``, in seconds, and otherwise the weights
    that the seed gives.
    """
    device = mailbox.device
    coordinator = context.plan.coordinator
    own_weights = _own_weights(neurons)
    if device.name != coordinator:
        timeout = max(0.0, until - device.now())
        sending = mailbox.post(coordinator, own_weights)
        await asyncio.wait([sending], timeout=timeout)
        return
    problem = context.problem
    model = problem.model
    network = model.build(0, len(model.units), problem.seed)
    whole = network.state_dict()
    received = [own_weights]
    for name in assignment.devices:
        if name == coordinator:
            continue
        message = await mailbox.take(FinalWeights, name, deadline=until)
        if message is not None:
            received.append(message)
    for message in received:
        _insert_weights(whole, message, layers_of(problem))
    device.expose(lambda: whole)


def _own_weights(neurons: Neurons) -> FinalWeights:
    rows = {}
    state: dict[str, torch.Tensor] = {}
    for layer, shard in neurons.shards.items():
        rows[str(layer)] = list(shard.part.rows)
        state.update(weights_of(shard.state()))
    return FinalWeights(rows, state)


def _insert_weights(
    whole: dict[str, torch.Tensor],
    part: FinalWeights,
    layers: Sequence[GraphLayer],
) -> None:
    """Write the weights of a device's neurons, which are rows of its layers' tensors, into the whole network."""
    for layer, indices in part.neurons.items():
        # `layers` lacks the input layer, layer 0.
        own_layer = layers[int(layer) - 1]
        prefixes = tuple(f"{name}." for name in own_layer.names)
        for name, tensor in part.state.items():
            if name.startswith(prefixes):
                whole[name][torch.tensor(indices)] = tensor
