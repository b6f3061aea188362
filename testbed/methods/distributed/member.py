"""One device of a fully distributed inference in one configuration: computes its parts, exchanges what they need.

Sending overlaps with computing wherever the data allow it. A layer is computed from the pieces of its input that are
here while others are still on their way, and its output leaves chunk by chunk, each as soon as it is computed.
Requests under way at the same time share the processor and the links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from testbed.device import Cost, Device, Span
from testbed.methods.base import Problem
from testbed.methods.distributed.ledger import Ledger
from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.ranges import Range
from testbed.methods.distributed.partition.resources import parameters
from testbed.methods.distributed.partition.roles import Role
from testbed.methods.distributed.partition.storage import as_range, operations_stored, stored
from testbed.methods.distributed.store import Block, Store
from testbed.methods.parts import messages
from testbed.methods.parts.shard import State
from testbed.methods.parts.worker import Worker
from testbed.models.shapes import INPUT
from testbed.wire import Message

if TYPE_CHECKING:
    import torch

    from testbed.models.sliced import SlicedLayer

T = TypeVar("T")

PIECE = "piece"
SUMS = "sums"
TILE = "tile"
TILED = "tiled"
"""Kinds of messages between members, all with configuration and request; see `Member.put`."""

SPAN = "forward"


class Member:
    """A device's part of every request, for as long as the configuration lasts."""

    def __init__(
        self,
        device: Device,
        problem: Problem,
        flow: Dataflow,
        configuration: int,
        worker: Worker,
    ) -> None:
        self.actions = 0
        self.computing = False
        self.ledger = Ledger(device.name, problem.device(device.name).memory)
        self._device = device
        self._problem = problem
        self._flow = flow
        self.configuration = configuration
        self._worker = worker
        self._index = flow.plan.devices.index(device.name)
        self._stores: dict[int, Store] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._layers: dict[int, SlicedLayer] = {}
        self._tiles = flow.plan.tiles
        self._reported = -1
        self._last = {value: readers[self._index] for value, readers in flow.last.items()}
        self._done_after = {
            index: [value for value, reader in self._last.items() if reader == index]
            for index in range(len(flow.graph.operations))
        }

    def put(self, message: Message) -> None:
        """Take in a message.

        ``activation`` (from the lead, batch): a request's image, on the source. ``piece`` (request, value, first):
        elements of a layer's output. ``sums`` (request, layer, first, last): of these output channels. ``tile``
        (request, tile): a tile's region of the image; ``tiled``: what came out of it.
        """
        self.actions += 1
        tensor = message.tensors[messages.TENSOR]
        if message.kind == messages.ACTIVATION:
            self._begin(message["batch"], tensor)
            return
        request, sender = message["request"], self._flow.plan.devices.index(message.sender)
        store = self._store(request)
        if message.kind == PIECE:
            self._arrived(request, message["value"], message["first"], tensor, sender)
        elif message.kind == SUMS:
            store.put_sums(message["layer"], Range(message["first"], message["last"]), sender, tensor)
        elif message.kind == TILE:
            self._start(self._tile(request, message["tile"], tensor))
        elif message.kind == TILED:
            self._place(request, message["tile"], tensor)

    async def run(self, state: State | None) -> None:
        """Get the weights, say so to the lead, and answer requests until cancelled."""
        flow, index, model = self._flow, self._index, self._problem.model

        def load() -> None:
            from testbed.models.sliced import SlicedLayer, draw

            tensors = draw(model, operations_stored(flow, index), self._problem.seed) if state is None else state
            for layer, part in stored(flow, index).items():
                self._layers[layer] = SlicedLayer(flow.graph.operations[layer], part, tensors)
            self.ledger.weights = sum(tensor.nbytes for tensor in tensors.values())

        # One operation for each value, as `costs.copy` has it for a stage without momentum.
        await self._compute(load, Cost(float(parameters(flow, index))), Span("load"))
        self._report()
        self._tell(self._worker.lead, messages.CONFIGURED, incarnation=self._worker.incarnation)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for task in [*self._answering.values()]:
                task.cancel()

    def _store(self, request: int) -> Store:
        """Return what is here of a request, beginning to answer it where nothing is yet."""
        if request not in self._stores:
            self._stores[request] = Store(self.ledger)
            task = self._worker.background.start(self._answer(request))
            self._answering[request] = task
            task.add_done_callback(lambda _: self._answering.pop(request, None))
        return self._stores[request]

    def _start(self, work: Any) -> None:
        task = self._worker.background.start(work)
        self._answering[id(task)] = task
        task.add_done_callback(lambda _: self._answering.pop(id(task), None))

    def _tell(self, peer: str, kind: str, tensor: torch.Tensor | None = None, **fields: Any) -> None:
        tensors = {} if tensor is None else {messages.TENSOR: tensor}
        self._worker.outbox.post(peer, kind, tensors, configuration=self.configuration, **fields)

    async def _compute(self, work: Callable[[], T], cost: Cost, span: Span) -> T:
        def without_gradients() -> T:
            import torch

            with torch.no_grad():
                return work()

        self.computing = True
        try:
            return await self._device.compute(without_gradients, cost, span)
        finally:
            self.computing = False
            self.actions += 1

    def _begin(self, request: int, images: torch.Tensor) -> None:
        """Spread a request's images, (samples, channels, height, width)."""
        store = self._store(request)
        if not self._tiles:
            self._made(request, INPUT, 0, images.flatten(1))
            return
        store.image = self.ledger.hold(images)
        for number, tile in enumerate(self._tiles):
            region = tile.regions[0]
            part = images[:, :, region.top : region.bottom, region.left : region.right]
            if tile.device == self._index:
                self._start(self._tile(request, number, part))
            else:
                self._tell(self._flow.plan.devices[tile.device], TILE, part.contiguous(), request=request, tile=number)

    async def _tile(self, request: int, number: int, inputs: torch.Tensor) -> None:
        """Compute the early layers of one tile."""
        from testbed.methods.distributed.partition.tiles import multiplications
        from testbed.methods.distributed.tile_compute import compute_tile

        count, tile = self._flow.tiled, self._tiles[number]
        layers = self._flow.graph.operations[:count]
        sliced = [self._layers[index] for index in range(count)]
        # On the source they are a part of the image.
        own = self._index == self._flow.plan.source
        if not own:
            self.ledger.hold(inputs)
        outputs = await self._compute(
            lambda: compute_tile(sliced, tile, inputs, self.ledger),
            Cost(2.0 * len(inputs) * sum(multiplications(layers, tile))),
            Span(SPAN, request, 0),
        )
        if own:
            self._place(request, number, outputs)
        else:
            self.ledger.drop(inputs)
            self._tell(self._worker.lead, TILED, outputs, request=request, tile=number)

    def _place(self, request: int, number: int, outputs: torch.Tensor) -> None:
        """Collect tiles on the source; spread the map when all are there."""
        value, store = self._flow.tiled - 1, self._store(request)
        map_ = store.collect(outputs, self._tiles[number].regions[-1], self._flow.graph.operations[value].output)
        if store.collected == len(self._tiles):
            store.uncollect()
            self._made(request, value, 0, map_.flatten(1))

    async def _answer(self, request: int) -> None:
        """Do this device's part of every layer, in their order."""
        flow, store = self._flow, self._stores[request]
        for index in range(flow.tiled, len(flow.graph.operations)):
            role = flow.roles[index][self._index]
            if role.work == "outputs":
                await self._outputs(request, store, index, role)
            elif role.work == "sums":
                await self._sums(request, store, index, role)
            elif role.work != "none":
                await self._entire(request, store, index, role)
            for value in self._done_after[index]:
                store.forget(value)
        if self._index == flow.plan.source:
            blocks = await store.all_of(flow.result())
            output = joined(blocks).reshape(-1, *self._problem.model.units[-1].output)
            self._tell(self._worker.lead, messages.OUTPUT, output, work=messages.INFER, batch=request)
        store.clear()
        del self._stores[request]
        self._report()

    async def _outputs(self, request: int, store: Store, index: int, role: Role) -> None:
        """Compute output channels from all of the input, piece by piece as it comes.

        What is added last is computed chunk by chunk, each being sent while the next is computed.
        """
        part, layer = self._layers[index], self._flow.graph.operations[index]
        origins = self._flow.origins(index, role.takes)
        used: set[Range] = set()
        total: torch.Tensor | None = None
        while True:
            fresh = [block for block in store.blocks(origins) if block[0] not in used]
            if not fresh:
                await store.news()
                continue
            used.update(taken for taken, _ in fresh)
            share = sum(taken.size for taken, _ in fresh) / layer.inputs
            if sum(taken.size for taken in used) == role.takes.size:
                break
            added = await self._compute(
                partial(self._added, part, index, fresh, role.makes, total),
                self._cost(index, share * role.makes.size, fresh),
                Span(SPAN, request, index),
            )
            if total is None:
                self.ledger.hold(added)
            total = added
        for chunk in self._flow.chunks(index, role.makes):
            before = None
            if total is not None:
                each = layer.pixels
                before = total[:, (chunk.first - role.makes.first) * each : (chunk.last - role.makes.first) * each]
            made = await self._compute(
                partial(self._finished, part, index, fresh, chunk, before),
                self._cost(index, share * chunk.size, fresh),
                Span(SPAN, request, index),
            )
            self._made(request, index, chunk.first * layer.pixels, made)
        if total is not None:
            self.ledger.drop(total)

    async def _sums(self, request: int, store: Store, index: int, role: Role) -> None:
        """Compute sums of all outputs, each merger's part for it, its own last; then merge what all have sent."""
        part, layer = self._layers.get(index), self._flow.graph.operations[index]
        roles = self._flow.roles[index]
        if role.takes.size:
            assert part is not None
            blocks = await store.all_of(self._flow.origins(index, role.takes))
            share = role.takes.size / layer.inputs
            for step in range(1, len(roles) + 1):
                merger = (self._index + step) % len(roles)
                for chunk in self._flow.chunks(index, roles[merger].makes):
                    added = await self._compute(
                        partial(self._added, part, index, blocks, chunk, None),
                        self._cost(index, share * chunk.size, blocks),
                        Span(SPAN, request, index),
                    )
                    if merger == self._index:
                        store.put_sums(index, chunk, merger, added)
                    else:
                        fields = {"request": request, "layer": index, "first": chunk.first, "last": chunk.last}
                        self._tell(self._flow.plan.devices[merger], SUMS, added, **fields)
        count = sum(each.takes.size > 0 for each in roles)
        for chunk in self._flow.chunks(index, role.makes):
            assert part is not None
            sums = await store.sums(index, chunk, count)
            made = await self._compute(
                partial(_merged, part, sums, chunk),
                # An addition for each value that is merged.
                Cost(float(sum(each.numel() for each in sums[1:]))),
                Span(SPAN, request, index),
            )
            self._made(request, index, chunk.first * layer.pixels, made)

    async def _entire(self, request: int, store: Store, index: int, role: Role) -> None:
        """Compute a layer as it is, or pool some channels."""
        layer = self._flow.graph.operations[index]
        if role.work == "whole" and layer.splits:
            await self._outputs(request, store, index, role)
            return
        blocks = await store.all_of(self._flow.origins(index, role.takes))

        def work() -> torch.Tensor:
            return self._layers[index].run(joined(blocks))

        made = await self._compute(
            work,
            Cost(2.0 * len(blocks[0][1]) * layer.multiplications),
            Span(SPAN, request, index),
        )
        first = role.makes.first * layer.pixels
        self._made(request, index, first, made)

    def _cost(self, index: int, channels: float, blocks: list[Block]) -> Cost:
        """Return the cost of so many output channels from all of the input."""
        layer = self._flow.graph.operations[index]
        return Cost(2.0 * len(blocks[0][1]) * layer.multiplications * channels / layer.output_channels)

    def _added(
        self, part: SlicedLayer, index: int, blocks: list[Block], made: Range, before: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what blocks of the input add to some output channels, and what was there before."""
        layer = self._flow.graph.operations[index]
        each = layer.inputs // layer.input_channels
        total = before
        for taken, inputs in blocks:
            sums = part.sums(inputs, range(taken.first // each, taken.last // each), as_range(made))
            total = sums if total is None else total + sums
        assert total is not None
        return total

    def _finished(
        self, part: SlicedLayer, index: int, blocks: list[Block], made: Range, before: torch.Tensor | None
    ) -> torch.Tensor:
        return part.finish(self._added(part, index, blocks, made, before), as_range(made))

    def _made(self, request: int, value: int, first: int, tensor: torch.Tensor) -> None:
        """Send what this device has made of a value to those that need it, and keep it for itself."""
        part = Range(first, first + tensor.shape[1])
        self.ledger.drop(self.ledger.hold(tensor))
        for receiver, wanted in self._flow.receivers(value, self._index, part):
            self._send(request, value, receiver, wanted, part, tensor)
        self._keep(request, value, part, tensor)

    def _arrived(self, request: int, value: int, first: int, tensor: torch.Tensor, maker: int) -> None:
        """Keep what another device has made; the source may have to send it on."""
        part = Range(first, first + tensor.shape[1])
        if self._flow.way == "source" and self._index == self._flow.plan.source:
            for receiver, wanted in self._flow.forwarded(value, maker, part):
                self._send(request, value, receiver, wanted, part, tensor)
        self._keep(request, value, part, tensor)

    def _send(self, request: int, value: int, receiver: int, wanted: Range, part: Range, tensor: torch.Tensor) -> None:
        sent = tensor[:, wanted.first - part.first : wanted.last - part.first].contiguous()
        self._tell(self._flow.plan.devices[receiver], PIECE, sent, request=request, value=value, first=wanted.first)

    def _keep(self, request: int, value: int, part: Range, tensor: torch.Tensor) -> None:
        if self._last[value] >= 0:
            self._stores[request].put(value, part.first, tensor)

    def _report(self) -> None:
        """Record what is held, when it is more than ever before."""
        if self.ledger.peak > self._reported:
            self._reported = self.ledger.peak
            self._device.record("memory", weights=self.ledger.weights, activations=self.ledger.peak)


def joined(blocks: list[Block]) -> torch.Tensor:
    """Put blocks of an input together, (samples, elements)."""
    import torch

    return blocks[0][1] if len(blocks) == 1 else torch.cat([values for _, values in blocks], dim=1)


def _merged(part: SlicedLayer, sums: list[torch.Tensor], made: Range) -> torch.Tensor:
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return part.finish(total, as_range(made))
