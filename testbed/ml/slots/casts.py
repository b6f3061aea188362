"""Casts between devices: their receivers, their repetition against loss, and the parts that arrive in time.

A cast is one transmission to several devices, of which each may lose it. A cast has the values of one device in one
layer for one batch: its part of the layer. Receivers use the part at the start of their next slot with work for this
batch; a later arrival is discarded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.models.slices import Channels, elements_of, pick
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.missing import ReceivedParts, SenderPart, present_share


@dataclass(frozen=True)
class Values(TypedMessage, key=("batch", "layer", "sender")):
    """The values of a device's neurons in one layer for one batch."""

    batch: int
    """Number of the batch among all batches of training and tests, in the order in which they enter the network."""
    layer: int
    """The sender's layer."""
    tensor: torch.Tensor | None = None
    """(samples, values); None if the sender has no values for this batch."""
    note: dict[str, Any] | None = None
    """The method's annotation, as JSON."""


class Outputs(Values, kind="outputs"):
    """The outputs of a device's neurons of a layer; for the output layer, the shared results."""


class Losses(Values, kind="losses"):
    """The paper's losses: contributions of a device's neurons to the gradients of all values of the previous layer."""


@dataclass(frozen=True)
class CastAck(TypedMessage, kind="heard"):
    """Acknowledgement of a cast: kind of message, batch and layer."""

    what: str
    """Kind of the message that was received."""
    batch: int
    layer: int


CASTS = (Outputs, Losses, CastAck)
"""Kinds of messages that are cast."""
AnyValues = TypeVar("AnyValues", bound=Values)


class Transmit(Protocol):
    """A strategy for casting to several devices."""

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Transmit a cast, which is of use until the instant ``until``, in seconds; return after the last attempt."""

    def on_arrival(self, message: Values) -> None:
        """Handle each complete arrival of another device's cast, also of a repetition."""


class RepeatedCasts:
    """The paper's r-TX: transmit each cast a fixed number of times. One transmission means no recovery."""

    def __init__(self, mailbox: Mailbox, times: int = 1) -> None:
        self._mailbox = mailbox
        self._times = times

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Transmit the cast as often as configured, whatever the time."""
        for _ in range(self._times):
            await self._mailbox.cast(receivers, message)

    def on_arrival(self, message: Values) -> None:
        """Do nothing: the sender expects no acknowledgement."""


class AcknowledgedCasts:
    """The paper's ACK: repeat a cast until all receivers have acknowledged it or the slot ends.

    A repetition goes to the receivers whose acknowledgement is missing. Acknowledgements are casts, which can be lost
    as well.
    """

    def __init__(self, mailbox: Mailbox, wait: float) -> None:
        """``wait`` is the number of seconds after a cast has left in which its acknowledgements normally arrive."""
        self._mailbox = mailbox
        self._wait = wait
        self._missing: dict[tuple[str, int, int], set[str]] = {}
        """Receivers without acknowledgement, by kind, batch and layer of the cast."""
        self._complete: asyncio.Future[None] | None = None
        """Completed when all receivers have acknowledged the newest cast, to end the wait for acknowledgements."""
        mailbox.on(CastAck, self._on_acknowledgement)

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Transmit the cast at least once, and again while a round trip fits into the time before ``until``."""
        device = self._mailbox.device
        cast = (message.kind, message.batch, message.layer)
        # `_on_acknowledgement` removes names from this set while the loop waits.
        missing = set(receivers)
        self._missing[cast] = missing
        while missing:
            start = device.now()
            await self._mailbox.cast(sorted(missing), message)
            round_trip = device.now() - start + self._wait
            # Receivers use a cast in the next slot, so a repetition after the end of this slot comes too late.
            if device.now() + round_trip >= until:
                break
            await self._wait_for_acknowledgements(missing)
        del self._missing[cast]

    async def _wait_for_acknowledgements(self, missing: set[str]) -> None:
        """Return once all receivers have acknowledged, or after the normal time of acknowledgements."""
        # All acknowledgements may have arrived while the cast was leaving.
        if not missing:
            return
        self._complete = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._wait):
                await self._complete
        except TimeoutError:
            pass

    def on_arrival(self, message: Values) -> None:
        """Acknowledge every arrival, also of a repetition: the earlier acknowledgement may have been lost."""
        answer = CastAck(message.kind, message.batch, message.layer)
        casting = self._mailbox.cast([message.sender], answer)
        self._mailbox.start(casting)

    def _on_acknowledgement(self, answer: CastAck) -> None:
        cast = (answer.what, answer.batch, answer.layer)
        missing = self._missing.get(cast)
        if missing is None:
            # The cast has ended, since its slot had no time left.
            return
        missing.discard(answer.sender)
        if missing:
            return
        # No wait is under way while the cast is still leaving.
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)


class Notes(Protocol):
    """Hook: annotations (notes) that devices add to their casts and read from the casts of others."""

    def annotate(self, message: AnyValues) -> AnyValues:
        """Return a message with an added annotation."""

    def read_note(self, message: Values) -> Channels | None:
        """Process the annotation of a message received in time; return the sender's neurons in the message's layer.

        Return None to have the message ignored.
        """

    def note_missing(self, sender: str) -> None:
        """Record that a message of ``sender`` has not arrived in time."""


@dataclass
class Tally:
    """Counts of expected and received parts of other devices."""

    expected: int = 0
    received: float = 0
    """Number of received parts; a part of which only some values have arrived counts as the fraction of these."""


class CastExchange:
    """The sent and received casts of one device."""

    def __init__(
        self,
        mailbox: Mailbox,
        assignment: Callable[[], NeuronAssignment],
        transmit: Transmit,
        batches_in_flight: int,
        values: Sequence[int],
        notes: Notes | None = None,
    ) -> None:
        """``assignment`` returns the current assignment.

        ``batches_in_flight`` is the maximum number of batches between the first layer's forward and its backward.
        ``values`` has, for each layer, the number of values of a neuron per sample.
        """
        self.slot_end = math.inf
        """End of the current slot, in seconds: later repetitions of a cast are useless."""
        self._mailbox = mailbox
        self._assignment = assignment
        self._transmit = transmit
        self._batches_in_flight = batches_in_flight
        self._values = values
        self._notes = notes
        self._name = mailbox.device.name
        self._arrived: dict[tuple[type[Values], int, int], dict[str, Values]] = {}
        """Received messages by kind, batch and layer, then by sender."""
        self._oldest = {Outputs: 0, Losses: 0}
        """The oldest batch whose messages are still stored, by kind; messages for earlier batches are discarded."""
        mailbox.on(Outputs, self._store_part)
        mailbox.on(Losses, self._store_part)
        purposes = ("forward", "backward", "sharing")
        self.tally = {purpose: Tally() for purpose in purposes}
        """Parts of other devices, by their purpose."""

    def _store_part(self, message: Values) -> None:
        """Store a message until its slot, and let the transmission strategy acknowledge it."""
        kind = type(message)
        batch = message.batch
        sender = message.sender
        key = (kind, batch, message.layer)
        parts = self._arrived.get(key, {})
        if sender in parts:
            # A repetition may bring values that the first transmission lost.
            message = _fill_gaps(parts[sender], message)
        # An acknowledgement ends the repetitions, so an incomplete part is not acknowledged.
        if sender != self._name and not message.missing:
            self._transmit.on_arrival(message)
        if batch >= self._oldest[kind]:
            parts[sender] = message
            self._arrived[key] = parts

    def _discard_before(self, kind: type[Values], batch: int) -> None:
        """Drop unused messages of earlier batches, also messages arriving from now on."""
        if batch <= self._oldest[kind]:
            return
        self._oldest[kind] = batch
        for key in list(self._arrived):
            stored_kind, stored_batch, _ = key
            if stored_kind is kind and stored_batch < batch:
                del self._arrived[key]

    async def cast(self, layer: int, message: AnyValues) -> None:
        """Cast a message to all devices with neurons of ``layer``; this device keeps it without a transmission."""
        if self._notes is not None:
            message = self._notes.annotate(message)
        receivers = self._assignment().holders(layer)
        if self._name in receivers:
            self._store_part(message)
        others = [name for name in receivers if name != self._name]
        if others:
            await self._transmit(others, message, self.slot_end)

    def take_outputs(self, layer: int, batch: int, samples: int) -> ReceivedParts:
        """Remove and return the received outputs of ``layer`` for a batch of ``samples`` samples."""
        assignment = self._assignment()
        purpose = "sharing" if layer == assignment.output_layer else "forward"
        parts = self._received_parts(Outputs, batch, layer, purpose)
        # The layers of a device take outputs of different batches: another layer may still need a batch in flight.
        self._discard_before(Outputs, batch - self._batches_in_flight - 1)
        return ReceivedParts(
            layer,
            batch,
            samples,
            neurons=assignment.sizes[layer],
            parts=parts,
            values=self._values[layer],
        )

    def take_losses(self, layer: int, batch: int, samples: int) -> ReceivedParts:
        """Remove and return the losses sent by the next layer to the device's neurons of ``layer``.

        Losses of earlier batches are dropped, also losses arriving from now on.
        """
        assignment = self._assignment()
        own_neurons = assignment.neurons_of(self._name, layer)
        own_values = elements_of(own_neurons, self._values[layer])
        next_layer = layer + 1
        parts = self._received_parts(Losses, batch, next_layer, "backward", own_values)
        self._discard_before(Losses, batch)
        return ReceivedParts(
            next_layer,
            batch,
            samples,
            neurons=assignment.sizes[next_layer],
            parts=parts,
        )

    def _received_parts(
        self,
        kind: type[Values],
        batch: int,
        layer: int,
        purpose: str,
        own_values: Channels | None = None,
    ) -> tuple[SenderPart, ...]:
        """Return the parts sent by the devices of a layer, and count them under ``purpose``.

        A device sends losses for all values of the previous layer; ``own_values`` selects those of this device.
        """
        arrived = self._arrived.pop((kind, batch, layer), {})
        holders = self._assignment().layers[layer]
        tally = self.tally[purpose]
        parts: list[SenderPart] = []
        # Summed here and added to the tally once: additions one by one would round differently.
        received: float = 0
        for sender, neurons in holders.items():
            message = arrived.get(sender)
            if sender != self._name:
                tally.expected += 1
                # Counted before the hook `Notes` decides whether to ignore the message.
                if message is not None:
                    received += present_share(message.missing.get("tensor"))
            part = self._received_part(message, neurons, sender, own_values)
            parts.append(part)
        tally.received += received
        return tuple(parts)

    def _received_part(
        self,
        message: Values | None,
        assigned_neurons: Channels,
        sender: str,
        own_values: Channels | None,
    ) -> SenderPart:
        """Return the part of one sender, to which the current assignment gives the neurons ``assigned_neurons``."""
        missing_part = SenderPart(sender, assigned_neurons, None)
        if message is None:
            if self._notes is not None:
                self._notes.note_missing(sender)
            return missing_part
        neurons: Channels | None = assigned_neurons
        if self._notes is not None:
            neurons = self._notes.read_note(message)
        if neurons is None:
            return missing_part
        tensor = message.tensor
        missing = message.missing.get("tensor")
        if own_values is not None and tensor is not None:
            tensor = pick(tensor, 1, own_values)
            if missing is not None:
                missing = pick(missing, 1, own_values)
        # All values of this device may have arrived though other values of the message are missing.
        if missing is not None and not missing.any():
            missing = None
        return SenderPart(sender, neurons, tensor, message.note, missing)


def _fill_gaps(first: Values, repetition: Values) -> Values:
    """Return the first copy of a message, with values of the repetition in place of missing ones."""
    if first is repetition or not first.missing:
        return first
    # A message without values cannot fill gaps.
    if first.tensor is None or repetition.tensor is None:
        return first
    gaps = first.missing["tensor"]
    tensor = torch.where(gaps, repetition.tensor, first.tensor)
    remaining_gaps = torch.zeros_like(gaps)
    if repetition.missing:
        remaining_gaps = gaps & repetition.missing["tensor"]
    missing = {"tensor": remaining_gaps} if remaining_gaps.any() else {}
    return replace(first, tensor=tensor, missing=missing)
