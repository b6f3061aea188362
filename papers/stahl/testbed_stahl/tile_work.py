"""The tiled layers on one member: tiles of all requests, overlaps that tiles reuse, and maps that the source joins.

`compute_tile` computes one tile, `TileQueue` decides which device computes which tile if idle devices may steal tiles,
and `TileWork` exchanges and computes the tiles of all requests. `testbed_stahl.tiles` explains tiles and overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from testbed.device import Cost, Span
from testbed.ml.lazy import torch
from testbed.ml.models.sliced import SlicedLayer, SlicedShape
from testbed_stahl.dataflow import Dataflow
from testbed_stahl.messages import TileInput, TileOutput, TileOverlap
from testbed_stahl.plan import Region, Tile
from testbed_stahl.request_work import SPAN, Ledger, MemberContext
from testbed_stahl.tiles import (
    tile_costs,
    tile_multiplications,
    tile_padding,
    waits_for_neighbours,
)

Part = tuple[Region, "torch.Tensor"]
"""A region of a map, and its values as (samples, channels, height, width)."""


def compute_tile(
    flow: Dataflow,
    number: int,
    layers: Sequence[SlicedLayer | SlicedShape],
    inputs: torch.Tensor,
    taken: Mapping[int, torch.Tensor],
    ledger: Ledger,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Compute all tiled layers of one tile from its region of the image, (samples, channels, height, width).

    ``taken`` maps each lender to the overlaps that this tile reuses from it, as the lender's call returned them.
    Padding applies only at the border of a layer's map. Returns the tile's region of the last output, with the same
    axes, and borrower -> overlaps that the borrower reuses from this tile, (samples, elements). The ledger counts the
    result and all intermediate values, excluding ``inputs`` and ``taken``.
    """
    borrowed = _unpack_overlaps(flow, number, inputs, taken)
    lent: dict[int, list[torch.Tensor]] = {}
    """Borrower -> values of each overlap, in the order of the layers."""
    for lender, borrower in flow.overlaps:
        if lender == number:
            lent[borrower] = []
    values = inputs
    computed = flow.computed_regions[number]
    pairs = zip(layers, computed, strict=True)
    for index, (layer, made) in enumerate(pairs):
        parts = borrowed.get(index, [])
        own = None
        # The region is empty if neighbours have computed all that the tile needs of a map.
        if made.pixels:
            padding = tile_padding(layer.layer, made)
            own = ledger.hold(layer.tile(values, padding))
            parts = [(made, own), *parts]
        # The caller counts the inputs.
        if values is not inputs:
            ledger.drop(values)
        _lend_regions(flow, number, index, parts, lent, ledger)
        if own is not None and len(parts) == 1:
            # Without overlaps the computed part is the whole region.
            values = own
        else:
            values = _join_region(flow, number, index, inputs, parts, ledger)
            if own is not None:
                ledger.drop(own)
    ledger.drop(values)
    messages = {}
    for borrower, pieces in lent.items():
        messages[borrower] = _join_pieces(pieces, ledger)
    return values, messages


def _lend_regions(
    flow: Dataflow,
    number: int,
    index: int,
    parts: Sequence[Part],
    lent: Mapping[int, list[torch.Tensor]],
    ledger: Ledger,
) -> None:
    """Add a layer's overlaps reused from the tile by other tiles to ``lent``."""
    for borrower, pieces in lent.items():
        for overlap in flow.overlaps[number, borrower]:
            if overlap.layer != index:
                continue
            # A lender reuses nothing itself, so its first part is its whole region.
            region = _cut_region(parts[0], overlap.region)
            pieces.append(ledger.hold(region.flatten(1)))


def _join_pieces(pieces: Sequence[torch.Tensor], ledger: Ledger) -> torch.Tensor:
    # Joined, so that each borrower gets one message: every message costs a header and a delay.
    whole = ledger.hold(torch.cat([*pieces], dim=1))
    for piece in pieces:
        ledger.drop(piece)
    return whole


def _unpack_overlaps(
    flow: Dataflow, number: int, inputs: torch.Tensor, taken: Mapping[int, torch.Tensor]
) -> dict[int, list[Part]]:
    """Return layer -> regions of the layer's output reused by the tile from other tiles."""
    by_layer: dict[int, list[Part]] = {}
    for lender, tensor in taken.items():
        overlaps = flow.overlaps[lender, number]
        sizes = [flow.values(overlap) for overlap in overlaps]
        parts = torch.split(tensor, sizes, dim=1)
        for overlap, part in zip(overlaps, parts, strict=True):
            region = overlap.region
            height = region.bottom - region.top
            width = region.right - region.left
            values = part.reshape(len(inputs), -1, height, width)
            regions_of_layer = by_layer.setdefault(overlap.layer, [])
            regions_of_layer.append((region, values))
    return by_layer


def _cut_region(part: Part, region: Region) -> torch.Tensor:
    """Return the values of a region inside a larger part."""
    around, values = part
    top = region.top - around.top
    left = region.left - around.left
    bottom = region.bottom - around.top
    right = region.right - around.left
    return values[:, :, top:bottom, left:right]


def _join_region(
    flow: Dataflow,
    number: int,
    index: int,
    like: torch.Tensor,
    parts: Sequence[Part],
    ledger: Ledger,
) -> torch.Tensor:
    """Return a tile's region of a layer's output, assembled from its parts; ``like`` has its type and samples."""
    whole = flow.plan.tiles[number].regions[index + 1]
    channels = flow.graph.layers[index].output[0]
    height = whole.bottom - whole.top
    width = whole.right - whole.left
    # Without initial values, since the parts cover the whole region.
    joined = like.new_empty(len(like), channels, height, width)
    ledger.hold(joined)
    for region, values in parts:
        _cut_region((whole, joined), region).copy_(values)
    return joined


Item = tuple[int, int]
"""The number of a request, and the index of a tile in the plan."""


class TileQueue:
    """The waiting tiles at the source, which is both the gateway and the data source of DeepThings.

    A device computes one tile at a time. First it computes the tiles that the plan assigns to it; then it steals the
    last tile of the device with the longest backlog, if it expects to finish the tile earlier. The pace of a device,
    its seconds for a multiplication, is measured by its last tile, transfers included; the first estimate is given.

    >>> region = Region(0, 1, 0, 1)
    >>> tiles = [Tile(row=0, column=0, device=0, regions=(region,)), Tile(row=1, column=1, device=0, regions=(region,))]
    >>> queue = TileQueue(tiles, work=[100, 100], lending=[], pace=[1.0, 1.0])
    >>> queue.add(request=0)
    >>> queue.take(device=0, now=0.0), queue.take(device=1, now=0.0)
    ((0, 0), (0, 1))
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        work: Sequence[int],
        lending: Collection[tuple[int, int]],
        pace: Sequence[float],
    ) -> None:
        """Create an empty queue.

        ``work``: multiplications by tile. ``lending``: pairs (lender, borrower). ``pace``: seconds of each device for a
        multiplication.
        """
        self._tiles = tiles
        # At least one, also for a tile of pooling layers alone, since a pace is measured by dividing by this number.
        self._work = [max(1, multiplications) for multiplications in work]
        # For each tile, the tiles whose regions it reuses.
        self._lenders: list[list[int]] = [[] for _ in tiles]
        for lender, borrower in lending:
            self._lenders[borrower].append(lender)
        self._pace = [*pace]
        # The same order for all requests, since the work of a tile does not depend on the image.
        self._order = sorted(range(len(self._tiles)), key=self._tile_rank)
        self._waiting: list[Item] = []
        self._current: dict[int, tuple[Item, float]] = {}
        """Busy device -> (its tile, time of the assignment in seconds)."""
        self._done: dict[int, set[int]] = {}
        """Request -> its finished tiles."""

    def _tile_rank(self, number: int) -> tuple[bool, int]:
        tile = self._tiles[number]
        return waits_for_neighbours(tile.row, tile.column), -self._work[number]

    def add(self, request: int) -> None:
        """Enqueue all tiles of a request: independent tiles first, then larger ones first."""
        self._done[request] = set()
        self._waiting += [(request, number) for number in self._order]

    def take(self, device: int, now: float) -> Item | None:
        """Assign a tile to a device and return the tile; None if the device is busy, or without a ready tile."""
        if device in self._current:
            return None
        ready = self._ready_tiles()
        item: Item | None = None
        for request, number in ready:
            # The device's tiles of the plan first, in the order of the queue.
            if self._tiles[number].device == device:
                item = request, number
                break
        if item is None:
            item = self._steal_tile(device, ready, now)
        if item is not None:
            self._waiting.remove(item)
            self._current[device] = item, now
        return item

    def _ready_tiles(self) -> list[Item]:
        """Return the waiting tiles whose lenders are all finished, in the order of the queue."""
        ready = []
        for request, number in self._waiting:
            if self._done[request].issuperset(self._lenders[number]):
                ready.append((request, number))
        return ready

    def _steal_tile(
        self, device: int, ready: Sequence[Item], now: float
    ) -> Item | None:
        """Return the last tile of the device with the longest backlog, if ``device`` would finish it earlier."""
        last_tiles: dict[int, Item] = {}
        for request, number in ready:
            last_tiles[self._tiles[number].device] = request, number
        if not last_tiles:
            return None

        def backlog(owner: int) -> float:
            return self._backlog_seconds(owner, now)

        owner = max(last_tiles, key=backlog)
        _, number = last_tiles[owner]
        seconds = self._work[number] * self._pace[device]
        # A slow device would make the owner wait for the tile.
        if seconds < backlog(owner):
            return last_tiles[owner]
        return None

    def _backlog_seconds(self, device: int, now: float) -> float:
        """Return the seconds needed by a device for the current tile and all waiting tiles."""
        pace = self._pace[device]
        remaining = 0.0
        if device in self._current:
            (_, number), since = self._current[device]
            # A device that has taken longer than expected by now has become slower.
            elapsed = now - since
            pace = max(pace, elapsed / self._work[number])
            remaining = self._work[number] * pace - elapsed
        waiting = 0
        for _, number in self._waiting:
            if self._tiles[number].device == device:
                waiting += self._work[number]
        return remaining + pace * waiting

    def done(self, device: int, now: float) -> None:
        """Record that the current tile of a device is finished, and measure the device's pace."""
        (request, number), since = self._current.pop(device)
        self._pace[device] = (now - since) / self._work[number]
        self._done[request].add(number)

    def forget(self, request: int) -> None:
        """Remove a request whose tiles have all arrived."""
        del self._done[request]


def make_tile_queue(flow: Dataflow, speeds: Sequence[float]) -> TileQueue:
    """Return the queue of a plan's tiles; ``speeds`` are the speeds of the plan's devices in FLOP/s."""
    layers = flow.graph.layers[: flow.tiled_count]
    work = []
    for made in flow.computed_regions:
        work.append(sum(tile_multiplications(layers, made)))
    # A multiplication comes with an addition.
    pace = [2.0 * flow.settings.samples / speed for speed in speeds]
    return TileQueue(flow.plan.tiles, work, flow.overlaps, pace)


class TileWork:
    """The tiles of all requests on one member: each is computed once all inputs have arrived.

    Images and maps are (samples, channels, height, width).
    """

    def __init__(
        self,
        member: MemberContext,
        speeds: Sequence[float],
        on_map_complete: Callable[[int, torch.Tensor], None],
    ) -> None:
        """``speeds`` are the speeds of the plan's devices in FLOP/s.

        On the source, ``on_map_complete`` is called with the number of a request and its complete map, (samples,
        elements).
        """
        self._member = member
        self._flow = member.flow
        self._on_map_complete = on_map_complete
        self._queue: TileQueue | None = None
        """The waiting tiles, if idle devices may steal tiles; used on the source only."""
        if member.flow.settings.options.tile_stealing:
            self._queue = make_tile_queue(member.flow, speeds)
        self._inputs: dict[Item, torch.Tensor] = {}
        """(request, tile) -> region of the image, (samples, channels, height, width)."""
        self._borrowed: dict[Item, dict[int, torch.Tensor]] = {}
        """(request, tile) -> lender -> overlaps that the tile reuses from the lender, (samples, elements)."""
        self._images: dict[int, torch.Tensor] = {}
        """Request -> its images on the source, until all tiles are finished."""
        self._maps: dict[int, torch.Tensor] = {}
        """Request -> incomplete output of the last tiled layer, on the source."""
        self._missing: dict[int, int] = {}
        """Request -> number of tiles that are missing in its map."""

    @property
    def _is_source(self) -> bool:
        return self._member.index == self._flow.plan.source

    def begin(self, request: int, images: torch.Tensor) -> None:
        """Distribute a request's images, (samples, channels, height, width), from the source to the tiles' devices."""
        self._member.ledger.hold(images)
        self._images[request] = images
        if self._queue is not None:
            self._queue.add(request)
            self._hand_out(self._queue)
            return
        # Without stealing, the source sends all regions at once, to the devices of the plan.
        for number, tile in enumerate(self._flow.plan.tiles):
            self._assign_tile(request, number, tile.device)

    def _assign_tile(self, request: int, number: int, device: int) -> None:
        """Send a tile's region of the image to the device computing the tile."""
        region = self._flow.plan.tiles[number].regions[0]
        part = _crop(self._images[request], region)
        if device == self._member.index:
            self.take_input(request, number, part)
        else:
            configuration = self._member.configuration
            message = TileInput(configuration, request, number, part.contiguous())
            self._member.post(device, message)

    def _hand_out(self, queue: TileQueue) -> None:
        """Assign a tile to every idle device, and send the tile's overlaps and region of the image."""
        names = self._flow.plan.devices
        for device in self._flow.devices:
            item = queue.take(device, self._member.device.now())
            if item is None:
                continue
            request, number = item
            if device != self._member.index:
                self._forward_overlaps(item, device)
            self._assign_tile(request, number, device)
            owner = names[self._flow.plan.tiles[number].device]
            self._member.device.record(
                "tile", request=request, tile=number, owner=owner, by=names[device]
            )

    def _forward_overlaps(self, item: Item, device: int) -> None:
        """Send the overlaps reused by a tile to the device computing the tile."""
        request, number = item
        for lender, tensor in self._borrowed.pop(item, {}).items():
            self._member.ledger.drop(tensor)
            self._send_overlap(device, request, lender, number, tensor)

    def _send_overlap(
        self,
        device: int,
        request: int,
        lender: int,
        borrower: int,
        tensor: torch.Tensor,
    ) -> None:
        configuration = self._member.configuration
        message = TileOverlap(configuration, request, lender, borrower, tensor)
        self._member.post(device, message)

    def take_input(self, request: int, number: int, inputs: torch.Tensor) -> None:
        """Receive the image region of a tile, (samples, channels, height, width)."""
        # On the source the region is a view of the image, which the ledger counts already.
        if not self._is_source:
            self._member.ledger.hold(inputs)
        self._inputs[request, number] = inputs
        self._begin_if_complete(request, number)

    def take_overlap(
        self, request: int, lender: int, borrower: int, tensor: torch.Tensor
    ) -> None:
        """Receive overlaps of two tiles, (samples, elements); forward them if another device computes the borrower."""
        receiver = self._flow.plan.tiles[borrower].device
        # With a queue, the source keeps overlaps until a device has the tile.
        if self._queue is None and receiver != self._member.index:
            self._send_overlap(receiver, request, lender, borrower, tensor)
            return
        by_lender = self._borrowed.setdefault((request, borrower), {})
        by_lender[lender] = self._member.ledger.hold(tensor)
        self._begin_if_complete(request, borrower)

    def _lend_regions(
        self, request: int, lender: int, borrower: int, tensor: torch.Tensor
    ) -> None:
        """Send overlaps to the device of the borrower, or to the source if they pass through the source."""
        source = self._flow.plan.source
        receiver = self._flow.plan.tiles[borrower].device
        is_local = receiver == self._member.index
        passes_source = self._flow.exchange == "via-source" and not is_local
        if self._queue is not None or passes_source:
            receiver = source
        if self._member.index in (receiver, source):
            self.take_overlap(request, lender, borrower, tensor)
        else:
            self._send_overlap(receiver, request, lender, borrower, tensor)

    def _begin_if_complete(self, request: int, number: int) -> None:
        """Start to compute a tile if the region of the image and all overlaps have arrived."""
        lenders = 0
        for _, borrower in self._flow.overlaps:
            if borrower == number:
                lenders += 1
        item = (request, number)
        arrived = len(self._borrowed.get(item, ()))
        if item in self._inputs and arrived == lenders:
            self._member.start(self._compute_tile(request, number))

    async def _compute_tile(self, request: int, number: int) -> None:
        flow = self._flow
        ledger = self._member.ledger
        inputs = self._inputs.pop((request, number))
        borrowed = self._borrowed.pop((request, number), {})
        layers = [self._member.layers[index] for index in range(flow.tiled_count)]
        tiled = flow.graph.layers[: flow.tiled_count]
        costs = tile_costs(tiled, flow.computed_regions[number], len(inputs))
        cost = sum(costs, Cost())
        # All tiled layers are one computation, with the number of the first layer in its span.
        span = Span(SPAN, request, 0)
        outputs, lent = await self._member.compute(
            lambda: compute_tile(flow, number, layers, inputs, borrowed, ledger),
            cost,
            span,
        )
        for tensor in borrowed.values():
            ledger.drop(tensor)
        for borrower, tensor in lent.items():
            ledger.drop(tensor)
            self._lend_regions(request, number, borrower, tensor)
        if self._is_source:
            name = flow.plan.devices[flow.plan.source]
            self.insert_tile(request, number, outputs, name)
        else:
            ledger.drop(inputs)
            configuration = self._member.configuration
            message = TileOutput(configuration, request, number, outputs)
            self._member.post(None, message)

    def insert_tile(
        self, request: int, number: int, outputs: torch.Tensor, device: str
    ) -> None:
        """Copy the result of a tile, (samples, channels, height, width), into its map on the source.

        ``device`` is the device that has computed the tile. The last tile completes the map, which is then distributed.
        """
        if self._queue is not None:
            index = self._flow.plan.devices.index(device)
            now = self._member.device.now()
            self._queue.done(index, now)
            self._hand_out(self._queue)
        tiles = self._flow.plan.tiles
        ledger = self._member.ledger
        if request not in self._maps:
            last_layer = self._flow.graph.layers[self._flow.tiled_count - 1]
            whole = outputs.new_empty(len(outputs), *last_layer.output)
            self._maps[request] = ledger.hold(whole)
            self._missing[request] = len(tiles)
        region = tiles[number].regions[-1]
        target = _crop(self._maps[request], region)
        target[:] = outputs
        self._missing[request] -= 1
        if self._missing[request]:
            return
        complete = self._maps.pop(request)
        if self._queue is not None:
            self._queue.forget(request)
        # The image is not needed any more, and `RequestWork` counts the map from now on.
        ledger.drop(complete)
        ledger.drop(self._images.pop(request))
        self._on_map_complete(request, complete.flatten(1))


def _crop(values: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a view of a region of whole maps, (samples, channels, height, width)."""
    rows = slice(region.top, region.bottom)
    columns = slice(region.left, region.right)
    return values[:, :, rows, columns]
