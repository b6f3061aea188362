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
from testbed_stahl.demands import layer_costs
from testbed_stahl.plan import Pieces, Range, intersection
from testbed_stahl.tiles import is_late, tile_costs


@dataclass(frozen=True)
class Transfer:
    """Traffic from one device to another caused by the output of one layer."""

    sender: int
    receiver: int
    value: int
    """The layer, or `INPUT`."""
    messages: tuple[int, ...]
    """Elements of one sample in each message."""
    forwarded: bool = False
    """Whether the sender forwards data of other devices, or first joins tiles or merges sums of other devices."""
    sums: bool = False
    """Whether the data are partial sums, which differ by receiver; all receivers of a value get equal data."""

    @cached_property
    def elements(self) -> int:
        """Elements of one sample in all messages."""
        return sum(self.messages)

    def wire_bytes(self, samples: int) -> float:
        """Return the bytes on the wire of a request of ``samples`` samples, headers included.

        >>> Transfer(sender=0, receiver=1, value=2, messages=(8, 8)).wire_bytes(samples=1)
        1100.0
        """
        total = 0.0
        for elements, count in Counter(self.messages).items():
            total += count * size_around(samples * BYTES_PER_VALUE * elements)
        return total


def all_transfers(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return all transfers of one inference."""
    return (*tile_transfers(flow), *_of_values(flow), *_of_sums(flow))


def sent_elements(transfers: Sequence[Transfer]) -> int:
    """Return the elements of one sample in the given transfers; all transfers of an inference have the paper's C.

    >>> sent_elements([Transfer(0, 1, 2, (8, 8)), Transfer(1, 0, 3, (4,))])
    20
    """
    return sum(transfer.elements for transfer in transfers)


def tile_transfers(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return the transfers of all tiles computed away from the source: input regions and results.

    Data reused between tiles count as outputs of the second-to-last tiled layer. Reused data pass through the source
    like other tile data, unless devices send to each other directly; they always pass through the source if tiles can
    be stolen. The count assumes no stealing.
    """
    source = flow.plan.source
    transfers = []
    for tile in flow.plan.tiles:
        if tile.device == source:
            continue
        first = flow.graph.layers[0]
        last = flow.graph.layers[flow.tiled - 1]
        image = first.input[0] * tile.regions[0].pixels
        result = last.output[0] * tile.regions[-1].pixels
        to_device = Transfer(source, tile.device, INPUT, (image,))
        to_source = Transfer(tile.device, source, flow.tiled - 1, (result,))
        transfers += [to_device, to_source]
    for lender, borrower in flow.overlaps:
        transfers += _overlap_transfers(flow, lender, borrower)
    return tuple(transfers)


def _overlap_transfers(
    flow: Dataflow, lender: int, borrower: int
) -> Iterator[Transfer]:
    """Yield the transfers of the regions lent by one tile to another."""
    overlaps = flow.overlaps[lender, borrower]
    size = sum(map(flow.values, overlaps))
    route = _route_of_overlap(flow, lender, borrower)
    for leg, (sender, receiver) in enumerate(pairwise(route)):
        if sender == receiver:
            continue
        is_forwarded = leg == 1 and flow.plan.source != route[0]
        # Tiles that wait for others are a phase of their own, to which `make_phases` gives this layer's number.
        value = flow.tiled - 2
        yield Transfer(sender, receiver, value, (size,), forwarded=is_forwarded)


def _route_of_overlap(flow: Dataflow, lender: int, borrower: int) -> list[int]:
    """Return the devices on the way of an overlap, from the lender's device to the borrower's."""
    start = flow.plan.tiles[lender].device
    end = flow.plan.tiles[borrower].device
    passes_source = start != end and flow.way == "via-source"
    # A stolen tile is computed by any device, which only the source knows.
    if flow.settings.options.tile_stealing or passes_source:
        return [start, flow.plan.source, end]
    return [start, end]


def _of_values(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the parts of outputs needed by other devices, in two legs if all traffic passes through the source."""
    source = flow.plan.source
    for value, homes in flow.homes.items():
        for maker, home in enumerate(homes):
            if not home.size:
                continue
            pieces = flow.pieces(value, maker)
            merges = _merges_first(flow, value, maker)
            for receiver, part in flow.receivers(value, maker, home):
                sizes = _piece_sizes(pieces, part)
                yield Transfer(maker, receiver, value, sizes, forwarded=merges)
            if flow.way == "via-source" and maker != source:
                for receiver, part in flow.forwarded(value, maker, home):
                    sizes = _piece_sizes(pieces, part)
                    yield Transfer(source, receiver, value, sizes, forwarded=True)


def _merges_first(flow: Dataflow, value: int, maker: int) -> bool:
    """Return whether a device joins tiles or merges sums of other devices before it has a value."""
    if value == INPUT:
        return False
    if value == flow.tiled - 1:
        return True
    return flow.tasks[value][maker].work == "sums"


def _piece_sizes(pieces: Pieces, part: Range) -> tuple[int, ...]:
    """Return the size of each piece of a part."""
    sizes = []
    for piece in pieces:
        size = intersection(piece, part).size
        if size:
            sizes.append(size)
    return tuple(sizes)


def _of_sums(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the partial sums merged by another device than the one computing them."""
    for index, tasks in enumerate(flow.tasks):
        pixels = flow.graph.layers[index].pixels
        for merger, merging in enumerate(tasks):
            if merging.work != "sums" or not merging.makes.size:
                continue
            chunks = flow.chunks(index, merging.makes)
            messages = tuple(pixels * chunk.size for chunk in chunks)
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
    """Seconds of the slowest device."""
    network: float = 0.0
    """Seconds of the busiest link with all messages of the layer."""
    gathering: Leg = Leg()
    """Messages of all devices but the source."""
    own: Leg = Leg()
    """Messages that the source sends as soon as their values are computed."""
    forwarding: Leg = Leg()
    """Messages that depend on received values of the same layer."""
    chunks: int = 1
    """Number of messages in which an output goes over a link."""
    layerwise: bool = False
    """Whether computing, gathering, sending and forwarding follow one another without overlap."""

    @property
    def seconds(self) -> float:
        """Seconds from the complete input to the complete output.

        >>> Phase(compute=2.0, gathering=Leg(busy=1.0), chunks=4).seconds
        2.0
        >>> Phase(compute=2.0, gathering=Leg(busy=1.0), layerwise=True).seconds
        3.0
        """
        if self.layerwise:
            sending = 0.0
            for leg in (self.gathering, self.own, self.forwarding):
                sending += leg.busy + leg.delay
            return self.compute + sending
        gathered = self._computed_and_sent(self.gathering)
        sent = self._computed_and_sent(self.own)
        if not self.forwarding.busy:
            return max(gathered, sent)
        # The source's outgoing link is busy with its own output until the first message to forward has arrived.
        serial = self._serial_share
        gathering = self.gathering
        first = serial * (self.compute + gathering.busy) + gathering.delay
        begun = max(serial * self.compute + self.own.busy, first)
        # The last message to forward leaves after all others, and not before it has arrived.
        after_others = begun + self.forwarding.busy
        after_arrival = gathered + serial * self.forwarding.busy
        forwarded = max(after_others, after_arrival)
        return max(forwarded + self.forwarding.delay, sent)

    @property
    def _serial_share(self) -> float:
        """1 if computing and sending follow one another, 0 if both overlap."""
        # A single message is sent when all is computed and forwarded when all is received. Of several, the first one
        # passes while the layer before still sends its last one, so only the slowest of computing and sending counts.
        return 1.0 if self.chunks == 1 else 0.0

    def _computed_and_sent(self, leg: Leg) -> float:
        """Return the seconds until the output is computed and its messages on a leg have arrived."""
        longer = max(self.compute, leg.busy)
        shorter = min(self.compute, leg.busy)
        return longer + self._serial_share * shorter + leg.delay


def predict_latency(phases: Sequence[Phase]) -> float:
    """Predict the seconds of one inference alone, with computation and communication overlapping within each layer."""
    return sum(phase.seconds for phase in phases)


def predict_interval(phases: Sequence[Phase], in_flight: int = 1) -> float:
    """Return the seconds between two results: the latency of one request, or less if several requests overlap.

    >>> predict_interval([Phase(compute=2.0, network=1.0, gathering=Leg(busy=1.0))], in_flight=2)
    2.0
    """
    # With many requests in flight, the busiest processor or the busiest link sets the pace.
    computing = sum(phase.compute for phase in phases)
    sending = sum(phase.network for phase in phases)
    return max(computing, sending, predict_latency(phases) / in_flight)


def make_phases(
    flow: Dataflow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link]
) -> tuple[Phase, ...]:
    """Return the phases of one full request, with devices in the order of the plan."""
    transfers: dict[int, list[Transfer]] = {}
    for transfer in all_transfers(flow):
        transfers.setdefault(transfer.value, []).append(transfer)
    rows = layer_costs(flow)
    seconds = {}
    for index in range(flow.tiled, len(rows)):
        seconds[index] = _last_finish([rows[index]], devices)
    # All tiled layers count as one phase, from the image to their map; with reuse as two, of which the second has the
    # tiles that wait for their neighbours.
    seconds[INPUT] = _last_finish(rows[: flow.tiled], devices)
    if flow.overlaps:
        seconds[INPUT], seconds[flow.tiled - 2] = _tile_seconds(flow, devices)
    phases = []
    for value in range(INPUT, len(flow.graph.layers)):
        compute = seconds.get(value, 0.0)
        sent = transfers.get(value, ())
        phases.append(_make_phase(compute, sent, flow, devices, links))
    return tuple(phases)


def _last_finish(
    rows: Sequence[Sequence[Cost]], devices: Sequence[DeviceSpec]
) -> float:
    """Return the seconds until the last device has finished some layers."""
    finish_times = []
    for index, device in enumerate(devices):
        load = Cost()
        for row in rows:
            load += row[index]
        finish_times.append(device.seconds(load))
    return max(finish_times)


def _tile_seconds(flow: Dataflow, devices: Sequence[DeviceSpec]) -> tuple[float, float]:
    """Return the seconds until independent tiles are done, and the additional seconds for dependent tiles."""
    layers = flow.graph.layers[: flow.tiled]
    independent = [Cost()] * len(devices)
    dependent = [Cost()] * len(devices)
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        costs = tile_costs(layers, made, flow.settings.samples)
        cost = sum(costs, Cost())
        loads = dependent if is_late(tile.row, tile.column) else independent
        loads[tile.device] += cost
    first_end = 0.0
    last_end = 0.0
    for index, device in enumerate(devices):
        both = independent[index] + dependent[index]
        first_end = max(first_end, device.seconds(independent[index]))
        last_end = max(last_end, device.seconds(both))
    return first_end, max(0.0, last_end - first_end)


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
    """Return the phase with some seconds of computing and some transfers."""
    # Seconds that each link and each access to the network is busy, for all transfers and for each leg.
    busy: dict[str, defaultdict[tuple[str, int, int], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    delays: defaultdict[str, float] = defaultdict(float)
    for transfer in moved:
        sender, receiver = transfer.sender, transfer.receiver
        pair = (devices[sender].name, devices[receiver].name)
        link = links[pair]
        bits = 8 * transfer.wire_bytes(flow.settings.samples)
        leg = _leg_of(transfer, flow.plan.source)
        delays[leg] = max(delays[leg], link.delay)
        # None is no limit.
        uplink = devices[sender].uplink or inf
        downlink = devices[receiver].downlink or inf
        on_link = bits / link.rate if link.rate else 0.0
        for seconds in (busy["all"], busy[leg]):
            seconds["link", sender, receiver] += on_link
            seconds["up", sender, sender] += bits / uplink
            seconds["down", receiver, receiver] += bits / downlink
    legs = {}
    for leg, delay in delays.items():
        busiest = max(busy[leg].values())
        legs[leg] = Leg(busiest, delay)
    chunks = 1
    # Each receiver gets different sums, which are computed one after the other.
    mergers = set()
    for transfer in moved:
        chunks = max(chunks, len(transfer.messages))
        if transfer.sums:
            mergers.add(transfer.receiver)
    chunks *= max(1, len(mergers))
    return Phase(
        compute,
        max(busy["all"].values(), default=0.0),
        **legs,
        chunks=chunks,
        layerwise=flow.settings.options.layerwise,
    )
