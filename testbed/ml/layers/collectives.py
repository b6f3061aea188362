"""Collective operations among several devices, as in MPI and ``torch.distributed``.

Every member calls the same operation, and each receives its part of the result: for example, after an all-reduce all
members have the sum of their tensors.
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
    """Number of the operation among those of the group, from 0."""
    step: int
    """Number of the message within the operation, from 0; only `Group.all_reduce` has several."""
    tensors: State
    """The payload by name; a single tensor has the name ``""``."""


_ONLY = ""
"""Name of the tensor in a message with a single one."""


class Group:
    """Devices calling the same operations in the same order; the program's mailbox must register `Contribution`.

    Operations match by their order, so concurrent activities, such as two requests under way, need separate groups with
    distinct numbers. An operation waits for missing members: a program surviving the loss of devices opens another
    configuration of its mailbox, which voids the operations of the previous one. An operation returns once this device
    has its result; pending sends are withdrawn if its mailbox closes.

    Example, in the program of every member::

        group = Group(mailbox, device, members)
        total = await group.all_reduce(torch.ones(3))
    """

    def __init__(
        self, mailbox: Mailbox, members: Sequence[str], number: int = 0
    ) -> None:
        """``members`` are the names of all members, this device included, in the same order on every member."""
        self.members = tuple(members)
        self.device = mailbox.device
        self.rank = self.members.index(self.device.name)
        """This device's place among the members."""
        self._mailbox = mailbox
        self._number = number
        self._operations = count()

    async def broadcast(self, tensor: torch.Tensor | None, root: str) -> torch.Tensor:
        """Return the root's tensor, of any shape, on every member; other members pass None."""
        states = None
        if tensor is not None:
            states = [{_ONLY: tensor}] * len(self.members)
        received = await self.scatter(states, root)
        return received[_ONLY]

    async def scatter(self, states: Sequence[State] | None, root: str) -> State:
        """Return on each member one of the root's ``states``: the root passes one for each member, others pass None."""
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
            self._send_part(operation, root, {_ONLY: tensor})
            return None
        return await self._collect_parts(operation, tensor)

    async def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return on every member the tensors of all members, of any shapes, in member order."""
        operation = next(self._operations)
        for member in self.members:
            self._send_part(operation, member, {_ONLY: tensor})
        return await self._collect_parts(operation, tensor)

    async def _collect_parts(
        self, operation: int, own: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the parts of all members in member order, ``own`` among them."""
        parts = []
        for member in self.members:
            if member == self.device.name:
                parts.append(own)
            else:
                state = await self._receive_part(operation, member)
                parts.append(state[_ONLY])
        return parts

    async def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return on every member the sum of all tensors, which have one shape; the sums are bitwise equal.

        The tensors travel round a ring in as many parts as there are members: every link carries 2 (n - 1) / n of a
        tensor. The additions take the device's time.
        """
        operation = next(self._operations)
        size = len(self.members)
        parts = list(tensor.flatten().tensor_split(size))
        following = self.members[(self.rank + 1) % size]
        before = self.members[self.rank - 1]
        for step in range(2 * (size - 1)):
            # First each part becomes a sum on its way round, then each sum goes round once more. Each part is summed
            # by one chain of members, which is why all receive the same bits.
            is_summing = step < size - 1
            # In the first step a member sends the part of its own rank, and later the part it has just received. The
            # second time round begins with the part that the member has completed, the one after its rank.
            sent = (self.rank - step) % size
            if not is_summing:
                sent = (self.rank + size - step) % size
            self._send_part(operation, following, {_ONLY: parts[sent]}, step)
            state = await self._receive_part(operation, before, step)
            received = state[_ONLY]
            place = (sent - 1) % size
            if is_summing:
                add = partial(torch.add, received, parts[place])
                cost = Cost(received.numel())
                span = Span("all-reduce", self._number, operation)
                received = await self.device.compute(add, cost, span)
            parts[place] = received
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
