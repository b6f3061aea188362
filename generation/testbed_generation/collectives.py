"""All-reduce: every device gets the sum of the values of all devices.

Unlike `testbed.ml.layers.collectives`, these operations also work without numerics, with messages of the right size.
`StarAllReduce` sends all values to one device, which returns the sum: two consecutive messages, all on the links of one
device. `RingAllReduce` sends parts round a ring (Patarasuk and Yuan, 2009): each link carries 2 (n - 1) / n of the
values, in 2 (n - 1) consecutive messages. `ExchangeAllReduce` sends all values to all devices, as distributed-llama
does from its version 0.7 on: each device sends n - 1 messages with all of its values. Sums are bitwise equal on all
devices.
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
    """Values of an all-reduce in a star, or a chunk of the values in a ring."""

    operation: int
    """Number of the all-reduce; the same on all devices."""
    step: int
    """Number of the message within the all-reduce."""
    values: torch.Tensor | None = None
    """None without numerics."""


@dataclass(frozen=True)
class PackedPart(TypedMessage, kind="packed-part", key=("sender", "operation")):
    """All values of a device for an exchange, packed for transport."""

    operation: int
    """Number of the all-reduce; the same on all devices."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Empty without numerics."""


class AllReduce(Protocol):
    """Adds up values over all devices."""

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values, which have one shape.

        ``operation`` is the number of the all-reduce. Without numerics ``values`` and the result are None, and the
        messages have the bytes for values of ``size`` bytes.
        """


class StarAllReduce:
    """All-reduce at the first device, which receives the values of all devices and returns the sum."""

    def __init__(self, mailbox: Mailbox, names: Sequence[str]) -> None:
        """``names`` are all devices, in the same order on each."""
        self._mailbox = mailbox
        self._root, *self._others = names

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values."""
        padding = size if values is None else 0
        if self._mailbox.device.name != self._root:
            self._mailbox.post(self._root, Part(operation, 0, values, padding=padding))
            # Step 0 is the message to the root, step 1 the answer.
            answer = await self._mailbox.take(Part, (self._root, operation, 1))
            return answer.values
        # Added in the order of the devices instead of arrival: the order decides how a sum is rounded, and texts must
        # not depend on times.
        for name in self._others:
            part = await self._mailbox.take(Part, (name, operation, 0))
            if values is not None and part.values is not None:
                values = values + part.values
        for name in self._others:
            self._mailbox.post(name, Part(operation, 1, values, padding=padding))
        return values


class RingAllReduce:
    """All-reduce round a ring: one pass adds up parts of the values, a second pass distributes the sums."""

    def __init__(self, mailbox: Mailbox, names: Sequence[str]) -> None:
        """``names`` are all devices in the order of the ring."""
        self._mailbox = mailbox
        self._names = names
        self._index = names.index(mailbox.device.name)

    async def all_reduce(
        self, operation: int, values: Tensor | None, size: int
    ) -> Tensor | None:
        """Return the sum of all devices' values."""
        device_count = len(self._names)
        successor = self._names[(self._index + 1) % device_count]
        # The predecessor of the first device, by index -1, is the last device.
        predecessor = self._names[self._index - 1]
        chunks = None if values is None else list(values.flatten().chunk(device_count))
        if chunks is not None:
            # With fewer values than devices some chunks are empty, so that all devices take the same steps.
            chunks += [chunks[0][:0]] * (device_count - len(chunks))
        for step in range(2 * (device_count - 1)):
            # In the first pass a device adds its own chunk to the received one; in the second pass sums replace chunks.
            is_adding = step < device_count - 1
            sent_index = (self._index - step) % device_count
            received_index = (sent_index - 1) % device_count
            sent = None if chunks is None else chunks[sent_index]
            padding = size // device_count if chunks is None else 0
            # Sent before waiting: if all devices waited first, the ring would deadlock.
            self._mailbox.post(successor, Part(operation, step, sent, padding=padding))
            part = await self._mailbox.take(Part, (predecessor, operation, step))
            if chunks is None or part.values is None:
                continue
            if is_adding:
                chunks[received_index] = chunks[received_index] + part.values
            else:
                chunks[received_index] = part.values
        if chunks is None or values is None:
            return None
        return torch.cat(chunks).view(values.shape)


class ExchangeAllReduce:
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
        local_name = self._mailbox.device.name
        others = [name for name in self._names if name != local_name]
        padding = self._transport.size(size // VALUE_BYTES) if values is None else 0
        part = PackedPart(operation, self._transport.pack(values), padding=padding)
        for name in others:
            self._mailbox.post(name, part)
        # Sums are equal only if all devices add the same rounded values, their own included, in the same order.
        parts = {local_name: self._transport.round_trip(values)}
        for name in others:
            received = await self._mailbox.take(PackedPart, (name, operation))
            if values is not None:
                shape = tuple(values.shape)
                parts[name] = self._transport.unpack(received.tensors, shape)
        # Added in the order of the devices, as in `StarAllReduce`.
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
    """Return the all-reduce of the option ``reduce``; only an exchange packs values for transport."""
    match name:
        case "star":
            return StarAllReduce(mailbox, names)
        case "ring":
            return RingAllReduce(mailbox, names)
        case "exchange":
            return ExchangeAllReduce(mailbox, names, transport)
