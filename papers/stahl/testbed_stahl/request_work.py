"""The work of one member (a device of a distributed inference) for one request.

`MemberContext` is the state that all requests of the member share: slices of weights, processor and memory. `Store`
keeps received values, and `RequestWork` computes the member's part of every layer.

Sending overlaps with computing where data dependencies allow: a layer is computed from the pieces of its input that
have arrived while other pieces are in transit, and chunks of its output are sent as soon as they are computed. Values
are (samples, elements). `testbed_stahl.dataflow` explains values, pieces and tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from testbed.common import formats
from testbed.common.errors import TestbedError
from testbed.device import Cost, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.lazy import torch
from testbed.ml.models.chain import forward_of
from testbed.ml.models.sliced import SlicedLayer, SlicedShape
from testbed.ml.pipeline.messages import Output
from testbed_stahl.dataflow import Dataflow, LayerTask, Origin, as_range, is_chunked
from testbed_stahl.messages import OutputPiece, PartialSums
from testbed_stahl.plan import Range, intersection, scaled, shifted, total_size


class Ledger:
    """The bytes of weights and activations in a device's memory, counted as tensors are stored and released.

    A device fails if the bytes exceed its memory, like a process that the kernel kills.

    >>> ledger = Ledger("pi", memory=1000)
    >>> ledger.drop(ledger.hold(torch.zeros(1, 100)))
    >>> ledger.activations, ledger.peak
    (0, 400)
    """

    def __init__(self, device: str, memory: float) -> None:
        self.weights = 0
        self.activations = 0
        self.peak = 0
        """Peak bytes of activations."""
        self._device = device
        self._memory = memory

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor of any shape, and return it; raises `TestbedError` if the memory is exceeded."""
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
        """Count a tensor of any shape as released."""
        self.activations -= tensor.nbytes


T = TypeVar("T")


class MemberContext:
    """The state of a member that all its requests share: slices of layers, processor, memory, messages and tasks."""

    def __init__(
        self, mailbox: Mailbox, flow: Dataflow, coordinator: str, memory: float
    ) -> None:
        """``memory`` is the memory of the device in bytes."""
        self.actions = 0
        """Number of computations and received messages, by which the supervisor notices progress."""
        self.computing = False
        """Whether the device computes right now."""
        self.flow = flow
        self.configuration = mailbox.configuration
        self.device = mailbox.device
        self.index = flow.plan.devices.index(mailbox.device.name)
        """Index of the device in the plan."""
        self.layers: dict[int, SlicedLayer | SlicedShape] = {}
        """Stored slices by layer."""
        self.ledger = Ledger(mailbox.device.name, memory)
        self.done_after: dict[int, list[int]] = {}
        """Layer -> values that the device does not need after this layer."""
        for value, last_readers in flow.last_readers.items():
            last_reader = last_readers[self.index]
            values = self.done_after.setdefault(last_reader, [])
            values.append(value)
        self._mailbox = mailbox
        self._coordinator = coordinator
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, which `cancel` ends."""
        task = self._mailbox.start(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    def post(self, device: int | None, message: TypedMessage) -> None:
        """Send a message to a device of the plan, or to the coordinator for None, without waiting."""
        name = self._coordinator
        if device is not None:
            name = self.flow.plan.devices[device]
        self._mailbox.post(name, message)

    async def compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        """Compute on the device's processor, without gradients."""

        def without_gradients() -> T:
            with torch.no_grad():
                return work()

        self.computing = True
        try:
            return await self.device.compute(without_gradients, cost, span)
        finally:
            self.computing = False
            self.actions += 1


Block = tuple[Range, "torch.Tensor"]
"""Elements of a layer's input, and their values as (samples, elements)."""


class Store:
    """Received pieces of values and partial sums, kept until their last use.

    >>> store = Store(Ledger("pi", memory=1000))
    >>> store.put(value=3, first=0, tensor=torch.zeros(1, 10))
    >>> [part for part, _ in store.blocks([Origin(value=3, part=Range(4, 8), at=0)])]
    [Range(first=0, last=4)]
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pieces: dict[int, list[tuple[Range, torch.Tensor]]] = {}
        """Elements of each value with their tensors, in the order of arrival."""
        self._sums: dict[tuple[int, Range], dict[int, torch.Tensor]] = {}
        """By layer and range of output channels, then by device: partial sums."""
        self._waiter: asyncio.Future[None] | None = None
        """Completed by the next arrival."""

    def put(self, value: int, first: int, tensor: torch.Tensor) -> None:
        """Store elements of a value starting at ``first``, (samples, elements)."""
        part = Range(first, first + tensor.shape[1])
        pieces = self._pieces.setdefault(value, [])
        pieces.append((part, self._ledger.hold(tensor)))
        self._wake_waiter()

    def put_sums(
        self, layer: int, made: Range, device: int, tensor: torch.Tensor
    ) -> None:
        """Store a device's partial sums for some output channels of a layer, (samples, elements)."""
        by_device = self._sums.setdefault((layer, made), {})
        by_device[device] = self._ledger.hold(tensor)
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_for_arrival(self) -> None:
        """Wait until another piece, or other partial sums, arrive."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def blocks(self, origins: Iterable[Origin]) -> list[Block]:
        """Return the received parts of a layer's input, in element order."""
        blocks: list[Block] = []
        for origin in origins:
            # From elements of the value to elements of the layer's input.
            offset = origin.at - origin.part.first
            for part, tensor in self._pieces.get(origin.value, ()):
                common = intersection(part, origin.part)
                if common.size:
                    values = _cut_columns(tensor, part, common)
                    blocks.append((shifted(common, offset), values))
        # By the ranges, since tensors cannot be compared.
        return sorted(blocks, key=lambda block: block[0])

    async def wait_for_input(self, origins: tuple[Origin, ...]) -> list[Block]:
        """Wait until the input of a layer is complete; return the blocks in element order."""
        wanted = sum(origin.part.size for origin in origins)
        blocks = self.blocks(origins)
        while _count_elements(blocks) < wanted:
            await self.wait_for_arrival()
            blocks = self.blocks(origins)
        return blocks

    async def sums(self, layer: int, made: Range, count: int) -> list[torch.Tensor]:
        """Wait for the sums of ``count`` devices; release and return them in device order."""
        key = (layer, made)
        while len(self._sums.get(key, ())) < count:
            await self.wait_for_arrival()
        by_device = self._sums.pop(key)
        for tensor in by_device.values():
            self._ledger.drop(tensor)
        # In the order of the devices: the sum of floats depends on the order, and must not depend on the arrivals.
        return [by_device[device] for device in sorted(by_device)]

    def forget(self, value: int) -> None:
        """Drop a value."""
        for _, tensor in self._pieces.pop(value, ()):
            self._ledger.drop(tensor)

    def clear(self) -> None:
        """Drop all values and partial sums."""
        for value in list(self._pieces):
            self.forget(value)
        for sums in self._sums.values():
            for tensor in sums.values():
                self._ledger.drop(tensor)
        self._sums.clear()


SPAN = "forward"
"""Name of the span of every computation of a layer, for which faults can wait."""


class RequestWork:
    """The work of a member for one request."""

    def __init__(self, member: MemberContext, number: int) -> None:
        self.number = number
        self.store = Store(member.ledger)
        self._member = member
        self._flow = member.flow
        self._layers = member.flow.graph.layers
        is_source = member.index == member.flow.plan.source
        self._collects = is_source and member.flow.exchange == "via-source"
        """Whether this device is the source and forwards the outputs of all others."""
        self._collected: dict[int, list[tuple[int, Range, torch.Tensor]]] = {}
        """Value -> (maker, elements, tensor) of each part that the source has not forwarded yet."""

    async def run(self) -> None:
        """Compute this device's part of every layer in order; submit the result on the source."""
        member = self._member
        for index in range(self._flow.tiled_count, len(self._layers)):
            task = self._flow.tasks[index][member.index]
            if task.work == "sums":
                await self._compute_by_inputs(index, task)
            elif is_chunked(self._layers[index], task):
                await self._compute_by_outputs(index, task)
            elif task.work != "none":
                await self._compute_whole(index, task)
            # No later layer on this device reads these values.
            for value in member.done_after.get(index, ()):
                self.store.forget(value)
        if member.index == self._flow.plan.source:
            blocks = await self.store.wait_for_input(self._flow.result())
            result = _join_blocks(blocks)
            shaped = result.reshape(-1, *self._layers[-1].output)
            output = Output(member.configuration, "infer", self.number, shaped)
            member.post(None, output)
        self.store.clear()

    # Divided layers.

    async def _compute_by_outputs(self, index: int, task: LayerTask) -> None:
        """Compute some output channels from all inputs (LOP), adding up the products of input pieces as they arrive.

        The products of the last pieces are computed in chunks of output channels, and each chunk is sent while the next
        one is computed.
        """
        pixels = self._layers[index].pixels
        total = None
        used: set[Range] = set()
        blocks = await self._new_blocks(index, task, used)
        # While input is missing: the products of the blocks so far are added up.
        while total_size(used) < task.input_range.size:
            work = partial(
                self._add_products, index, blocks, task.output_channels, total
            )
            cost = self._product_cost(index, blocks, task.output_channels.size)
            added = await self._compute_layer(index, work, cost)
            # The new sums replace the former ones of the same size, so the ledger counts them once.
            if total is None:
                self._member.ledger.hold(added)
            total = added
            blocks = await self._new_blocks(index, task, used)
        whole_part = scaled(task.output_channels, pixels)
        for chunk in self._flow.chunks(index, task.output_channels):
            before = None
            if total is not None:
                before = _cut_columns(total, whole_part, scaled(chunk, pixels))
            work = partial(self._finish_channels, index, blocks, chunk, before)
            cost = self._product_cost(index, blocks, chunk.size)
            cost += self._finish_cost(index, chunk.size, _samples_of(blocks))
            made = await self._compute_layer(index, work, cost)
            self._publish(index, chunk.first * pixels, made)
        if total is not None:
            self._member.ledger.drop(total)

    async def _new_blocks(
        self, index: int, task: LayerTask, used: set[Range]
    ) -> list[Block]:
        """Wait for input of a layer that is not in ``used``, add its ranges to ``used``, and return its blocks."""
        origins = self._flow.origins(index, task.input_range)
        if self._flow.settings.options.layerwise:
            # With this option a device computes only after all input has arrived.
            await self.store.wait_for_input(origins)
        while True:
            unused = []
            for taken, values in self.store.blocks(origins):
                if taken not in used:
                    unused.append((taken, values))
            if unused:
                used.update(taken for taken, _ in unused)
                return unused
            await self.store.wait_for_arrival()

    async def _compute_by_inputs(self, index: int, task: LayerTask) -> None:
        """Compute partial sums of all outputs from some inputs (LIP), then merge all devices' sums of some outputs."""
        if task.input_range.size:
            await self._send_sums(index, task)
        senders = 0
        for device_task in self._flow.tasks[index]:
            if device_task.input_range.size > 0:
                senders += 1
        for chunk in self._flow.chunks(index, task.output_channels):
            sums = await self.store.sums(index, chunk, senders)
            # Merging takes an addition for each value of all tensors but the first.
            additions = sum(tensor.numel() for tensor in sums[1:])
            cost = Cost(additions)
            cost += self._finish_cost(index, chunk.size, len(sums[0]))
            work = partial(self._merge_sums, index, sums, chunk)
            made = await self._compute_layer(index, work, cost)
            first = chunk.first * self._layers[index].pixels
            self._publish(index, first, made)

    async def _send_sums(self, index: int, task: LayerTask) -> None:
        """Compute the partial sums for each merger, and send them; those that this device merges come last."""
        tasks = self._flow.tasks[index]
        own = self._member.index
        origins = self._flow.origins(index, task.input_range)
        blocks = await self.store.wait_for_input(origins)
        # In ring order after this device: otherwise all devices would send to the same merger first.
        for step in range(1, len(tasks) + 1):
            merger = (own + step) % len(tasks)
            chunks = self._flow.chunks(index, tasks[merger].output_channels)
            for chunk in chunks:
                work = partial(self._add_products, index, blocks, chunk, None)
                cost = self._product_cost(index, blocks, chunk.size)
                added = await self._compute_layer(index, work, cost)
                if merger == own:
                    self.store.put_sums(index, chunk, own, added)
                else:
                    configuration = self._member.configuration
                    sums = PartialSums(configuration, self.number, index, *chunk, added)
                    self._member.post(merger, sums)

    def _product_cost(self, index: int, blocks: Sequence[Block], channels: int) -> Cost:
        read = _count_elements(blocks)
        one_sample = self._layers[index].product_cost(read, channels)
        return forward_of(one_sample, _samples_of(blocks))

    def _finish_cost(self, index: int, channels: int, samples: int) -> Cost:
        return forward_of(self._layers[index].finish_cost(channels), samples)

    def _add_products(
        self,
        index: int,
        blocks: Sequence[Block],
        made: Range,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the sums ``before`` of the output channels ``made`` plus the products of some blocks of the input."""
        layer = self._layers[index]
        sliced = self._member.layers[index]
        pixels = layer.inputs // layer.input_channels
        total = before
        for taken, inputs in blocks:
            channels = range(taken.first // pixels, taken.last // pixels)
            sums = sliced.sums(inputs, channels, as_range(made))
            total = sums if total is None else _add_tensors(total, sums)
        assert total is not None
        return total

    def _finish_channels(
        self,
        index: int,
        blocks: Sequence[Block],
        made: Range,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output channels ``made``: `_add_products` with the last blocks, then bias and activation."""
        total = self._add_products(index, blocks, made, before)
        sliced = self._member.layers[index]
        return sliced.finish(total, as_range(made))

    def _merge_sums(
        self, index: int, sums: Sequence[torch.Tensor], made: Range
    ) -> torch.Tensor:
        """Return the output channels ``made`` from the partial sums of all devices: the paper's Merge (Section 4.1)."""
        total = sums[0]
        for partial_sums in sums[1:]:
            total = _add_tensors(total, partial_sums)
        sliced = self._member.layers[index]
        return sliced.finish(total, as_range(made))

    async def _compute_whole(self, index: int, task: LayerTask) -> None:
        """Compute a whole layer, or some channels of a layer that treats each channel by itself."""
        layer = self._layers[index]
        sliced = self._member.layers[index]
        origins = self._flow.origins(index, task.input_range)
        blocks = await self.store.wait_for_input(origins)
        one_sample = layer.cost(task.input_range.size, task.output_channels.size)
        cost = forward_of(one_sample, _samples_of(blocks))
        made = await self._compute_layer(
            index, lambda: sliced.run(_join_blocks(blocks)), cost
        )
        first = task.output_channels.first * layer.pixels
        self._publish(index, first, made)

    async def _compute_layer(
        self, index: int, work: Callable[[], torch.Tensor], cost: Cost
    ) -> torch.Tensor:
        span = Span(SPAN, self.number, index)
        return await self._member.compute(work, cost, span)

    # The exchange.

    def take_values(
        self, value: int, first: int, tensor: torch.Tensor, maker: int
    ) -> None:
        """Store a piece of a value from the device ``maker``, (samples, elements); the source may forward it."""
        part = Range(first, first + tensor.shape[1])
        if self._collects:
            self._forward(value, part, tensor, maker)
        self._keep_part(value, part, tensor)

    def _publish(self, value: int, first: int, tensor: torch.Tensor) -> None:
        """Send a piece of a value that this device has made to its receivers, and store it if this device needs it."""
        part = Range(first, first + tensor.shape[1])
        own = self._member.index
        ledger = self._member.ledger
        # The tensor counts in the peak of the memory even if the device does not store it.
        ledger.drop(ledger.hold(tensor))
        if self._collects:
            self._forward(value, part, tensor, own)
        else:
            for receiver, wanted in self._flow.receivers(value, own, part):
                self._send_part(value, receiver, wanted, part, tensor)
        self._keep_part(value, part, tensor)

    def _forward(
        self, value: int, part: Range, tensor: torch.Tensor, maker: int
    ) -> None:
        """Forward a piece of a value; with the option `layerwise`, all pieces once the last one has arrived."""
        parts = self._collected.setdefault(value, [])
        parts.append((maker, part, tensor))
        if self._flow.settings.options.layerwise:
            own = self._flow.made_ranges[value][self._member.index].size
            arrived = total_size(elements for _, elements, _ in parts)
            if arrived < own + self._flow.collected(value):
                return
        for part_maker, elements, values in self._collected.pop(value):
            receivers = self._flow.forwarded(value, part_maker, elements)
            for receiver, wanted in receivers:
                self._send_part(value, receiver, wanted, elements, values)

    def _send_part(
        self,
        value: int,
        receiver: int,
        wanted: Range,
        part: Range,
        tensor: torch.Tensor,
    ) -> None:
        sent = _cut_columns(tensor, part, wanted).contiguous()
        configuration = self._member.configuration
        message = OutputPiece(configuration, self.number, value, wanted.first, sent)
        self._member.post(receiver, message)

    def _keep_part(self, value: int, part: Range, tensor: torch.Tensor) -> None:
        """Store a part of a value if a layer on this device reads the value, or if it is the result."""
        last_reader = self._flow.last_readers[value][self._member.index]
        if last_reader >= 0:
            self.store.put(value, part.first, tensor)

    def distribute(self, value: int, tensor: torch.Tensor) -> None:
        """Distribute the first value, (samples, elements), from the source: the images, or the map of all tiles."""
        self._publish(value, 0, tensor)


def _join_blocks(blocks: Sequence[Block]) -> torch.Tensor:
    """Concatenate blocks of an input, (samples, elements)."""
    tensors = [values for _, values in blocks]
    if len(tensors) == 1:
        return tensors[0]
    if tensors[0].is_meta:
        # Tensors without values, in timing-only runs.
        shape = (len(tensors[0]), _count_elements(blocks))
        return torch.empty(shape, device="meta")
    return torch.cat(tensors, dim=1)


def _count_elements(blocks: Iterable[Block]) -> int:
    """Return the number of elements of one sample in some blocks."""
    return total_size(part for part, _ in blocks)


def _samples_of(blocks: Sequence[Block]) -> int:
    return len(blocks[0][1])


def _cut_columns(tensor: torch.Tensor, whole: Range, part: Range) -> torch.Tensor:
    """Return a view of the elements ``part`` of a tensor with the elements ``whole``, (samples, elements)."""
    first = part.first - whole.first
    last = part.last - whole.first
    return tensor[:, first:last]


def _add_tensors(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Add two tensors; of tensors without values, in timing-only runs, return either one."""
    return more if more.is_meta else total + more
