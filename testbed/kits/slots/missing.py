"""What has arrived of a layer, and what a device does about what has not: the parts by which methods differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from testbed.kits.layers.layer_shard import LayerShard
from testbed.models.slices import Channels, elements


class SenderPart(NamedTuple):
    """What one device had to send."""

    sender: str
    neurons: Channels
    """Of the sender, in its layer."""
    tensor: torch.Tensor | None
    """(samples, values); None: it has not arrived."""
    note: dict[str, Any] | None = None
    """What was told along."""
    missing: torch.Tensor | None = None
    """Which values have not arrived, and are zeros, where only some have; as ``tensor``."""

    @property
    def whole(self) -> bool:
        """Whether all of it has arrived."""
        return self.tensor is not None and self.missing is None

    @property
    def share(self) -> float:
        """How much of it has arrived."""
        return 0 if self.tensor is None else share_without(self.missing)


@dataclass(frozen=True)
class Arrived:
    """What a device has of one layer's outputs, or of the losses that a layer sends back, for one batch."""

    layer: int
    """Of the senders."""
    batch: int
    samples: int
    neurons: int
    """Of the whole layer."""
    parts: tuple[SenderPart, ...]
    """Of all devices with neurons of the layer, in their order."""
    others: bool = True
    """Whether the other devices of the receiver's layer are known to have everything; True where nobody asks."""
    values: int = 1
    """Of each neuron for a sample: the pixels of a filter's map."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return all(part.whole for part in self.parts)

    @property
    def rate(self) -> float:
        """The layer-to-layer success rate: the share of the devices from which it has arrived."""
        return sum(part.share for part in self.parts) / len(self.parts)

    def gaps(self) -> torch.Tensor | None:
        """Return which outputs of the whole layer are missing, (samples, values); None where none is."""
        if self.complete:
            return None
        found = torch.zeros(self.samples, self.neurons * self.values, dtype=torch.bool)
        for part in self.parts:
            if not part.whole:
                found[:, self._where(part)] = True if part.missing is None else part.missing
        return found

    def _where(self, part: SenderPart) -> slice | list[int]:
        where = elements(part.neurons, self.values)
        return slice(where.start, where.stop) if isinstance(where, range) else list(where)

    def together(self) -> torch.Tensor:
        """Return the outputs of the whole layer, (samples, values), with zeros for what is missing."""
        if self._in_order():
            return torch.cat([self._sent(part) for part in self.parts], dim=1)
        found = torch.zeros(self.samples, self.neurons * self.values)
        for part in self.parts:
            if part.tensor is not None:
                found[:, self._where(part)] = part.tensor
        return found

    def _sent(self, part: SenderPart) -> torch.Tensor:
        return torch.zeros(self.samples, len(part.neurons) * self.values) if part.tensor is None else part.tensor

    def _in_order(self) -> bool:
        """Say whether the parts, one behind the other, are the layer."""
        end = 0
        for part in self.parts:
            if not isinstance(part.neurons, range) or part.neurons.start != end:
                return False
            end = part.neurons.stop
        return end == self.neurons

    def added(self) -> torch.Tensor:
        """Return the sum of the losses that have arrived, (samples, own values). Raises ValueError where none has."""
        heard = [part.tensor for part in self.parts if part.tensor is not None]
        if not heard:
            raise ValueError(f"nothing of layer {self.layer} has arrived for batch {self.batch}")
        return torch.stack(heard).sum(dim=0)


def share_without(missing: torch.Tensor | None) -> float:
    """Return how much is there of values of which some are missing; None: none is."""
    return 1 if missing is None else 1 - float(missing.float().mean())


class Learn(Protocol):
    """What a device does with the gradient of its neurons' outputs in a layer, or without one."""

    def __call__(
        self, shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor | None
    ) -> Callable[[], torch.Tensor | None] | None:
        """Return the work to do, or None: nothing is learnt.

        ``gradient`` is (samples, own values); None where there is none, or where the batch was not forwarded here. The
        work returns the gradient of the inputs, to be cast to the layer before, or None: nothing is cast.
        """


class Confirm(Protocol):
    """Tells the other devices of a layer that one has everything, and hears whether they have."""

    async def __call__(self, layer: int, arrived: Arrived) -> Arrived:
        """Return what has arrived for one's own neurons of a layer, with what is known of the others."""


@dataclass(frozen=True)
class Missing:
    """What to do with what is missing."""

    inputs: Callable[[Arrived], torch.Tensor | None]
    """From the outputs of the layer before to (samples, its values); None: the batch goes no further here."""
    results: Callable[[Arrived], torch.Tensor | None]
    """From the results shared by the output layer to (samples, classes), of which the loss is; None: no loss."""
    losses: Callable[[Arrived], torch.Tensor | None]
    """From the losses of the layer behind to the gradient of the own outputs; None: there is none."""
    learn: Learn
    tests: Callable[[Arrived], torch.Tensor | None] = Arrived.together
    """As `inputs`, in tests; of the results shared, None counts as zeros."""
    observe: Callable[[int, float], None] = lambda step, loss: None
    """Told the loss of each step whose results are usable, on the device that leads."""
    confirm: Confirm | None = None
    """How to know whether the other devices of the own layer have everything; None: it does not matter."""
    absent: bool = False
    """Whether a device with nothing to send says so, by a cast without values."""
    unheard: Callable[[Arrived], torch.Tensor | None] = lambda _: None
    """Which outputs of the layer before get no losses for a batch, (samples, values), from what had arrived of it."""


def all_of(losses: Arrived) -> torch.Tensor | None:
    """Return the gradient of the own outputs, if everyone's part of it has arrived."""
    return losses.added() if losses.complete else None


def back(shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add to the gradients; return that of the inputs, or None: the first layer's are the samples."""
    if layer > 1:
        return shard.backward(batch, gradient)
    shard.learn(batch, gradient)
    return None


def at_once(
    shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor | None
) -> Callable[[], torch.Tensor | None] | None:
    """Update with each gradient as it comes; without one nothing is learnt, here and in all layers before."""
    if gradient is None:
        return None

    def work() -> torch.Tensor | None:
        before = back(shard, layer, batch, gradient)
        shard.update()
        return before

    return work


EDGEPIPE = Missing(
    inputs=Arrived.together, results=Arrived.together, losses=all_of, learn=at_once, unheard=Arrived.gaps
)
"""A missing part counts as zero in the forward pass; the gradient needs all losses of the layer behind.

What counted as zero gets no losses. The paper leaves that open; with losses for outputs that nobody had, which
lower no loss, the layer before grows without bound (Vertical, 7,500 batches of MNIST).
"""
