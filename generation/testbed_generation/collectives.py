"""All-reduce: every device gets the sum of the values of all devices.

`Star` sends everything to one device and the sum back: two messages one after the other, but all on the links of
one device. `Ring` sends parts round a ring (Patarasuk and Yuan, 2009): each link carries 2 (n - 1) / n of the values,
in 2 (n - 1) messages one after the other. `Exchange` sends everything to everyone, as distributed-llama does from
its version 0.7 on: n - 1 times the values from each device, in one message. All give bitwise equal sums on all devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed_generation.costs import VALUE_BYTES
from testbed_generation.transport import Transport


@dataclass(frozen=True)
class Part(TypedMessage, kind="part", key=("sender", "operation", "step")):
    """Values of an all-reduce on their way."""

    operation: int
    """Number of the all-reduce; the same on all devices."""
    step: int
    values: torch.Tensor | None = None
    """None without numerics."""


@dataclass(frozen=True)
class PackedPart(TypedMessage, kind="packed-part", key=("sender", "operation")):
    """All values of a device for an exchange, packed for transport."""

    operation: int
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Empty without numerics."""


class AllReduce(Protocol):
    """Adds up values over all devices."""

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values; without numerics None, after messages of ``size`` bytes."""


class Star:
    """All-reduce over the first device: it receives all values, and sends the sum back."""

    def __init__(self, mailbox: Mailbox, names: Sequence[str]) -> None:
        """``names`` are all devices, in the same order on each."""
        self._mailbox = mailbox
        self._centre, *self._others = names

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values."""
        padding = size if values is None else 0
        if self._mailbox.device.name != self._centre:
            self._mailbox.post(
                self._centre, Part(operation, 0, values, padding=padding)
            )
            # Step 0 leads to the centre, step 1 back.
            total = await self._mailbox.take(Part, (self._centre, operation, 1))
            return total.values
        # In the order of the devices, not of arrival: the sum of floats depends on the order, and texts must not.
        for name in self._others:
            part = await self._mailbox.take(Part, (name, operation, 0))
            if values is not None and part.values is not None:
                values = values + part.values
        for name in self._others:
            self._mailbox.post(name, Part(operation, 1, values, padding=padding))
        return values


class Ring:
    """All-reduce round a ring: a pass for adding up parts of the values, and a pass for distributing the sums."""

    def __init__(self, mailbox: Mailbox, names: Sequence[str]) -> None:
        """``names`` are all devices in the order of the ring."""
        self._mailbox = mailbox
        self._names = names
        self._place = names.index(mailbox.device.name)

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values."""
        number = len(self._names)
        following = self._names[(self._place + 1) % number]
        # The first device has index -1 here: the last one, which closes the ring.
        before = self._names[self._place - 1]
        chunks = None if values is None else list(values.flatten().chunk(number))
        if chunks is not None:
            # Fewer values than devices: empty chunks travel as well, so that all devices take the same steps.
            chunks += [chunks[0][:0]] * (number - len(chunks))
        for step in range(2 * (number - 1)):
            # In the first half each device adds its own chunk to the received one; in the second it forwards the sums.
            is_adding = step < number - 1
            sent = (self._place - step) % number
            taken = (sent - 1) % number
            outgoing = None if chunks is None else chunks[sent]
            padding = size // number if chunks is None else 0
            # Sent before waiting: a ring whose devices all received first would wait for ever.
            self._mailbox.post(
                following, Part(operation, step, outgoing, padding=padding)
            )
            part = await self._mailbox.take(Part, (before, operation, step))
            if chunks is None or part.values is None:
                continue
            if is_adding:
                chunks[taken] = chunks[taken] + part.values
            else:
                chunks[taken] = part.values
        if chunks is None or values is None:
            return None
        return torch.cat(chunks).view(values.shape)


class Exchange:
    """All-reduce by sending all values to all devices."""

    def __init__(
        self, mailbox: Mailbox, names: Sequence[str], transport: Transport
    ) -> None:
        """``names`` are all devices, in the same order on each."""
        self._mailbox = mailbox
        self._names = names
        self._transport = transport

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values."""
        own = self._mailbox.device.name
        others = [name for name in self._names if name != own]
        padding = self._transport.size(size // VALUE_BYTES) if values is None else 0
        part = PackedPart(operation, self._transport.pack(values), padding=padding)
        for name in others:
            self._mailbox.post(name, part)
        # Sums are equal on all devices only if each adds the same rounded values in the same order, its own as well.
        parts = {own: self._transport.rounded(values)}
        for name in others:
            received = await self._mailbox.take(PackedPart, (name, operation))
            if values is not None:
                shape = tuple(values.shape)
                parts[name] = self._transport.unpack(received.tensors, shape)
        # In the order of the devices, not of arrival, as in `Star`.
        total: Tensor | None = None
        for name in self._names:
            part_values = parts.get(name)
            if part_values is not None:
                total = part_values if total is None else total + part_values
        return total


def make_all_reduce(
    name: Literal["star", "ring", "exchange"],
    mailbox: Mailbox,
    names: Sequence[str],
    transport: Transport,
) -> AllReduce:
    """Return the all-reduce of a name in scenarios; only an exchange packs values for transport."""
    match name:
        case "star":
            return Star(mailbox, names)
        case "ring":
            return Ring(mailbox, names)
        case "exchange":
            return Exchange(mailbox, names, transport)
