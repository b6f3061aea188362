"""EdgePipe's program, and its rule for missing values (Section V-B): a missing signal "is treated as null".

Layers and batches are numbered from 0; layer 0 is the input layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.method import ProgramContext
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.missing import ReceivedParts, Usable, Work, backpropagate
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import SlotDetails
from testbed.ml.slots.program import KINDS, FixedAssignment, SlotProgram, transmit_of
from testbed.ml.slots.weights import Needs, receive_initial_weights, request_data
from testbed_edgepipe.planner import (
    PARTITION_MESSAGES,
    EdgePipeOptions,
    UpdateCondition,
    planned_assignment,
)


class NeedsPartition(Needs, kind=PARTITION_MESSAGES[0]):
    """Request for the model partition, to the device coordinator."""


@dataclass(frozen=True)
class ModelPartition(TypedMessage, kind=PARTITION_MESSAGES[1]):
    """From the device coordinator: the task of each device (line 22 of Algorithm 1)."""

    layers: list[dict[str, list[int]]]
    """For each layer: device -> first neuron of the device, and the neuron after its last one."""


class TreatedAsNull:
    """A missing part counts as zero in the forward pass; a layer learns if all losses of the next layer have arrived.

    Outputs that counted as zero get no losses, unless ``mask_missing_outputs`` is false.

    >>> from testbed.ml.slots.missing import SenderPart
    >>> parts = (SenderPart("a", range(1), torch.ones(1, 1)), SenderPart("b", range(1, 2), None))
    >>> received = ReceivedParts(layer=1, batch=0, samples=1, neurons=2, parts=parts)
    >>> TreatedAsNull().inputs(received)
    tensor([[1., 0.]])
    >>> received.is_complete
    False
    """

    # Receivers count parts that are missing at the start of a slot as zero, so that an empty cast adds nothing.
    casts_empty_messages = False

    def __init__(
        self,
        update_condition: UpdateCondition = "all_losses",
        micro_batches: int = 1,
        *,
        mask_missing_outputs: bool = True,
    ) -> None:
        """``micro_batches`` is the number of parts of a batch.

        An update follows the last part of each batch, and uses the gradients of all parts whose losses have arrived.
        """
        self.masks_missing_outputs = mask_missing_outputs
        self._update_condition = update_condition
        self._micro_batches = micro_batches
        self._incomplete: set[tuple[int, int]] = set()
        """Layers and batches with missing inputs on this device; empty unless such batches are excluded from learning.
        """

    def inputs(self, received: ReceivedParts) -> torch.Tensor:
        """Return the outputs of the layer before, (samples, values), with zeros for missing values."""
        needs_all_inputs = self._update_condition == "all_transmissions"
        if needs_all_inputs and not received.is_complete:
            # The received outputs are those of the previous layer.
            self._incomplete.add((received.layer + 1, received.batch))
        return received.joined_values()

    def test_values(self, received: ReceivedParts) -> ReceivedParts:
        """Return the received values: missing ones count as zero in tests, too."""
        return received

    async def usable_results(self, received: ReceivedParts) -> Usable:
        """Return the results, with zeros for missing values if the output layer may learn from such results."""
        # Section V-B requires all losses of the next layer; the output layer has no next layer.
        suffices = received.is_complete or self._update_condition == "all_losses"
        values = received.joined_values() if suffices else None
        return self._usable(received.layer, received, values)

    async def usable_losses(self, received: ReceivedParts) -> Usable:
        """Return the gradient by the own outputs, (samples, values), if all parts have arrived.

        Section V-B: a layer computes gradients "only if it receives all of the losses from its next layer".
        """
        values = received.summed_losses() if received.is_complete else None
        return self._usable(received.layer - 1, received, values)

    def _usable(
        self, layer: int, received: ReceivedParts, values: torch.Tensor | None
    ) -> Usable:
        """Return values for learning in a layer; none for a batch whose inputs of the layer were incomplete."""
        is_incomplete = (layer, received.batch) in self._incomplete
        # Earlier batches of the layer will not come back.
        for other_layer, batch in list(self._incomplete):
            if other_layer == layer and batch <= received.batch:
                self._incomplete.discard((other_layer, batch))
        if is_incomplete or values is None:
            return Usable(None, "nothing")
        return Usable(values, "new")

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: Usable,
    ) -> Work | None:
        """Return the work of accumulating a gradient, (samples, values), and of updating after the last micro-batch.

        The work returns the gradient by the layer's inputs, which is cast to the previous layer. Without a gradient
        nothing is cast, so that the previous layers do not learn from this batch either.
        """
        is_last = (batch + 1) % self._micro_batches == 0
        # Gradients of earlier micro-batches still count if those of the last one are missing.
        has_earlier_gradients = is_last and bool(shard.gradients())
        if gradient is None and not has_earlier_gradients:
            return None

        def work() -> torch.Tensor | None:
            input_gradient = None
            if gradient is not None:
                input_gradient = backpropagate(shard, layer, batch, gradient)
            # GPipe adds up the gradients of all micro-batches before the weights change.
            if is_last:
                shard.update()
            return input_gradient

        return work

    def observe_loss(self, step: int, loss: float) -> None:
        """Do nothing: EdgePipe's rule does not depend on the loss."""


async def receive_assignment(
    mailbox: Mailbox, context: ProgramContext[EdgePipeOptions, SlotDetails]
) -> NeuronAssignment:
    """Return the planned assignment; with `send_model_partition`, as the device coordinator has sent it."""
    planned = planned_assignment(context.problem, context.plan)
    if not context.problem.options.send_model_partition:
        return planned

    def make_answer() -> ModelPartition:
        layers = []
        for holders in planned.layers:
            ranges = {}
            for name, own in holders.items():
                # The neurons of a device are adjacent: two numbers take less of the channel than a list.
                ranges[name] = [own[0], own[-1] + 1]
            layers.append(ranges)
        return ModelPartition(layers)

    received = await request_data(
        mailbox,
        context.plan.details.device_coordinator,
        NeedsPartition,
        ModelPartition,
        make_answer,
    )
    layers = []
    for ranges in received.layers:
        holders = {}
        for name, (first, end) in ranges.items():
            holders[name] = range(first, end)
        layers.append(holders)
    return replace(planned, layers=tuple(layers))


async def run(
    device: Device, context: ProgramContext[EdgePipeOptions, SlotDetails]
) -> None:
    """Train and test, beginning in the current slot."""
    problem, options = context.problem, context.problem.options
    kinds = (*KINDS, NeedsPartition, ModelPartition)
    async with Mailbox(device, problem.links, kinds) as mailbox:
        assignment = await receive_assignment(mailbox, context)
        initial_weights = await receive_initial_weights(mailbox, context)
        neurons = Neurons(device, problem, initial_weights)
        fixed = FixedAssignment(assignment, neurons, device.name)
        # The plan has the number: the option may be `devices`.
        micro_batches = context.plan.details.micro_batches
        policy = TreatedAsNull(
            options.update_condition,
            micro_batches,
            mask_missing_outputs=options.mask_missing_outputs,
        )
        transmit = transmit_of(mailbox, context)
        program = SlotProgram(mailbox, context, neurons, fixed, policy, transmit)
        await program.run()
