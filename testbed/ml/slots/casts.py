"""Casts between devices: receivers, repetition against loss, and the parts received in time.

A cast is one transmission to several devices, of which each may lose it. A cast belongs to one batch and layer.
Receivers use the cast at the start of their next slot with work for this batch; a later arrival is discarded.
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
    """The values a device casts for one batch. Batches are numbered in feeding order, including test batches."""

    batch: int
    layer: int
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
Sent = TypeVar("Sent", bound=Values)


class Transmit(Protocol):
    """A strategy for casting to several devices."""

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Cast before the instant ``until``, in seconds; return after the last attempt."""

    def on_arrival(self, message: Values) -> None:
        """Handle an arrival of another device's cast, repetitions too."""


class Repeated:
    """The paper's r-TX: repeat the same cast a fixed number of times. One transmission means no recovery."""

    def __init__(self, mailbox: Mailbox, times: int = 1) -> None:
        self._mailbox = mailbox
        self._times = times

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Cast to all receivers the given number of times."""
        for _ in range(self._times):
            await self._mailbox.cast(receivers, message)

    def on_arrival(self, message: Values) -> None:
        """Do nothing: the sender expects no acknowledgement."""


class Acknowledged:
    """The paper's ACK: repeat casts to receivers without acknowledgement, until none is left or the slot ends.

    Acknowledgements are casts, which can be lost as well.
    """

    def __init__(self, mailbox: Mailbox, wait: float) -> None:
        """``wait`` is the number of seconds acknowledgements take after a cast has left."""
        self._mailbox = mailbox
        self._wait = wait
        self._missing: dict[tuple[str, int, int], set[str]] = {}
        """Receivers without acknowledgement, by kind, batch and layer of the cast."""
        self._complete: asyncio.Future[None] | None = None
        """Ends the wait after a cast as soon as all receivers have acknowledged it."""
        mailbox.on(CastAck, self._on_acknowledgement)

    async def __call__(
        self, receivers: Sequence[str], message: Values, until: float
    ) -> None:
        """Cast at least once."""
        device = self._mailbox.device
        cast = (message.kind, message.batch, message.layer)
        # `_on_acknowledgement` removes names from this set while the loop waits.
        missing = set(receivers)
        self._missing[cast] = missing
        while missing:
            start = device.now()
            await self._mailbox.cast(sorted(missing), message)
            round_trip = device.now() - start + self._wait
            # Receivers use a cast in the next slot: a repetition after this one's end comes too late.
            if device.now() + round_trip >= until:
                break
            await self._wait_for_acknowledgements(missing)
        del self._missing[cast]

    async def _wait_for_acknowledgements(self, missing: set[str]) -> None:
        """Return once all receivers have acknowledged, or after the time acknowledgements normally take."""
        # All of them may have arrived while the cast was leaving.
        if not missing:
            return
        self._complete = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._wait):
                await self._complete
        except TimeoutError:
            pass

    def on_arrival(self, message: Values) -> None:
        """Acknowledge every arrival again, because earlier acknowledgements may be lost."""
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
        # Nobody waits while the cast is still leaving.
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)


class Notes(Protocol):
    """Hook: annotations added to casts and received from other devices."""

    def annotate(self, message: Sent) -> Sent:
        """Return a message with an added annotation."""

    def read_note(self, message: Values) -> Channels | None:
        """Process the annotation of a message in time; return the sender's neurons in the message's layer.

        None makes the caller ignore the message.
        """

    def note_missing(self, sender: str) -> None:
        """Record a message not received in time."""


@dataclass
class Tally:
    """Counts of expected and received parts of other devices."""

    expected: int = 0
    received: float = 0
    """Received fraction, counting partially received parts."""


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
        ``values`` has, for each layer, the values of a neuron per sample.
        """
        self.until = math.inf
        """End of the current slot in seconds, after which nothing is cast."""
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
        """The oldest batch whose messages still count."""
        mailbox.on(Outputs, self._store_part)
        mailbox.on(Losses, self._store_part)
        purposes = ("forward", "backward", "sharing")
        self.tally = {purpose: Tally() for purpose in purposes}
        """Parts of other devices, by their purpose."""

    def _store_part(self, message: Values) -> None:
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
        """Drop unused casts of earlier batches, including future arrivals."""
        if batch <= self._oldest[kind]:
            return
        self._oldest[kind] = batch
        for key in list(self._arrived):
            other_kind, other_batch, _ = key
            if other_kind is kind and other_batch < batch:
                del self._arrived[key]

    async def cast(self, layer: int, message: Sent) -> None:
        """Transmit a message to all devices of a layer; this device stores the message without a transmission."""
        if self._notes is not None:
            message = self._notes.annotate(message)
        receivers = self._assignment().holders(layer)
        if self._name in receivers:
            self._store_part(message)
        others = [name for name in receivers if name != self._name]
        if others:
            await self._transmit(others, message, self.until)

    def take_outputs(self, layer: int, batch: int, samples: int) -> ReceivedParts:
        """Remove and return the received outputs of a layer."""
        assignment = self._assignment()
        purpose = "sharing" if layer == assignment.output_layer else "forward"
        parts = self._received_parts(Outputs, batch, layer, purpose)
        # Layers of a device take outputs of different batches: those under way may still be asked for.
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
        """Remove and return the received losses of a layer's own neurons, sent by the next layer.

        Later arrivals for earlier batches are dropped.
        """
        assignment = self._assignment()
        own_neurons = assignment.neurons_of(self._name, layer)
        own_values = elements_of(own_neurons, self._values[layer])
        sending = layer + 1
        parts = self._received_parts(Losses, batch, sending, "backward", own_values)
        self._discard_before(Losses, batch)
        return ReceivedParts(
            sending,
            batch,
            samples,
            neurons=assignment.sizes[sending],
            parts=parts,
        )

    def _received_parts(
        self,
        kind: type[Values],
        batch: int,
        layer: int,
        purpose: str,
        own: Channels | None = None,
    ) -> tuple[SenderPart, ...]:
        """Return the parts sent by a layer's holders; for losses, only the part for the ``own`` values."""
        arrived = self._arrived.pop((kind, batch, layer), {})
        holders = self._assignment().layers[layer]
        tally = self.tally[purpose]
        parts: list[SenderPart] = []
        # Added to the tally at once: single additions would round differently.
        share: float = 0
        for sender, neurons in holders.items():
            message = arrived.get(sender)
            if sender != self._name:
                tally.expected += 1
                # A message that the method ignores was received all the same.
                if message is not None:
                    share += present_share(message.missing.get("tensor"))
            parts.append(self._received_part(message, neurons, sender, own))
        tally.received += share
        return tuple(parts)

    def _received_part(
        self,
        message: Values | None,
        assigned: Channels,
        sender: str,
        own: Channels | None,
    ) -> SenderPart:
        """Return the part of one sender; arguments as in `_received_parts`, ``assigned`` the sender's neurons."""
        absent = SenderPart(sender, assigned, None)
        if message is None:
            if self._notes is not None:
                self._notes.note_missing(sender)
            return absent
        neurons: Channels | None = assigned
        if self._notes is not None:
            neurons = self._notes.read_note(message)
        if neurons is None:
            return absent
        tensor = message.tensor
        missing = message.missing.get("tensor")
        if own is not None and tensor is not None:
            tensor = pick(tensor, 1, own)
            if missing is not None:
                missing = pick(missing, 1, own)
        # The own values may all have arrived though others of the message are missing.
        if missing is not None and not missing.any():
            missing = None
        return SenderPart(sender, neurons, tensor, message.note, missing)


def _fill_gaps(first: Values, again: Values) -> Values:
    """Return the first copy of a message with values of the repetition in its gaps."""
    if first is again or not first.missing:
        return first
    # A message without values cannot fill gaps.
    if first.tensor is None or again.tensor is None:
        return first
    gaps = first.missing["tensor"]
    tensor = torch.where(gaps, again.tensor, first.tensor)
    remaining = torch.zeros_like(gaps)
    if again.missing:
        remaining = gaps & again.missing["tensor"]
    missing = {"tensor": remaining} if remaining.any() else {}
    return replace(first, tensor=tensor, missing=missing)
