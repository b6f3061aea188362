"""The early layers on one member: its tiles of all requests, what they take of each other, and the source's maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from testbed.device import Span
from testbed.methods.distributed.member_context import MemberContext
from testbed.methods.distributed.member_messages import TileInput, TileOutput, TileOverlap
from testbed.methods.distributed.partition.tiles import multiplications
from testbed.methods.distributed.request_work import SPAN

if TYPE_CHECKING:
    import torch


class TileWork:
    """Computes each tile as soon as all that it needs is there.

    Images and maps are (samples, channels, height, width).
    """

    def __init__(self, member: MemberContext, spread: Callable[[int, torch.Tensor], None]) -> None:
        """``spread`` is given, on the source, the number of a request and its complete map, (samples, elements)."""
        self._member = member
        self._flow = member.flow
        self._spread = spread
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
        for number, tile in enumerate(self._flow.plan.tiles):
            region = tile.regions[0]
            part = images[:, :, region.top : region.bottom, region.left : region.right]
            if tile.device == self._member.index:
                self.take_input(request, number, part)
            else:
                message = TileInput(self._member.configuration, request, number, part.contiguous())
                self._member.post(tile.device, message)

    def take_input(self, request: int, number: int, inputs: torch.Tensor) -> None:
        """Take in what a tile needs of the image."""
        # On the source it is a part of the image.
        self._inputs[request, number] = inputs if self._is_source else self._member.ledger.hold(inputs)
        self._begin_if_complete(request, number)

    def take_overlap(self, request: int, lender: int, borrower: int, tensor: torch.Tensor) -> None:
        """Take in what one tile lends another; the source may have to send it on."""
        if self._flow.plan.tiles[borrower].device != self._member.index:
            self._send(request, lender, borrower, tensor)
            return
        self._taken.setdefault((request, borrower), {})[lender] = self._member.ledger.hold(tensor)
        self._begin_if_complete(request, borrower)

    def _send(self, request: int, lender: int, borrower: int, tensor: torch.Tensor) -> None:
        """Send what a tile lends to whom it concerns, by way of the source where all goes there."""
        to = self._flow.plan.tiles[borrower].device
        if self._flow.way == "source" and not self._is_source:
            to = self._flow.plan.source
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
        flops = 2.0 * len(inputs) * sum(multiplications(flow.graph.layers[: flow.tiled], flow.computed[number]))
        outputs, lent = await self._member.compute(
            lambda: compute_tile(flow, number, layers, inputs, taken, ledger), flops, Span(SPAN, request, 0)
        )
        for tensor in taken.values():
            ledger.drop(tensor)
        for borrower, tensor in lent.items():
            ledger.drop(tensor)
            self.take_overlap(request, number, borrower, tensor)
        if self._is_source:
            self.place(request, number, outputs)
        else:
            ledger.drop(inputs)
            self._member.post(None, TileOutput(self._member.configuration, request, number, outputs))

    def place(self, request: int, number: int, outputs: torch.Tensor) -> None:
        """Collect tiles on the source; spread the map when all are there."""
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
            for tensor in (complete, self._images.pop(request)):
                ledger.drop(tensor)
            self._spread(request, complete.flatten(1))
