"""Who casts what to whom, and what of it has arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.messages import Losses, Outputs
from testbed.kits.slots.missing import Arrived, SenderPart, share_without
from testbed.kits.slots.partition import Partition
from testbed.kits.slots.recovery import Transmit
from testbed.models.slices import Channels, elements, pick

Sent = TypeVar("Sent", Outputs, Losses)


class Placement(Protocol):
    """Which device has which neurons, now."""

    def holders(self, layer: int) -> Sequence[str]:
        """Return the devices that have neurons of a layer."""

    def of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer."""

    def neurons(self, layer: int) -> int:
        """Return how many neurons a layer has."""

    @property
    def layers(self) -> int:
        """How many there are, the input layer too."""


class Notes(Protocol):
    """What a method tells along with its casts."""

    def tell(self, layer: int, message: Sent) -> Sent:
        """Return a message to a layer with its note."""

    def hear(self, message: Outputs | Losses) -> Channels | None:
        """Take the note of a message that has arrived in time; return the sender's neurons in the message's layer.

        None: the message does not count.
        """

    def miss(self, sender: str) -> None:
        """Take note that a message of a device has not arrived in time."""


class Planned:
    """The placement of a plan."""

    def __init__(self, division: Partition, devices: Sequence[str]) -> None:
        layers = range(len(division.neurons))
        self._division = division
        self._holders = [tuple(devices[index] for index in division.holders(layer)) for layer in layers]
        self._parts = dict(zip(devices, division.super_neurons, strict=True))

    def holders(self, layer: int) -> Sequence[str]:
        """Return the devices that have neurons of a layer."""
        return self._holders[layer]

    def of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer."""
        return self._parts[device].of(layer)

    def neurons(self, layer: int) -> int:
        """Return how many neurons a layer has."""
        return self._division.neurons[layer]

    @property
    def layers(self) -> int:
        """How many there are, the input layer too."""
        return len(self._division.neurons)


@dataclass
class Tally:
    """Parts that were due, and those that had arrived."""

    due: int = 0
    came: float = 0
    """Of one that has arrived in part, the share."""


class CastExchange:
    """The casts of one device, and those that it hears."""

    def __init__(
        self,
        mailbox: Mailbox,
        placement: Placement,
        transmit: Transmit,
        under_way: int,
        values: Sequence[int],
        notes: Notes | None = None,
    ) -> None:
        """``under_way``: how many batches there are at most between the first layer's forward and its backward.

        ``values``: by layer, those of each neuron for a sample.
        """
        self.until = math.inf
        """When the present slot ends, and nothing more is cast; seconds."""
        self._mailbox = mailbox
        self._placement = placement
        self._transmit = transmit
        self._under_way = under_way
        self._values = values
        self._notes = notes
        self._name = mailbox.device.name
        self._arrived: dict[tuple[type[Outputs | Losses], int, int], dict[str, Outputs | Losses]] = {}
        """By kind, batch and layer: what has come of it, by sender."""
        self._oldest = {Outputs: 0, Losses: 0}
        """Batches of which a message still counts."""
        mailbox.on(Outputs, self._take)
        mailbox.on(Losses, self._take)
        self.tally = {"forward": Tally(), "backward": Tally(), "sharing": Tally()}
        """How many parts came from other devices in time, by what they were for."""

    def _take(self, message: Outputs | Losses) -> None:
        kind = type(message)
        came = self._arrived.get((kind, message.batch, message.layer), {})
        message = _filled(came.get(message.sender, message), message)
        if message.sender != self._name and not message.missing:
            self._transmit.heard(message)
        if message.batch >= self._oldest[kind]:
            self._arrived.setdefault((kind, message.batch, message.layer), came)[message.sender] = message

    def _expire(self, kind: type[Outputs | Losses], before: int) -> None:
        """Drop what was not used of batches before one, and whatever of them still comes."""
        if before > self._oldest[kind]:
            self._oldest[kind] = before
            for old in [key for key in self._arrived if key[0] is kind and key[1] < before]:
                del self._arrived[old]

    async def cast(self, layer: int, message: Sent) -> None:
        """Transmit to all that hold a layer; what a device has for itself costs nothing."""
        if self._notes is not None:
            message = self._notes.tell(layer, message)
        receivers = self._placement.holders(layer)
        if self._name in receivers:
            self._mailbox.post(self._name, message)
        others = [name for name in receivers if name != self._name]
        if others:
            await self._transmit(others, message, self.until)

    def outputs(self, layer: int, batch: int, samples: int) -> Arrived:
        """Return what has arrived of a layer's outputs, once."""
        shared = layer == self._placement.layers - 1
        parts = self._parts(Outputs, batch, layer, self.tally["sharing" if shared else "forward"])
        self._expire(Outputs, batch - self._under_way - 1)
        return Arrived(layer, batch, samples, self._placement.neurons(layer), parts, values=self._values[layer])

    def losses(self, layer: int, batch: int, samples: int) -> Arrived:
        """Return what has arrived of the losses of the own neurons of a layer, sent by the layer behind it, once.

        What comes later of batches before is dropped.
        """
        own = elements(self._placement.of(self._name, layer), self._values[layer])
        parts = self._parts(Losses, batch, layer + 1, self.tally["backward"], own)
        self._expire(Losses, batch)
        return Arrived(layer + 1, batch, samples, self._placement.neurons(layer + 1), parts)

    def _parts(
        self, kind: type[Outputs | Losses], batch: int, layer: int, tally: Tally, own: Channels | None = None
    ) -> tuple[SenderPart, ...]:
        """Return what the holders of a layer have sent; of losses the part that is for the ``own`` values."""
        came = self._arrived.pop((kind, batch, layer), {})
        holders = self._placement.holders(layer)
        tally.due += len(holders) - (self._name in holders)
        tally.came += sum(
            share_without(came[sender].missing.get("tensor"))
            for sender in holders
            if sender != self._name and sender in came
        )
        return tuple(self._part(came.get(sender), layer, sender, own) for sender in holders)

    def _part(self, message: Outputs | Losses | None, layer: int, sender: str, own: Channels | None) -> SenderPart:
        neurons: Channels | None = self._placement.of(sender, layer)
        if self._notes is not None and message is None:
            self._notes.miss(sender)
        elif self._notes is not None and message is not None:
            neurons = self._notes.hear(message)
        if message is None or neurons is None:
            return SenderPart(sender, self._placement.of(sender, layer), None)
        tensor, missing = message.tensor, message.missing.get("tensor")
        if own is not None and tensor is not None:
            tensor, missing = pick(tensor, 1, own), None if missing is None else pick(missing, 1, own)
        if missing is not None and not missing.any():
            missing = None
        return SenderPart(sender, neurons, tensor, message.note, missing)


def _filled(first: Outputs | Losses, again: Outputs | Losses) -> Outputs | Losses:
    """Return what is known after a message has come again: what was missing of it may be there now."""
    if first is again or not first.missing or first.tensor is None or again.tensor is None:
        return first
    gaps = first.missing["tensor"]
    left = gaps & again.missing["tensor"] if again.missing else torch.zeros_like(gaps)
    tensor = torch.where(gaps, again.tensor, first.tensor)
    return replace(first, tensor=tensor, missing={"tensor": left} if left.any() else {})
