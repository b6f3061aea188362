"""EdgePipe's program, and its rule for missing values (Section V-B): a missing signal "is treated as null".

Layers and batches are numbered from 0; layer 0 is the input layer. Losses are the gradients that a layer casts to the
previous layer.
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
from testbed.ml.slots.missing import (
    BackwardWork,
    ReceivedParts,
    UsableValues,
    backpropagate,
)
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import SlotDetails
from testbed.ml.slots.program import KINDS, FixedAssignment, SlotProgram, make_transmit
from testbed.ml.slots.weights import DataRequest, receive_initial_weights, request_data
from testbed_edgepipe.planner import (
    PARTITION_MESSAGES,
    EdgePipeOptions,
    UpdateCondition,
    planned_assignment,
)


class PartitionRequest(DataRequest, kind=PARTITION_MESSAGES[0]):
    """To the device coordinator: request for the model partition, the assignment of all neurons to devices."""


@dataclass(frozen=True)
class ModelPartition(TypedMessage, kind=PARTITION_MESSAGES[1]):
    """From the device coordinator: the neurons of each device (line 22 of Algorithm 1)."""

    layers: list[dict[str, list[int]]]
    """For each layer: device -> [its first neuron, the neuron after its last one]."""


class ZeroSubstitution:
    """The hook `testbed.ml.slots.missing.MissingDataPolicy`: missing values count as zero in the forward pass.

    A layer learns if all losses of the next layer have arrived. Outputs that counted as zero get no losses, unless
    ``mask_missing_outputs`` is false.

    >>> from testbed.ml.slots.missing import SenderPart
    >>> parts = (SenderPart("a", range(1), torch.ones(1, 1)), SenderPart("b", range(1, 2), None))
    >>> received = ReceivedParts(layer=1, batch=0, samples=1, neurons=2, parts=parts)
    >>> ZeroSubstitution().inputs(received)
    tensor([[1., 0.]])
    >>> received.is_complete
    False
    """

    # Receivers count a part that is missing at the start of a slot as zero, so that a cast without values is useless.
    casts_empty_messages = False

    def __init__(
        self,
        update_condition: UpdateCondition = "all_losses",
        micro_batches: int = 1,
        *,
        mask_missing_outputs: bool = True,
    ) -> None:
        """``micro_batches`` is the number of micro-batches of a batch; all other batches here are micro-batches.

        An update follows the last micro-batch of each batch, with the gradients of all whose losses have arrived.
        """
        self.masks_missing_outputs = mask_missing_outputs
        self._update_condition = update_condition
        self._micro_batches = micro_batches
        self._incomplete: set[tuple[int, int]] = set()
        """(layer, batch) with missing inputs on this device, if such batches are excluded from learning."""

    def inputs(self, received: ReceivedParts) -> torch.Tensor:
        """Return the outputs of the previous layer, (samples, values), with zeros for missing values."""
        needs_all_inputs = self._update_condition == "all_transmissions"
        if needs_all_inputs and not received.is_complete:
            layer = received.layer + 1
            self._incomplete.add((layer, received.batch))
        return received.joined_values()

    def test_values(self, received: ReceivedParts) -> ReceivedParts:
        """Return the received values; missing values count as zero in tests, too."""
        return received

    async def usable_results(self, received: ReceivedParts) -> UsableValues:
        """Return the results, with zeros for missing values if allowed by the option `update_condition`."""
        # The paper's condition, all losses of the next layer, says nothing about the output layer, which has no next
        # layer.
        accepts_missing = self._update_condition == "all_losses"
        values = None
        if received.is_complete or accepts_missing:
            values = received.joined_values()
        return self._decide(received.layer, received, values)

    async def usable_losses(self, received: ReceivedParts) -> UsableValues:
        """Return the gradient of the device's outputs, (samples, values), if all losses have arrived.

        Section V-B: a layer computes gradients "only if it receives all of the losses from its next layer".
        """
        values = received.summed_losses() if received.is_complete else None
        return self._decide(received.layer - 1, received, values)

    def _decide(
        self, layer: int, received: ReceivedParts, values: torch.Tensor | None
    ) -> UsableValues:
        """Return ``values`` for learning in a layer, or none if the inputs of the layer were incomplete."""
        is_incomplete = (layer, received.batch) in self._incomplete
        # The layer has no further backward of this batch or of an earlier one.
        for incomplete_layer, batch in list(self._incomplete):
            if incomplete_layer == layer and batch <= received.batch:
                self._incomplete.discard((incomplete_layer, batch))
        if is_incomplete or values is None:
            return UsableValues(None, "nothing")
        return UsableValues(values, "new")

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: UsableValues,
    ) -> BackwardWork | None:
        """Return the computation of a backward: accumulate ``gradient``, and update after the last micro-batch.

        ``gradient`` is (samples, values). The computation returns the gradient of the layer's inputs, which is cast to
        the previous layer. Without ``gradient`` nothing is cast, so that previous layers do not learn from this batch
        either.
        """
        is_last = (batch + 1) % self._micro_batches == 0
        # Even if the last micro-batch gives no gradient, the update uses the gradients of earlier ones.
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
    """Return the assignment of the plan; with `send_model_partition`, receive it from the device coordinator."""
    planned = planned_assignment(context.problem, context.plan)
    if not context.problem.options.send_model_partition:
        return planned

    def make_answer() -> ModelPartition:
        layers = []
        for holders in planned.layers:
            ranges = {}
            for name, neurons in holders.items():
                # The neurons of a device are adjacent, so that two numbers stand for all of them.
                ranges[name] = [neurons[0], neurons[-1] + 1]
            layers.append(ranges)
        return ModelPartition(layers)

    partition = await request_data(
        mailbox,
        holder=context.plan.details.device_coordinator,
        request=PartitionRequest,
        answer_type=ModelPartition,
        make_answer=make_answer,
    )
    layers = []
    for ranges in partition.layers:
        holders = {}
        for name, (first, end) in ranges.items():
            holders[name] = range(first, end)
        layers.append(holders)
    return replace(planned, layers=tuple(layers))


async def run(
    device: Device, context: ProgramContext[EdgePipeOptions, SlotDetails]
) -> None:
    """Train and test, beginning in the current slot."""
    problem = context.problem
    options = problem.options
    kinds = (*KINDS, PartitionRequest, ModelPartition)
    async with Mailbox(device, problem.links, kinds) as mailbox:
        assignment = await receive_assignment(mailbox, context)
        initial_weights = await receive_initial_weights(mailbox, context)
        neurons = Neurons(device, problem, initial_weights)
        missing_data = ZeroSubstitution(
            options.update_condition,
            # Not the option, which may be `devices` instead of a number.
            context.plan.details.micro_batches,
            mask_missing_outputs=options.mask_missing_outputs,
        )
        program = SlotProgram(
            mailbox,
            context,
            neurons,
            assignments=FixedAssignment(assignment, neurons, device.name),
            missing_data=missing_data,
            transmit=make_transmit(mailbox, context),
        )
        await program.run()
