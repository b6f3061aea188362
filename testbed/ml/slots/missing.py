"""Received parts of a layer, and the hook for missing parts.

A device with neurons of a layer needs the outputs of all neurons of the layer before, which come from several devices:
the part of each of these devices arrives completely, in part (a cast has several packets), or not at all.
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
    """The part of one sender in the values of a layer, or of a layer's losses."""

    sender: str
    neurons: Channels
    """The sender's neurons of its layer."""
    tensor: torch.Tensor | None
    """(samples, values); None if the part has not arrived."""
    note: dict[str, Any] | None = None
    """The method's annotation, see `testbed.ml.slots.casts.Notes`."""
    missing: torch.Tensor | None = None
    """Mask of values not received (zeros) in a partially received part, shaped like ``tensor``."""

    @property
    def is_complete(self) -> bool:
        """Whether the part has arrived completely."""
        return self.tensor is not None and self.missing is None

    @property
    def received_share(self) -> float:
        """Received fraction of the part."""
        if self.tensor is None:
            return 0
        return present_share(self.missing)


ArrivalPattern = tuple[tuple[Channels, bool], ...]
"""For each sender, its neurons and whether its part has arrived. Equal patterns have equal gaps."""


@dataclass(frozen=True)
class ReceivedParts:
    """A device's received outputs of one layer, or losses sent back to a layer, for one batch.

    >>> parts = (SenderPart("a", range(2), torch.ones(1, 2)), SenderPart("b", range(2, 4), None))
    >>> received = ReceivedParts(layer=1, batch=0, samples=1, neurons=4, parts=parts)
    >>> received.is_complete, received.success_rate
    (False, 0.5)
    """

    layer: int
    """Index of the senders' layer."""
    batch: int
    samples: int
    neurons: int
    """Neurons of the whole layer."""
    parts: tuple[SenderPart, ...]
    """Parts of all devices with neurons of the layer, in their order."""
    values: int = 1
    """Values of each neuron for a sample: the pixels of a filter's map."""

    @cached_property
    def is_complete(self) -> bool:
        """Whether all parts have arrived completely."""
        return all(part.is_complete for part in self.parts)

    @property
    def success_rate(self) -> float:
        """The layer-to-layer success rate: the fraction of senders whose part has arrived."""
        return sum(part.received_share for part in self.parts) / len(self.parts)

    @cached_property
    def arrival_pattern(self) -> ArrivalPattern | None:
        """The neurons of each part and whether the part has arrived; None if a part has arrived in part only."""
        pattern = []
        for part in self.parts:
            if part.missing is not None:
                return None
            pattern.append((part.neurons, part.tensor is not None))
        return tuple(pattern)

    def missing_mask(self) -> torch.Tensor | None:
        """Return the mask of missing outputs of the whole layer, (samples or 1, values); None if all have arrived.

        The mask has one row if whole messages are missing, because then all samples lack the same values. Callers must
        not modify the mask, which is cached.

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

        ``into`` is a tensor whose memory may be reused; its contents are lost.

        >>> parts = (SenderPart("a", range(2), torch.ones(1, 2)), SenderPart("b", range(2, 3), None))
        >>> ReceivedParts(layer=1, batch=0, samples=1, neurons=3, parts=parts).joined_values()
        tensor([[1., 1., 0.]])
        """
        if self._is_in_order():
            # One concatenation is much faster than a copy for each part.
            room = None if into is None else into.resize_(0)
            parts = [self._sent_values(part) for part in self.parts]
            return torch.cat(parts, dim=1, out=room)
        outputs = self.zeros()
        for part in self.parts:
            if part.tensor is not None:
                elements = elements_of(part.neurons, self.values)
                _put_values(part.tensor, elements, outputs)
        return outputs

    def zeros(self) -> torch.Tensor:
        """Return zeros for a completely missing layer, (samples, values of all neurons)."""
        return torch.zeros(self.samples, self.neurons * self.values)

    def _sent_values(self, part: SenderPart) -> torch.Tensor:
        """Return the values of a part, (samples, values of the sender), or zeros for an absent part."""
        if part.tensor is None:
            values = len(part.neurons) * self.values
            return torch.zeros(self.samples, values)
        return part.tensor

    def _is_in_order(self) -> bool:
        """Return whether the concatenation of all parts is the layer: false once neurons have moved."""
        end = 0
        for part in self.parts:
            if not isinstance(part.neurons, range) or part.neurons.start != end:
                return False
            end = part.neurons.stop
        return end == self.neurons

    def summed_losses(self) -> torch.Tensor:
        """Return the sum of the received losses, (samples, own values). Raises ValueError if none has arrived.

        Each device of the next layer contributes the losses by its own neurons (VersatileFL's equation 2).

        >>> parts = (SenderPart("a", range(2), torch.ones(1, 3)), SenderPart("b", range(2, 4), torch.ones(1, 3)))
        >>> ReceivedParts(layer=2, batch=0, samples=1, neurons=4, parts=parts).summed_losses()
        tensor([[2., 2., 2.]])
        """
        received = [part.tensor for part in self.parts if part.tensor is not None]
        if not received:
            raise ValueError(
                f"no part of layer {self.layer} has arrived for batch {self.batch}"
            )
        return torch.stack(received).sum(dim=0)


def _put_values(
    values: torch.Tensor,
    columns: Channels,
    whole: torch.Tensor,
) -> None:
    """Write values, (samples, columns) or a single one for all, into some columns of ``whole``."""
    if isinstance(columns, range):
        # A view: neurons that never moved are ranges, and need no list of indices.
        whole.narrow(1, columns.start, len(columns)).copy_(values)
    else:
        whole[:, list(columns)] = values


def _all_missing() -> torch.Tensor:
    """Return a mask without axes, which marks any number of values as missing."""
    return torch.ones((), dtype=torch.bool)


# Over a lossy radio the same few patterns come again and again.
@lru_cache(256)
def _missing_mask_of(
    pattern: ArrivalPattern, neurons: int, values: int
) -> torch.Tensor:
    """Return the mask of values in missing parts of a layer, (1, values)."""
    mask = torch.zeros(1, neurons * values, dtype=torch.bool)
    for part, has_arrived in pattern:
        if not has_arrived:
            elements = elements_of(part, values)
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


class Usable(NamedTuple):
    """The usability of the losses, or of the shared results, of one batch."""

    values: torch.Tensor | None
    """For losses the gradient of the own outputs, (samples, own values); for results all of them, (samples, classes).

    None if too little has arrived.
    """
    gradient_source: Literal["new", "saved", "nothing"]
    """Source of the layer's learning: this batch, saved gradients of an earlier one, or nothing."""


Work = Callable[[], torch.Tensor | None]
"""Update the weights and return the gradient of the inputs for the previous layer; None if there is no gradient."""


class MissingDataPolicy(Protocol):
    """Hook: a method's treatment of incomplete batches."""

    casts_empty_messages: bool
    """Whether a device without values for a batch sends a cast without values, so that others still hear the device."""
    masks_missing_outputs: bool
    """Whether outputs not received get no losses for their batch."""

    def inputs(self, received: ReceivedParts) -> torch.Tensor | None:
        """Compute the inputs of a layer, (samples, values), from the outputs of the previous layer.

        None stops the batch on this device.
        """

    def test_values(self, received: ReceivedParts) -> ReceivedParts | None:
        """Return the parts from which a test computes a layer's inputs or its results; None stops the batch here.

        By default these are the received parts: missing values count as zero.
        """
        return received

    async def usable_results(self, received: ReceivedParts) -> Usable:
        """Return the usability of a batch's shared results."""

    async def usable_losses(self, received: ReceivedParts) -> Usable:
        """Return the usability of a batch's losses from the next layer."""

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: Usable,
    ) -> Work | None:
        """Return the work of a backward; None skips learning.

        ``gradient`` is the gradient of the own outputs, (samples, own values); None without a gradient, or if the batch
        was not forwarded on this device.
        """

    def observe_loss(self, step: int, loss: float) -> None:
        """Observe the loss of a step with usable results, on the coordinator."""


def backpropagate(
    shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor
) -> torch.Tensor | None:
    """Accumulate gradients; return the inputs' gradient, (samples, values), or None for the first layer."""
    if layer > 1:
        return shard.backward(batch, gradient)
    # The input layer has no weights, so nobody needs the gradient of the samples.
    shard.learn(batch, gradient)
    return None
