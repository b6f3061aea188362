"""The early layers on one member: tiles of all requests, reused overlaps, and the source's maps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from testbed.device import Cost, Span
from testbed.ml.lazy import torch
from testbed.ml.models.sliced import SlicedLayer, SlicedShape
from testbed_stahl.dataflow import Dataflow
from testbed_stahl.messages import TileInput, TileOutput, TileOverlap
from testbed_stahl.plan import Region, Tile
from testbed_stahl.request_work import SPAN, Ledger, MemberContext
from testbed_stahl.tiles import costs, is_late, multiplications, padding

Part = tuple[Region, "torch.Tensor"]
"""A region of a map and its values, (samples, channels, height, width)."""


def compute_tile(
    flow: Dataflow,
    number: int,
    layers: Sequence[SlicedLayer | SlicedShape],
    inputs: torch.Tensor,
    taken: Mapping[int, torch.Tensor],
    ledger: Ledger,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Compute the fused early layers of one tile from (samples, channels, height, width) of its first region.

    ``taken`` holds the overlaps reused from other tiles by lender, as returned by their calls. Padding applies only at
    the border of a layer's map. Returns the last region with the same axes, and the overlaps lent to other tiles by
    borrower as (samples, elements). The ledger counts the result and all intermediate values, excluding ``inputs`` and
    ``taken``.
    """
    borrowed = _unpack_overlaps(flow, number, inputs, taken)
    lent: dict[int, list[torch.Tensor]] = {
        borrower: [] for borrower in _borrowers_of(flow, number)
    }
    values = inputs
    for index, (layer, made) in enumerate(
        zip(layers, flow.computed[number], strict=True)
    ):
        parts = borrowed.get(index, [])
        if made.pixels:
            parts = [
                (made, ledger.hold(layer.tile(values, padding(layer.layer, made)))),
                *parts,
            ]
        if values is not inputs:
            ledger.drop(values)
        _lend_regions(flow, number, index, parts, lent, ledger)
        values = (
            parts[0][1]
            if len(parts) == 1 and made.pixels
            else _join_region(flow, number, index, inputs, parts, ledger)
        )
        if made.pixels and values is not parts[0][1]:
            ledger.drop(parts[0][1])
    ledger.drop(values)
    return values, {
        borrower: _in_one_piece(pieces, ledger) for borrower, pieces in lent.items()
    }


def _borrowers_of(flow: Dataflow, number: int) -> list[int]:
    return [borrower for lender, borrower in flow.overlaps if lender == number]


def _lend_regions(
    flow: Dataflow,
    number: int,
    index: int,
    parts: Sequence[Part],
    lent: Mapping[int, list[torch.Tensor]],
    ledger: Ledger,
) -> None:
    """Extract the regions of a layer lent to other tiles, by borrower."""
    for borrower, pieces in lent.items():
        for each in flow.overlaps[number, borrower]:
            if each.layer == index:
                pieces.append(
                    ledger.hold(_cut_region(parts[0], each.region).flatten(1))
                )


def _in_one_piece(pieces: Sequence[torch.Tensor], ledger: Ledger) -> torch.Tensor:
    whole = ledger.hold(torch.cat([*pieces], dim=1))
    for piece in pieces:
        ledger.drop(piece)
    return whole


def _unpack_overlaps(
    flow: Dataflow, number: int, inputs: torch.Tensor, taken: Mapping[int, torch.Tensor]
) -> dict[int, list[Part]]:
    """Return the regions reused from other tiles, by source layer."""
    by_layer: dict[int, list[Part]] = {}
    for lender, tensor in taken.items():
        overlaps = flow.overlaps[lender, number]
        for each, part in zip(
            overlaps,
            torch.split(tensor, [*map(flow.values, overlaps)], dim=1),
            strict=True,
        ):
            height, width = (
                each.region.bottom - each.region.top,
                each.region.right - each.region.left,
            )
            by_layer.setdefault(each.layer, []).append(
                (each.region, part.reshape(len(inputs), -1, height, width))
            )
    return by_layer


def _cut_region(part: Part, region: Region) -> torch.Tensor:
    around, values = part
    rows = slice(region.top - around.top, region.bottom - around.top)
    return values[:, :, rows, region.left - around.left : region.right - around.left]


def _join_region(
    flow: Dataflow,
    number: int,
    index: int,
    like: torch.Tensor,
    parts: Sequence[Part],
    ledger: Ledger,
) -> torch.Tensor:
    """Assemble a tile's input region of a layer's output; empty if the region is empty."""
    whole = flow.plan.tiles[number].regions[index + 1]
    size = (whole.bottom - whole.top, whole.right - whole.left)
    joined = ledger.hold(
        like.new_empty(len(like), flow.graph.layers[index].output[0], *size)
    )
    for region, values in parts:
        _cut_region((whole, joined), region).copy_(values)
    return joined


Item = tuple[int, int]
"""A request, and a tile by its place in the plan."""


class TileQueue:
    """Tiles waiting at the source, which is gateway and data source of DeepThings in one.

    A device has one tile at a time: first its own tiles; then it steals the last tile of the device with the longest
    backlog if it expects to finish earlier. A device's time for a multiplication is measured from its last tile,
    transfers included; the first estimate is its nominal speed.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        work: Sequence[int],
        lending: Collection[tuple[int, int]],
        pace: Sequence[float],
    ) -> None:
        """``work``: multiplications by tile; ``lending``: pairs (lender, borrower); ``pace``: seconds for each."""
        self._tiles = tiles
        # A tile of no more than pooling counts as one multiplication.
        self._work = [max(1, each) for each in work]
        self._lenders = [
            [one for one, other in lending if other == number]
            for number in range(len(tiles))
        ]
        self._pace = [*pace]
        self._order = sorted(range(len(self._tiles)), key=self._tile_rank)
        self._waiting: list[Item] = []
        self._hands: dict[int, tuple[Item, float]] = {}
        """What each device has, and since when."""
        self._done: dict[int, set[int]] = {}
        """Tiles, by request."""

    def _tile_rank(self, number: int) -> tuple[bool, int]:
        tile = self._tiles[number]
        return is_late(tile.row, tile.column), -self._work[number]

    def add(self, request: int) -> None:
        """Enqueue all tiles of a request: independent tiles first, then larger ones first."""
        self._done[request] = set()
        self._waiting += [(request, number) for number in self._order]

    def take(self, device: int, now: float) -> Item | None:
        """Return the tile a device should compute now; None if the device is busy or has no work."""
        if device in self._hands:
            return None
        ready = [
            each
            for each in self._waiting
            if self._done[each[0]].issuperset(self._lenders[each[1]])
        ]
        own = [each for each in ready if self._tiles[each[1]].device == device]
        item = own[0] if own else self._steal_tile(device, ready, now)
        if item is not None:
            self._waiting.remove(item)
            self._hands[device] = item, now
        return item

    def _steal_tile(
        self, device: int, ready: Sequence[Item], now: float
    ) -> Item | None:
        last = {
            self._tiles[number].device: (request, number) for request, number in ready
        }
        if not last:
            return None
        victim = max(last, key=lambda each: self._backlog_seconds(each, now))
        sooner = self._work[last[victim][1]] * self._pace[
            device
        ] < self._backlog_seconds(victim, now)
        return last[victim] if sooner else None

    def _backlog_seconds(self, device: int, now: float) -> float:
        """Return the seconds a device needs for its current and waiting tiles."""
        pace, left = self._pace[device], 0.0
        if device in self._hands:
            (_, number), since = self._hands[device]
            pace = max(pace, (now - since) / self._work[number])
            left = self._work[number] * pace - (now - since)
        waiting = (
            number
            for _, number in self._waiting
            if self._tiles[number].device == device
        )
        return left + pace * sum(self._work[number] for number in waiting)

    def done(self, device: int, now: float) -> None:
        """Record the arrival of a device's tile."""
        (request, number), since = self._hands.pop(device)
        self._pace[device] = (now - since) / self._work[number]
        self._done[request].add(number)

    def forget(self, request: int) -> None:
        """Remove a request whose tiles have all arrived."""
        del self._done[request]


def tile_queue(flow: Dataflow, speeds: Sequence[float]) -> TileQueue:
    """Return the queue of a plan's tiles; ``speeds`` of its devices in FLOP/s."""
    layers = flow.graph.layers[: flow.tiled]
    work = [sum(multiplications(layers, made)) for made in flow.computed]
    return TileQueue(
        flow.plan.tiles,
        work,
        flow.overlaps,
        [2.0 * flow.settings.samples / speed for speed in speeds],
    )


class TileWork:
    """Compute each tile once all of its inputs have arrived.

    Images and maps are (samples, channels, height, width).
    """

    def __init__(
        self,
        member: MemberContext,
        speeds: Sequence[float],
        spread: Callable[[int, torch.Tensor], None],
    ) -> None:
        """``speeds`` are those of the plan's devices in FLOP/s.

        On the source, ``spread`` is called with the number of a request and its complete map, (samples, elements).
        """
        self._member = member
        self._flow = member.flow
        self._spread = spread
        self._queue = (
            tile_queue(member.flow, speeds)
            if member.flow.settings.options.tile_stealing
            else None
        )
        """The waiting tiles, on the source, where idle devices steal them."""
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        """Regions of the image by request and tile, (samples, channels, height, width)."""
        self._taken: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """What others lend a tile, by request and tile, then by lender."""
        self._images: dict[int, torch.Tensor] = {}
        """Images on the source by request, until all tiles are done."""
        self._maps: dict[int, torch.Tensor] = {}
        self._missing: dict[int, int] = {}
        """Tiles that are not in the map, by request."""

    @property
    def _is_source(self) -> bool:
        return self._member.index == self._flow.plan.source

    def begin(self, request: int, images: torch.Tensor) -> None:
        """Send each tile its part of a request's images, (samples, channels, height, width), from the source."""
        self._images[request] = self._member.ledger.hold(images)
        if self._queue is not None:
            self._queue.add(request)
            self._hand_out(self._queue)
            return
        for number, tile in enumerate(self._flow.plan.tiles):
            self._assign_tile(request, number, tile.device)

    def _assign_tile(self, request: int, number: int, device: int) -> None:
        """Assign a tile to a device."""
        region = self._flow.plan.tiles[number].regions[0]
        part = self._images[request][
            :, :, region.top : region.bottom, region.left : region.right
        ]
        if device == self._member.index:
            self.take_input(request, number, part)
        else:
            self._member.post(
                device,
                TileInput(
                    self._member.configuration, request, number, part.contiguous()
                ),
            )

    def _hand_out(self, queue: TileQueue) -> None:
        """Assign a tile to every idle device, with its reused overlaps."""
        for device in self._flow.devices:
            if (item := queue.take(device, self._member.device.now())) is None:
                continue
            request, number = item
            if device != self._member.index:
                for lender, tensor in self._taken.pop(item, {}).items():
                    self._member.ledger.drop(tensor)
                    message = TileOverlap(
                        self._member.configuration, request, lender, number, tensor
                    )
                    self._member.post(device, message)
            self._assign_tile(request, number, device)
            names, owner = self._flow.plan.devices, self._flow.plan.tiles[number].device
            self._member.device.record(
                "tile",
                request=request,
                tile=number,
                owner=names[owner],
                by=names[device],
            )

    def take_input(self, request: int, number: int, inputs: torch.Tensor) -> None:
        """Receive the image region of a tile, (samples, channels, height, width)."""
        # On the source it is a part of the image.
        self._inputs[request, number] = (
            inputs if self._is_source else self._member.ledger.hold(inputs)
        )
        self._begin_if_complete(request, number)

    def take_overlap(
        self, request: int, lender: int, borrower: int, tensor: torch.Tensor
    ) -> None:
        """Receive an overlap of two tiles, (samples, elements); forward it if another device computes the borrower."""
        to = self._flow.plan.tiles[borrower].device
        if self._queue is None and to != self._member.index:
            self._member.post(
                to,
                TileOverlap(
                    self._member.configuration, request, lender, borrower, tensor
                ),
            )
            return
        self._taken.setdefault((request, borrower), {})[lender] = (
            self._member.ledger.hold(tensor)
        )
        self._begin_if_complete(request, borrower)

    def _lend_regions(
        self, request: int, lender: int, borrower: int, tensor: torch.Tensor
    ) -> None:
        """Provide another tile with an overlap, through the source if all tile traffic passes there."""
        to, source = self._flow.plan.tiles[borrower].device, self._flow.plan.source
        if self._queue is not None or (
            self._flow.way == "via-source" and to != self._member.index
        ):
            to = source
        if self._member.index in (to, source):
            self.take_overlap(request, lender, borrower, tensor)
        else:
            self._member.post(
                to,
                TileOverlap(
                    self._member.configuration, request, lender, borrower, tensor
                ),
            )

    def _begin_if_complete(self, request: int, number: int) -> None:
        lenders = sum(borrower == number for _, borrower in self._flow.overlaps)
        if (request, number) in self._inputs and len(
            self._taken.get((request, number), ())
        ) == lenders:
            self._member.start(self._compute_tile(request, number))

    async def _compute_tile(self, request: int, number: int) -> None:
        flow, ledger = self._flow, self._member.ledger
        inputs, taken = (
            self._inputs.pop((request, number)),
            self._taken.pop((request, number), {}),
        )
        layers = [self._member.layers[index] for index in range(flow.tiled)]
        cost = sum(
            costs(flow.graph.layers[: flow.tiled], flow.computed[number], len(inputs)),
            Cost(),
        )
        outputs, lent = await self._member.compute(
            lambda: compute_tile(flow, number, layers, inputs, taken, ledger),
            cost,
            Span(SPAN, request, 0),
        )
        for tensor in taken.values():
            ledger.drop(tensor)
        for borrower, tensor in lent.items():
            ledger.drop(tensor)
            self._lend_regions(request, number, borrower, tensor)
        if self._is_source:
            self.place(request, number, outputs, flow.plan.devices[flow.plan.source])
        else:
            ledger.drop(inputs)
            self._member.post(
                None, TileOutput(self._member.configuration, request, number, outputs)
            )

    def place(
        self, request: int, number: int, outputs: torch.Tensor, device: str
    ) -> None:
        """Collect tiles, (samples, channels, height, width), on the source; distribute the complete map."""
        if self._queue is not None:
            self._queue.done(
                self._flow.plan.devices.index(device), self._member.device.now()
            )
            self._hand_out(self._queue)
        tiles, ledger = self._flow.plan.tiles, self._member.ledger
        if request not in self._maps:
            shape = self._flow.graph.layers[self._flow.tiled - 1].output
            self._maps[request] = ledger.hold(outputs.new_empty(len(outputs), *shape))
            self._missing[request] = len(tiles)
        region = tiles[number].regions[-1]
        self._maps[request][
            :, :, region.top : region.bottom, region.left : region.right
        ] = outputs
        self._missing[request] -= 1
        if not self._missing[request]:
            complete = self._maps.pop(request)
            if self._queue is not None:
                self._queue.forget(request)
            for tensor in (complete, self._images.pop(request)):
                ledger.drop(tensor)
            self._spread(request, complete.flatten(1))
