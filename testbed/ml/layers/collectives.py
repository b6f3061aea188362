"""Collective operations among several devices, as in MPI and ``torch.distributed``.

Every member of a group of devices calls the same operation and receives its part of the result: for example, after an
all-reduce all members have the sum of their tensors. The root of an operation is the member that has its input, or that
receives its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from testbed.device import Cost, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import ConfigurationMessage
from testbed.ml.layers.shard import State
from testbed.ml.lazy import torch


@dataclass(frozen=True)
class Contribution(
    ConfigurationMessage,
    kind="collective",
    key=("group", "operation", "step", "sender"),
):
    """Message from one group member to another for one step of an operation."""

    group: int
    """Number of the group."""
    operation: int
    """Number of the operation, counted from 0 in each group."""
    step: int
    """Number of the message within the operation, from 0; only `Group.all_reduce` has several steps."""
    tensors: State
    """The payload by name; a single tensor has the name ``""``."""


_SINGLE = ""
"""Name of the tensor in a message with a single tensor."""


class Group:
    """Devices calling the same operations in the same order; the program's mailbox must register `Contribution`.

    Operations match by their order, so concurrent activities, such as two requests at once, need separate groups with
    distinct numbers. An operation waits for every member, also for a failed one: a program that survives the loss of
    devices opens another configuration of its mailbox, which cancels operations of the previous configuration. An
    operation returns when this device has its result; messages to other members may still wait in the mailbox, and are
    discarded if it closes.

    Example, in the program of every member::

        async with Mailbox(device, links, (Contribution,)) as mailbox:
            group = Group(mailbox, members)
            total = await group.all_reduce(torch.ones(3))
    """

    def __init__(
        self, mailbox: Mailbox, members: Sequence[str], number: int = 0
    ) -> None:
        """``members`` are the names of all members, this device included, in the same order on every member."""
        self.members = tuple(members)
        self.device = mailbox.device
        self.rank = self.members.index(self.device.name)
        """Index of this device in ``members``."""
        self._mailbox = mailbox
        self._number = number
        self._operations = count()

    async def broadcast(self, tensor: torch.Tensor | None, root: str) -> torch.Tensor:
        """Return the root's tensor, of any shape, on every member; other members pass None."""
        states = None
        if tensor is not None:
            states = [{_SINGLE: tensor}] * len(self.members)
        received = await self.scatter(states, root)
        return received[_SINGLE]

    async def scatter(self, states: Sequence[State] | None, root: str) -> State:
        """Return to each member one entry of the root's ``states``, which are in member order; others pass None."""
        operation = next(self._operations)
        if states is None:
            return await self._receive_part(operation, root)
        for member, state in zip(self.members, states, strict=True):
            self._send_part(operation, member, state)
        return states[self.rank]

    async def gather(
        self, tensor: torch.Tensor, root: str
    ) -> list[torch.Tensor] | None:
        """Return on the root the tensors of all members, of any shapes, in member order; None elsewhere."""
        operation = next(self._operations)
        if self.device.name != root:
            self._send_part(operation, root, {_SINGLE: tensor})
            return None
        return await self._collect_parts(operation, tensor)

    async def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return on every member the tensors of all members, of any shapes, in member order."""
        operation = next(self._operations)
        for member in self.members:
            self._send_part(operation, member, {_SINGLE: tensor})
        return await self._collect_parts(operation, tensor)

    async def _collect_parts(
        self, operation: int, own: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the parts of all members in member order; ``own`` is the part of this device."""
        parts = []
        for member in self.members:
            if member == self.device.name:
                parts.append(own)
            else:
                state = await self._receive_part(operation, member)
                parts.append(state[_SINGLE])
        return parts

    async def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return on every member the sum of all tensors, which have one shape; the sums are bitwise equal.

        A ring all-reduce: the tensor is divided into as many parts as there are n members, and each link of the ring
        carries 2 (n - 1) / n of the tensor. The additions take the device's time.
        """
        operation = next(self._operations)
        size = len(self.members)
        parts = list(tensor.flatten().tensor_split(size))
        successor = self.members[(self.rank + 1) % size]
        predecessor = self.members[self.rank - 1]
        # In the first n - 1 steps (reduce-scatter) each part goes round the ring and every member adds its own values;
        # in the second n - 1 steps (all-gather) each complete sum goes round once. All members receive the same bits,
        # since the sum of a part is computed once, by one chain of additions.
        for step in range(2 * (size - 1)):
            is_summing = step < size - 1
            # The first step sends the part with the member's own rank, and each later step the part received in the
            # step before.
            sent = (self.rank - step) % size
            self._send_part(operation, successor, {_SINGLE: parts[sent]}, step)
            state = await self._receive_part(operation, predecessor, step)
            part = state[_SINGLE]
            # The predecessor's rank is one less, and so is the part that it sends.
            received = (sent - 1) % size
            if is_summing:
                add = partial(torch.add, part, parts[received])
                cost = Cost(part.numel())
                span = Span("all-reduce", self._number, operation)
                part = await self.device.compute(add, cost, span)
            parts[received] = part
        return torch.cat(parts).reshape(tensor.shape)

    def _send_part(
        self, operation: int, member: str, state: State, step: int = 0
    ) -> None:
        if member == self.device.name:
            return
        part = Contribution(
            configuration=self._mailbox.configuration,
            group=self._number,
            operation=operation,
            step=step,
            tensors=state,
        )
        self._mailbox.post(member, part)

    async def _receive_part(self, operation: int, member: str, step: int = 0) -> State:
        key = (self._number, operation, step, member)
        contribution = await self._mailbox.take(Contribution, key)
        return contribution.tensors
