"""Received parts of a layer, and the hook that decides about missing parts.

A device with neurons of a layer needs the outputs of all neurons of the layer before, which come from several devices:
the part of each of these devices arrives completely, in part (a cast has several packets), or not at all.

A neuron is an output channel of a layer: a unit of a fully connected layer, or a filter of a convolution, which has one
value for each pixel of its map. The losses that the papers send back are gradients by the outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import torch

from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.models.slices import Channels, elements_of


class SenderPart(NamedTuple):
    """The values of one layer cast by one device for one batch, received or not."""

    sender: str
    neurons: Channels
    """The sender's neurons, by their indices in the layer."""
    tensor: torch.Tensor | None
    """(samples, values); None if the part has not arrived.

    Outputs have the values of ``neurons``, and losses those of the receiver's own neurons in the layer before.
    """
    note: dict[str, Any] | None = None
    """The method's annotation of the cast (`testbed.ml.slots.casts.Notes`); None without one."""
    missing: torch.Tensor | None = None
    """For a part received in part: True at each value that is missing, where ``tensor`` has a zero; like ``tensor``."""

    @property
    def is_complete(self) -> bool:
        """Whether the part has arrived completely."""
        return self.tensor is not None and self.missing is None

    @property
    def received_share(self) -> float:
        """The received fraction of the part, from 0 to 1."""
        if self.tensor is None:
            return 0
        return present_share(self.missing)


ArrivalPattern = tuple[tuple[Channels, bool], ...]
"""(neurons of the sender, whether its part has arrived) for each sender of a layer.

Batches with equal patterns lack the same values.
"""


@dataclass(frozen=True)
class ReceivedParts:
    """The parts of one layer received by a device for one batch: outputs, or losses sent back.

    >>> parts = (SenderPart("a", range(2), torch.ones(1, 2)), SenderPart("b", range(2, 4), None))
    >>> received = ReceivedParts(layer=1, batch=0, samples=1, neurons=4, parts=parts)
    >>> received.is_complete, received.success_rate
    (False, 0.5)
    """

    layer: int
    """Index of the senders' layer. Losses are sent by the layer behind the receiver's."""
    batch: int
    """Number of the batch, from 0."""
    samples: int
    neurons: int
    """Number of neurons of the whole layer."""
    parts: tuple[SenderPart, ...]
    """One part for each device with neurons of the layer, in the order of the assignment."""
    values: int = 1
    """Values of each neuron for a sample: 1, or the pixels of a filter's map."""

    @cached_property
    def is_complete(self) -> bool:
        """Whether all parts have arrived completely."""
        return all(part.is_complete for part in self.parts)

    @property
    def success_rate(self) -> float:
        """The papers' layer-to-layer success rate: the mean of the senders' `SenderPart.received_share`."""
        return sum(part.received_share for part in self.parts) / len(self.parts)

    @cached_property
    def arrival_pattern(self) -> ArrivalPattern | None:
        """The neurons of each part and whether the part has arrived; None if only some values of a part have."""
        pattern = []
        for part in self.parts:
            if part.missing is not None:
                return None
            pattern.append((part.neurons, part.tensor is not None))
        return tuple(pattern)

    def missing_mask(self) -> torch.Tensor | None:
        """Return the mask of missing outputs of the whole layer; None if all have arrived.

        The mask is (1, values) if each part is complete or missing, since all samples then lack the same values;
        otherwise (samples, values). Callers must not modify the mask, which may be cached.

        >>> parts = (SenderPart("a", range(1), torch.ones(1, 1)), SenderPart("b", range(1, 2), None))
        >>> ReceivedParts(layer=1, batch=0, samples=1, neurons=2, parts=parts).missing_mask()
        tensor([[False,  True]])
        """
        if self.is_complete:
            return None
        if self.arrival_pattern is not None:
            return _missing_mask_of(self.arrival_pattern, self.neurons, self.values)
        width = self.neurons * self.values
        mask = torch.zeros(self.samples, width, dtype=torch.bool)
        for part in self.parts:
            if part.is_complete:
                continue
            missing = part.missing
            if missing is None:
                missing = _all_missing()
            elements = elements_of(part.neurons, self.values)
            _put_values(missing, elements, mask)
        return mask

    def joined_values(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs of the whole layer, (samples, values), with zeros for missing values.

        ``into`` is a tensor of any shape whose memory may be reused for the result; its values are lost.

        >>> parts = (SenderPart("a", range(2), torch.ones(1, 2)), SenderPart("b", range(2, 3), None))
        >>> ReceivedParts(layer=1, batch=0, samples=1, neurons=3, parts=parts).joined_values()
        tensor([[1., 1., 0.]])
        """
        if self._is_in_order():
            # One concatenation is much faster than a copy for each part.
            parts = [self._sent_values(part) for part in self.parts]
            # Emptied first: torch warns if it has to resize an `out` with values.
            out = None if into is None else into.resize_(0)
            return torch.cat(parts, dim=1, out=out)
        outputs = self.zeros()
        for part in self.parts:
            if part.tensor is not None:
                elements = elements_of(part.neurons, self.values)
                _put_values(part.tensor, elements, outputs)
        return outputs

    def zeros(self) -> torch.Tensor:
        """Return the outputs of a layer of which nothing has arrived: zeros, (samples, values of all neurons)."""
        return torch.zeros(self.samples, self.neurons * self.values)

    def _sent_values(self, part: SenderPart) -> torch.Tensor:
        """Return the values of a part, (samples, values of the sender), or zeros if the part has not arrived."""
        if part.tensor is None:
            values = len(part.neurons) * self.values
            return torch.zeros(self.samples, values)
        return part.tensor

    def _is_in_order(self) -> bool:
        """Return whether the parts, one after the other, make up the layer, as they do until neurons move."""
        end = 0
        for part in self.parts:
            if not isinstance(part.neurons, range) or part.neurons.start != end:
                return False
            end = part.neurons.stop
        return end == self.neurons

    def summed_losses(self) -> torch.Tensor:
        """Return the gradient of the receiver's outputs, (samples, values of its neurons): the sum of received losses.

        Each device of the next layer sends the contribution of its own neurons to this gradient. Raises ValueError if
        none has arrived.

        >>> parts = (SenderPart("a", range(2), torch.ones(1, 3)), SenderPart("b", range(2, 4), torch.ones(1, 3)))
        >>> ReceivedParts(layer=2, batch=0, samples=1, neurons=4, parts=parts).summed_losses()
        tensor([[2., 2., 2.]])
        """
        losses = [part.tensor for part in self.parts if part.tensor is not None]
        if not losses:
            raise ValueError(
                f"no part of layer {self.layer} has arrived for batch {self.batch}"
            )
        return torch.stack(losses).sum(dim=0)


def _put_values(
    values: torch.Tensor,
    columns: Channels,
    whole: torch.Tensor,
) -> None:
    """Write values, (samples, columns) or a scalar for all places, into some columns of ``whole``."""
    if isinstance(columns, range):
        # The fast case: until neurons move, the columns are a range, and a view of ``whole`` needs no list of indices.
        whole.narrow(1, columns.start, len(columns)).copy_(values)
    else:
        whole[:, list(columns)] = values


def _all_missing() -> torch.Tensor:
    """Return a scalar mask, which marks any number of values as missing."""
    return torch.ones((), dtype=torch.bool)


# The same few patterns recur over a lossy radio. Eight senders have 2 ** 8 = 256 patterns.
@lru_cache(maxsize=256)
def _missing_mask_of(
    pattern: ArrivalPattern, neurons: int, values: int
) -> torch.Tensor:
    """Return the mask of values in missing parts of a layer, (1, values)."""
    mask = torch.zeros(1, neurons * values, dtype=torch.bool)
    for sender_neurons, has_arrived in pattern:
        if not has_arrived:
            elements = elements_of(sender_neurons, values)
            _put_values(_all_missing(), elements, mask)
    return mask


def present_share(missing: torch.Tensor | None) -> float:
    """Return the fraction of present values for a mask of missing ones, of any shape; None means all are present.

    >>> present_share(torch.tensor([True, False, False, False]))
    0.75
    """
    if missing is None:
        return 1
    return 1 - float(missing.float().mean())


class UsableValues(NamedTuple):
    """The decision of a `MissingDataPolicy` about the losses, or the shared results, of one batch."""

    values: torch.Tensor | None
    """For losses the gradient of the device's outputs, (samples, values of its neurons); for results all outputs of the
    network, (samples, classes); None if too little has arrived."""
    gradient_source: Literal["new", "saved", "nothing"]
    """The gradients from which the layer learns: those of this batch, those saved from an earlier batch, or none."""


BackwardWork = Callable[[], torch.Tensor | None]
"""The computation of a backward, which may change weights. It returns the gradient of the layer's inputs, (samples,
values), to be cast to the previous layer, or None if there is nothing to cast."""


class MissingDataPolicy(Protocol):
    """Hook: a method's treatment of batches of which parts are missing."""

    casts_empty_messages: bool
    """Whether a device without values for a batch sends a cast without values, so that others know it is present."""
    masks_missing_outputs: bool
    """Whether no losses are sent to outputs that were missing in the forward pass of the batch."""

    def inputs(self, received: ReceivedParts) -> torch.Tensor | None:
        """Return the inputs of a layer, (samples, values), computed from the outputs of the previous layer.

        Return None to stop the batch on this device.
        """

    def test_values(self, received: ReceivedParts) -> ReceivedParts | None:
        """Return the parts from which a test computes a layer's inputs or the results.

        By default all received parts are used, with zeros for missing values. Return None to stop the batch on this
        device.
        """
        return received

    async def usable_results(self, received: ReceivedParts) -> UsableValues:
        """Decide about the shared results of a batch, from which the output layer computes the gradient."""

    async def usable_losses(self, received: ReceivedParts) -> UsableValues:
        """Decide about the losses sent by the next layer for a batch."""

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: UsableValues,
    ) -> BackwardWork | None:
        """Return the computation of a backward in ``layer``; None if nothing remains to compute or cast.

        ``gradient`` is the gradient of the device's outputs, (samples, values of its neurons). It is None if ``usable``
        has no values, and if this device has not computed the forward of the batch.
        """

    def observe_loss(self, step: int, loss: float) -> None:
        """Receive the loss of a step whose results were usable; called on the coordinator only."""


def backpropagate(
    shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor
) -> torch.Tensor | None:
    """Add a batch to the accumulated gradients; return the gradient of the inputs, (samples, values), or None.

    ``gradient`` is the gradient of the outputs. Layer 1, the first with weights, returns None: its inputs are samples.
    """
    if layer > 1:
        return shard.backward(batch, gradient)
    # Layer 0, the input layer, has no weights that could learn from the gradient of the samples.
    shard.learn(batch, gradient)
    return None
