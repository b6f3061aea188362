"""The early layers on one member: its tiles of all requests, what they take of each other, and the source's maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from testbed.device import Cost, Span
from testbed.methods.distributed.member_context import MemberContext
from testbed.methods.distributed.member_messages import TileInput, TileOutput, TileOverlap
from testbed.methods.distributed.partition.tiles import costs
from testbed.methods.distributed.request_work import SPAN
from testbed.methods.distributed.tile_queue import TileQueue

if TYPE_CHECKING:
    import torch


class TileWork:
    """Computes each tile as soon as all that it needs is there.

    Images and maps are (samples, channels, height, width).
    """

    def __init__(
        self, member: MemberContext, speeds: Sequence[float], spread: Callable[[int, torch.Tensor], None]
    ) -> None:
        """``speeds`` of the plan's devices in FLOP/s.

        ``spread`` is given, on the source, the number of a request and its complete map, (samples, elements).
        """
        self._member = member
        self._flow = member.flow
        self._spread = spread
        self._queue = TileQueue(member.flow, speeds) if member.flow.execution.stealing else None
        """On the source, where idle devices steal tiles."""
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        """By request and tile."""
        self._taken: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """What others lend a tile, by request and tile, then by lender."""
        self._images: dict[int, torch.Tensor] = {}
        """On the source, by request, until all tiles are done."""
        self._maps: dict[int, torch.Tensor] = {}
        self._missing: dict[int, int] = {}
        """Tiles that are not in the map, by request."""

    @property
    def _is_source(self) -> bool:
        return self._member.index == self._flow.plan.source

    def begin(self, request: int, images: torch.Tensor) -> None:
        """Send each tile its part of a request's images; on the source."""
        self._images[request] = self._member.ledger.hold(images)
        if self._queue is not None:
            self._queue.add(request)
            self._hand_out(self._queue)
            return
        for number, tile in enumerate(self._flow.plan.tiles):
            self._give(request, number, tile.device)

    def _give(self, request: int, number: int, device: int) -> None:
        """Have a device compute a tile."""
        region = self._flow.plan.tiles[number].regions[0]
        part = self._images[request][:, :, region.top : region.bottom, region.left : region.right]
        if device == self._member.index:
            self.take_input(request, number, part)
        else:
            self._member.post(device, TileInput(self._member.configuration, request, number, part.contiguous()))

    def _hand_out(self, queue: TileQueue) -> None:
        """Give every idle device a tile, with what it takes of others."""
        for device in self._flow.devices:
            if (found := queue.take(device, self._member.now())) is None:
                continue
            request, number = found
            if device != self._member.index:
                for lender, tensor in self._taken.pop(found, {}).items():
                    self._member.ledger.drop(tensor)
                    message = TileOverlap(self._member.configuration, request, lender, number, tensor)
                    self._member.post(device, message)
            self._give(request, number, device)
            names, owner = self._flow.plan.devices, self._flow.plan.tiles[number].device
            self._member.record("tile", request=request, tile=number, owner=names[owner], by=names[device])

    def take_input(self, request: int, number: int, inputs: torch.Tensor) -> None:
        """Take in what a tile needs of the image."""
        # On the source it is a part of the image.
        self._inputs[request, number] = inputs if self._is_source else self._member.ledger.hold(inputs)
        self._begin_if_complete(request, number)

    def take_overlap(self, request: int, lender: int, borrower: int, tensor: torch.Tensor) -> None:
        """Take in what one tile lends another, which this device is to compute; else send it on from the source."""
        to = self._flow.plan.tiles[borrower].device
        if self._queue is None and to != self._member.index:
            self._member.post(to, TileOverlap(self._member.configuration, request, lender, borrower, tensor))
            return
        self._taken.setdefault((request, borrower), {})[lender] = self._member.ledger.hold(tensor)
        self._begin_if_complete(request, borrower)

    def _lend(self, request: int, lender: int, borrower: int, tensor: torch.Tensor) -> None:
        """Let another tile have what it takes of one, by way of the source where all goes there."""
        to, source = self._flow.plan.tiles[borrower].device, self._flow.plan.source
        if self._queue is not None or (self._flow.way == "source" and to != self._member.index):
            to = source
        if self._member.index in (to, source):
            self.take_overlap(request, lender, borrower, tensor)
        else:
            self._member.post(to, TileOverlap(self._member.configuration, request, lender, borrower, tensor))

    def _begin_if_complete(self, request: int, number: int) -> None:
        lenders = sum(borrower == number for _, borrower in self._flow.overlaps)
        if (request, number) in self._inputs and len(self._taken.get((request, number), ())) == lenders:
            self._member.start(self._compute(request, number))

    async def _compute(self, request: int, number: int) -> None:
        from testbed.methods.distributed.tile_compute import compute_tile

        flow, ledger = self._flow, self._member.ledger
        inputs, taken = self._inputs.pop((request, number)), self._taken.pop((request, number), {})
        layers = [self._member.layers[index] for index in range(flow.tiled)]
        cost = sum(costs(flow.graph.layers[: flow.tiled], flow.computed[number], len(inputs)), Cost())
        outputs, lent = await self._member.compute(
            lambda: compute_tile(flow, number, layers, inputs, taken, ledger), cost, Span(SPAN, request, 0)
        )
        for tensor in taken.values():
            ledger.drop(tensor)
        for borrower, tensor in lent.items():
            ledger.drop(tensor)
            self._lend(request, number, borrower, tensor)
        if self._is_source:
            self.place(request, number, outputs, flow.plan.devices[flow.plan.source])
        else:
            ledger.drop(inputs)
            self._member.post(None, TileOutput(self._member.configuration, request, number, outputs))

    def place(self, request: int, number: int, outputs: torch.Tensor, device: str) -> None:
        """Collect tiles on the source, from whom it computed; spread the map when all are there."""
        if self._queue is not None:
            self._queue.done(self._flow.plan.devices.index(device), self._member.now())
            self._hand_out(self._queue)
        tiles, ledger = self._flow.plan.tiles, self._member.ledger
        if request not in self._maps:
            shape = self._flow.graph.layers[self._flow.tiled - 1].output
            self._maps[request] = ledger.hold(outputs.new_empty(len(outputs), *shape))
            self._missing[request] = len(tiles)
        region = tiles[number].regions[-1]
        self._maps[request][:, :, region.top : region.bottom, region.left : region.right] = outputs
        self._missing[request] -= 1
        if not self._missing[request]:
            complete = self._maps.pop(request)
            if self._queue is not None:
                self._queue.forget(request)
            for tensor in (complete, self._images.pop(request)):
                ledger.drop(tensor)
            self._spread(request, complete.flatten(1))
