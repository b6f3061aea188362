"""Communication of one inference: transfers, their size on the wire, and the resulting time.

A layer takes the longer of its computation and its communication. Sending overlaps with computing within a layer but
hardly across layers, because the next layer needs the complete output of this one. Outputs are sent in chunks: a device
computes a chunk while a link carries the previous one to its receiver or to the source. The source forwards the chunks
of other devices after its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT
from testbed.network.link import Link, Pair
from testbed.wire.message import size_around
from testbed_stahl.dataflow import Dataflow
from testbed_stahl.demands import costs
from testbed_stahl.plan import Pieces, Range, intersection
from testbed_stahl.tiles import costs as tile_costs
from testbed_stahl.tiles import is_late


@dataclass(frozen=True)
class Transfer:
    """Traffic from one device to another caused by the output of one layer."""

    sender: int
    receiver: int
    value: int
    """The layer, or `INPUT`."""
    messages: tuple[int, ...]
    """The elements of one sample in each."""
    forwarded: bool = False
    """Whether the sender passes on what others made, or first puts their tiles together or adds up their sums."""
    sums: bool = False
    """Whether it is partial sums, of which each receiver gets others; all receivers of a value get the same."""

    @cached_property
    def elements(self) -> int:
        """Elements of one sample in all messages."""
        return sum(self.messages)

    def wire_bytes(self, samples: int) -> float:
        """Return the bytes on the wire of a request of ``samples`` samples, headers included."""
        sizes = Counter(self.messages)
        return sum(
            count * size_around(samples * BYTES_PER_VALUE * elements)
            for elements, count in sizes.items()
        )


def transfers(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return all transfers of one inference."""
    return (*of_tiles(flow), *_of_values(flow), *_of_sums(flow))


def elements(transfers: Sequence[Transfer]) -> int:
    """Return the elements of one sample in the given transfers; the paper's C if these are all of an inference."""
    return sum(transfer.elements for transfer in transfers)


def of_tiles(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return the transfers of all tiles computed away from the source: input regions and results.

    Data reused between tiles count as outputs of the last tiled layer. Reused data pass through the source like other
    tile data, unless devices send to each other directly; they always pass through the source if tiles can be stolen.
    The count assumes no stealing.
    """
    source, tiles, transfers = flow.plan.source, flow.plan.tiles, []
    for tile in flow.plan.tiles:
        if tile.device != source:
            first, last = flow.graph.layers[0], flow.graph.layers[flow.tiled - 1]
            there, back = (
                first.input[0] * tile.regions[0].pixels,
                last.output[0] * tile.regions[-1].pixels,
            )
            transfers.append(Transfer(source, tile.device, INPUT, (there,)))
            transfers.append(Transfer(tile.device, source, flow.tiled - 1, (back,)))
    for (lender, borrower), taken in flow.overlaps.items():
        size = sum(map(flow.values, taken))
        way = [tiles[lender].device, tiles[borrower].device]
        if flow.settings.options.tile_stealing or (
            way[0] != way[1] and flow.way == "via-source"
        ):
            way.insert(1, source)
        for leg, (one, other) in enumerate(pairwise(way)):
            if one != other:
                transfers.append(
                    Transfer(
                        one,
                        other,
                        flow.tiled - 2,
                        (size,),
                        forwarded=leg == 1 and source != way[0],
                    )
                )
    return tuple(transfers)


def _of_values(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the parts of outputs needed by other devices, in two legs if all traffic passes through the source."""
    source = flow.plan.source
    for value, homes in flow.homes.items():
        for maker, home in enumerate(homes):
            if not home.size:
                continue
            pieces = flow.pieces(value, maker)
            merges = value != INPUT and (
                value == flow.tiled - 1 or flow.tasks[value][maker].work == "sums"
            )
            for receiver, part in flow.receivers(value, maker, home):
                yield Transfer(
                    maker, receiver, value, _cut_part(pieces, part), forwarded=merges
                )
            if flow.way == "via-source" and maker != source:
                for receiver, part in flow.forwarded(value, maker, home):
                    yield Transfer(
                        source, receiver, value, _cut_part(pieces, part), forwarded=True
                    )


def _cut_part(pieces: Pieces, part: Range) -> tuple[int, ...]:
    """Return the size of each piece of a part."""
    if part.first <= pieces[0].first and pieces[-1].last <= part.last:
        return tuple(piece.size for piece in pieces)
    return tuple(size for piece in pieces if (size := intersection(piece, part).size))


def _of_sums(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the partial sums merged by another device than the one computing them."""
    for index, tasks in enumerate(flow.tasks):
        each = flow.graph.layers[index].pixels
        for merger, merging in enumerate(tasks):
            if merging.work != "sums" or not merging.makes.size:
                continue
            messages = tuple(
                each * chunk.size for chunk in flow.chunks(index, merging.makes)
            )
            for device, task in enumerate(tasks):
                if device != merger and task.takes.size:
                    yield Transfer(device, merger, index, messages, sums=True)


@dataclass(frozen=True)
class Leg:
    """Transfers over links at the same time, in seconds."""

    busy: float = 0.0
    """Seconds of the busiest link, access to the network included: bytes / rate."""
    delay: float = 0.0
    """Seconds of the longest delay of a link."""


@dataclass(frozen=True)
class Phase:
    """The time of one layer, or of all tiled layers together."""

    compute: float
    """Seconds, of the device that is last."""
    network: float = 0.0
    """Seconds, of the busiest link with everything that it carries."""
    gathering: Leg = Leg()
    """Messages of all devices but the source."""
    own: Leg = Leg()
    """Messages that the source sends as soon as their values are computed."""
    forwarding: Leg = Leg()
    """Messages that depend on received values of the same layer."""
    chunks: int = 1
    """Number of messages in which an output goes over a link."""
    layerwise: bool = False
    """Whether each station begins when the one before has ended."""

    @property
    def seconds(self) -> float:
        """Seconds from the complete input to the complete output."""
        if self.layerwise:
            return self.compute + sum(
                leg.busy + leg.delay
                for leg in (self.gathering, self.own, self.forwarding)
            )
        # One message is sent when all is computed and forwarded when all is received. Of several, the first passes
        # while the layer before still sends its last, so the slowest station alone counts.
        share = 1.0 if self.chunks == 1 else 0.0
        gathered, sent = (
            max(self.compute, leg.busy)
            + share * min(self.compute, leg.busy)
            + leg.delay
            for leg in (self.gathering, self.own)
        )
        if not self.forwarding.busy:
            return max(gathered, sent)
        # The way out of the source is busy with its own output until there is something to forward.
        first = share * (self.compute + self.gathering.busy) + self.gathering.delay
        begun = max(share * self.compute + self.own.busy, first)
        forwarded = max(
            begun + self.forwarding.busy, gathered + share * self.forwarding.busy
        )
        return max(forwarded + self.forwarding.delay, sent)


def overlapped(phases: Sequence[Phase]) -> float:
    """Predict the seconds of one inference alone, with computation and communication overlapping within each layer."""
    return sum(phase.seconds for phase in phases)


def interval(phases: Sequence[Phase], in_flight: int = 1) -> float:
    """Return the seconds between two results: the latency of one request, or less if several requests overlap."""
    computing, sending = (
        sum(phase.compute for phase in phases),
        sum(phase.network for phase in phases),
    )
    return max(computing, sending, overlapped(phases) / in_flight)


def phases(
    flow: Dataflow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link]
) -> tuple[Phase, ...]:
    """Return the phases of one full request, with devices in the order of the plan."""
    moved: dict[int, list[Transfer]] = {}
    for transfer in transfers(flow):
        moved.setdefault(transfer.value, []).append(transfer)
    rows = costs(flow)
    work = {
        index: _last_finish(rows[index : index + 1], devices)
        for index in range(flow.tiled, len(rows))
    }
    # All tiled layers count as one, between the image and their map; or as two, the second of the tiles that wait.
    work[INPUT] = _last_finish(rows[: flow.tiled], devices)
    if flow.overlaps:
        work[INPUT], work[flow.tiled - 2] = _in_turns(flow, devices)
    return tuple(
        _make_phase(work.get(value, 0.0), moved.get(value, ()), flow, devices, links)
        for value in range(INPUT, len(flow.graph.layers))
    )


def _last_finish(
    rows: Sequence[Sequence[Cost]], devices: Sequence[DeviceSpec]
) -> float:
    """Return the seconds until the last device has finished its part of these layers."""
    loads = (
        sum((row[device] for row in rows), Cost()) for device in range(len(devices))
    )
    return max(spec.seconds(load) for load, spec in zip(loads, devices, strict=True))


def _in_turns(flow: Dataflow, devices: Sequence[DeviceSpec]) -> tuple[float, float]:
    """Return the seconds until independent tiles are done, and the additional seconds for dependent tiles."""
    layers, ends = flow.graph.layers[: flow.tiled], [0.0, 0.0]
    loads = [[Cost(), Cost()] for _ in devices]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        cost = sum(tile_costs(layers, made, flow.settings.samples), Cost())
        loads[tile.device][is_late(tile.row, tile.column)] += cost
    for (early, late), spec in zip(loads, devices, strict=True):
        ends = [
            max(ends[0], spec.seconds(early)),
            max(ends[1], spec.seconds(early + late)),
        ]
    return ends[0], max(0.0, ends[1] - ends[0])


def _leg_of(transfer: Transfer, source: int) -> str:
    if transfer.forwarded:
        return "forwarding"
    return "own" if transfer.sender == source else "gathering"


def _make_phase(
    compute: float,
    moved: Sequence[Transfer],
    flow: Dataflow,
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
) -> Phase:
    busy: dict[str, defaultdict[tuple[str, int, int], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    delays: defaultdict[str, float] = defaultdict(float)
    for transfer in moved:
        sender, receiver = transfer.sender, transfer.receiver
        link = links[devices[sender].name, devices[receiver].name]
        size = 8 * transfer.wire_bytes(flow.settings.samples)
        leg = _leg_of(transfer, flow.plan.source)
        delays[leg] = max(delays[leg], link.delay)
        for way in (busy["all"], busy[leg]):
            way["link", sender, receiver] += size / link.rate if link.rate else 0.0
            way["up", sender, sender] += size / (devices[sender].uplink or inf)
            way["down", receiver, receiver] += size / (
                devices[receiver].downlink or inf
            )
    legs = {leg: Leg(max(busy[leg].values()), delays[leg]) for leg in delays}
    chunks = max((len(transfer.messages) for transfer in moved), default=1)
    # Each receiver of sums gets others, computed one after the other.
    sums = {each.receiver for each in moved if each.sums}
    chunks = max(1, chunks) * max(1, len(sums))
    return Phase(
        compute,
        max(busy["all"].values(), default=0.0),
        **legs,
        chunks=chunks,
        layerwise=flow.settings.options.layerwise,
    )
