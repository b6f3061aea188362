"""Who casts what to whom, and what of it has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from testbed.methods.edgepipe.messages import Losses, Outputs
from testbed.methods.edgepipe.missing import Arrived, Part
from testbed.methods.edgepipe.partition import Partition
from testbed.methods.parts.mailbox import Mailbox
from testbed.models.slices import Channels, pick

Sent = TypeVar("Sent", Outputs, Losses)


class Placement(Protocol):
    """Which device has which neurons, now."""

    def holders(self, layer: int) -> Sequence[str]:
        """Return the devices that have neurons of a layer."""

    def of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer."""

    def neurons(self, layer: int) -> int:
        """Return how many neurons a layer has."""


class Notes(Protocol):
    """What a method tells along with its casts."""

    def tell(self, layer: int, message: Sent) -> Sent:
        """Return a message to a layer with its note."""

    def hear(self, message: Outputs | Losses) -> Channels | None:
        """Take the note of a message that has arrived in time; return the sender's neurons in the message's layer.

        None: the message does not count.
        """


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


class Exchange:
    """The casts of one device, and those that it hears."""

    def __init__(
        self, mailbox: Mailbox, placement: Placement, transmissions: int, under_way: int, notes: Notes | None = None
    ) -> None:
        """``under_way``: how many batches there are at most between the first layer's forward and its backward."""
        self._mailbox = mailbox
        self._placement = placement
        self._transmissions = transmissions
        self._under_way = under_way
        self._notes = notes
        self._name = mailbox.device.name

    async def cast(self, layer: int, message: Sent) -> None:
        """Transmit to all that hold a layer; what a device has for itself costs nothing."""
        if self._notes is not None:
            message = self._notes.tell(layer, message)
        receivers = self._placement.holders(layer)
        if self._name in receivers:
            self._mailbox.post(self._name, message)
        others = [name for name in receivers if name != self._name]
        if others:
            for _ in range(self._transmissions):
                await self._mailbox.cast(others, message)

    def outputs(self, layer: int, batch: int, samples: int) -> Arrived:
        """Return what has arrived of a layer's outputs."""
        parts = [self._part(Outputs, batch, layer, sender) for sender in self._placement.holders(layer)]
        self._mailbox.expire(Outputs, (batch - self._under_way - 1,))
        return Arrived(layer, batch, samples, self._placement.neurons(layer), tuple(parts))

    def losses(self, layer: int, batch: int, samples: int) -> Arrived:
        """Return what has arrived of the losses of the own neurons of a layer, sent by the layer behind it.

        What comes later of batches before is dropped.
        """
        own = self._placement.of(self._name, layer)
        parts = []
        for sender in self._placement.holders(layer + 1):
            part = self._part(Losses, batch, layer + 1, sender)
            parts.append(part if part.tensor is None else replace(part, tensor=pick(part.tensor, 1, own)))
        self._mailbox.expire(Losses, (batch,))
        return Arrived(layer + 1, batch, samples, self._placement.neurons(layer + 1), tuple(parts))

    def _part(self, kind: type[Sent], batch: int, layer: int, sender: str) -> Part:
        """Return what a device has sent of its neurons of a layer."""
        message = self._mailbox.pop(kind, (batch, layer, sender))
        neurons: Channels | None = self._placement.of(sender, layer)
        if message is not None and self._notes is not None:
            neurons = self._notes.hear(message)
        if message is None or neurons is None:
            return Part(sender, self._placement.of(sender, layer), None)
        return Part(sender, neurons, message.tensor, message.note)
