"""What a member is and what it works with, for all its requests: its slices, its processor, and what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from testbed.common import formats
from testbed.common.errors import TestbedError
from testbed.common.lazy import torch
from testbed.device import Cost, Span
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.typed import Typed
from testbed.methods.distributed.dataflow import Dataflow
from testbed.models.sliced import SlicedLayer, SlicedShape


class Ledger:
    """Bytes of weights and activations that are resident, counted as tensors come and go.

    A device that would hold more than it has memory fails, as one would whose kernel has nothing left to give.
    """

    def __init__(self, device: str, memory: float) -> None:
        self.weights = 0
        self.activations = 0
        self.peak = 0
        """Most bytes of activations at once."""
        self._device = device
        self._memory = memory

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count activations of any shape that begin to be resident; raises `TestbedError` where they are too many."""
        self.activations += tensor.nbytes
        self.peak = max(self.peak, self.activations)
        if self.weights + self.activations > self._memory:
            raise TestbedError(
                f"{self._device} has {formats.size(self._memory)} of memory, and its weights "
                f"({formats.size(self.weights)}) and activations ({formats.size(self.activations)}) are more: use more "
                "devices, a smaller batch_size or fewer requests in_flight"
            )
        return tensor

    def drop(self, tensor: torch.Tensor) -> None:
        """Count activations of any shape that are resident no more."""
        self.activations -= tensor.nbytes


T = TypeVar("T")


class MemberContext:
    """A device in one configuration: its slices of the layers, its processor, its messages, its tasks."""

    def __init__(self, mailbox: Mailbox, flow: Dataflow, coordinator: str, memory: float) -> None:
        """``memory`` is what the device has, in bytes."""
        self.actions = 0
        self.computing = False
        self.flow = flow
        self.configuration = mailbox.configuration
        self.device = mailbox.device
        self.index = flow.plan.devices.index(mailbox.device.name)
        """Index of the device in the plan."""
        self.layers: dict[int, SlicedLayer | SlicedShape] = {}
        """What it holds, by layer."""
        self.ledger = Ledger(mailbox.device.name, memory)
        self.done_after: dict[int, list[int]] = {index: [] for index in range(len(flow.graph.layers))}
        """Values that the device needs no more after a layer."""
        for value, readers in flow.last.items():
            self.done_after.get(readers[self.index], []).append(value)
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until `cancel`."""
        task = self._mailbox.start(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()

    def post(self, device: int | None, message: Typed) -> None:
        """Send to a device of the plan, or to the coordinator, without waiting."""
        self._mailbox.post(self._coordinator if device is None else self.flow.plan.devices[device], message)

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Work on the device's processor, without gradients."""

        def without_gradients() -> T:
            with torch.no_grad():
                return work()

        self.computing = True
        try:
            return await self.device.compute(without_gradients, cost, span)
        finally:
            self.computing = False
            self.actions += 1
