"""Communication of one inference: transfers, their size on the wire, and the resulting time.

A layer takes the longer of its computation and its communication. Sending overlaps with computing within a layer but
hardly across layers, because the next layer needs the complete output of this one. Outputs are sent in chunks: a device
computes a chunk while a link carries the previous one to its receiver or to the source. The source forwards the chunks
of other devices after its own chunks. Elements are counted for one sample; `testbed_stahl.dataflow` explains values.
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
from testbed_stahl.tiles import tile_costs, waits_for_neighbours


@dataclass(frozen=True)
class Transfer:
    """Messages from one device to another with parts of one value; devices are indices of the plan."""

    sender: int
    receiver: int
    value: int
    """The layer whose output is sent, or `INPUT`."""
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
    return (*tile_transfers(flow), *_value_transfers(flow), *_sum_transfers(flow))


def sent_elements(transfers: Sequence[Transfer]) -> int:
    """Return the elements of one sample in some transfers; for all transfers of an inference this is the paper's C.

    >>> sent_elements([Transfer(0, 1, 2, (8, 8)), Transfer(1, 0, 3, (4,))])
    20
    """
    return sum(transfer.elements for transfer in transfers)


def tile_transfers(flow: Dataflow) -> tuple[Transfer, ...]:
    """Return the transfers of all tiles computed by other devices than the source, assuming no stealing.

    These are regions of the image, results, and overlaps reused between tiles. Overlaps count as outputs of the
    second-to-last tiled layer (`make_phases` gives the reason). They pass through the source, unless devices send to
    each other directly and no tile can be stolen.
    """
    source = flow.plan.source
    transfers = []
    for tile in flow.plan.tiles:
        if tile.device == source:
            continue
        first = flow.graph.layers[0]
        last = flow.graph.layers[flow.tiled_count - 1]
        image_elements = first.input[0] * tile.regions[0].pixels
        result_elements = last.output[0] * tile.regions[-1].pixels
        to_device = Transfer(source, tile.device, INPUT, (image_elements,))
        to_source = Transfer(
            tile.device, source, flow.tiled_count - 1, (result_elements,)
        )
        transfers += [to_device, to_source]
    for lender, borrower in flow.overlaps:
        transfers += _overlap_transfers(flow, lender, borrower)
    return tuple(transfers)


def _overlap_transfers(
    flow: Dataflow, lender: int, borrower: int
) -> Iterator[Transfer]:
    """Yield the transfers of the regions reused by the tile ``borrower`` from the tile ``lender``."""
    overlaps = flow.overlaps[lender, borrower]
    size = sum(map(flow.values, overlaps))
    route = _route_of_overlap(flow, lender, borrower)
    for leg, (sender, receiver) in enumerate(pairwise(route)):
        if sender == receiver:
            continue
        is_forwarded = leg == 1 and flow.plan.source != route[0]
        # Tiles that wait for others are a phase of their own, to which `make_phases` gives this layer's number.
        value = flow.tiled_count - 2
        yield Transfer(sender, receiver, value, (size,), forwarded=is_forwarded)


def _route_of_overlap(flow: Dataflow, lender: int, borrower: int) -> list[int]:
    """Return the devices on the way of an overlap, from the lender's device to the borrower's."""
    start = flow.plan.tiles[lender].device
    end = flow.plan.tiles[borrower].device
    passes_source = start != end and flow.exchange == "via-source"
    # If tiles can be stolen, only the source knows which device computes a tile.
    if flow.settings.options.tile_stealing or passes_source:
        return [start, flow.plan.source, end]
    return [start, end]


def _value_transfers(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the transfers of values, in two legs if all traffic passes through the source."""
    source = flow.plan.source
    for value, made_ranges in flow.made_ranges.items():
        for maker, made_range in enumerate(made_ranges):
            if not made_range.size:
                continue
            pieces = flow.pieces(value, maker)
            merges = _merges_first(flow, value, maker)
            for receiver, part in flow.receivers(value, maker, made_range):
                sizes = _piece_sizes(pieces, part)
                yield Transfer(maker, receiver, value, sizes, forwarded=merges)
            if flow.exchange == "via-source" and maker != source:
                for receiver, part in flow.forwarded(value, maker, made_range):
                    sizes = _piece_sizes(pieces, part)
                    yield Transfer(source, receiver, value, sizes, forwarded=True)


def _merges_first(flow: Dataflow, value: int, maker: int) -> bool:
    """Return whether a device joins tiles or merges sums of other devices before having a value."""
    if value == INPUT:
        return False
    if value == flow.tiled_count - 1:
        return True
    return flow.tasks[value][maker].work == "sums"


def _piece_sizes(pieces: Pieces, part: Range) -> tuple[int, ...]:
    """Return the number of elements of ``part`` in each piece, without pieces outside ``part``."""
    sizes = []
    for piece in pieces:
        size = intersection(piece, part).size
        if size:
            sizes.append(size)
    return tuple(sizes)


def _sum_transfers(flow: Dataflow) -> Iterator[Transfer]:
    """Yield the transfers of partial sums to other devices, which merge them."""
    for index, tasks in enumerate(flow.tasks):
        pixels = flow.graph.layers[index].pixels
        for merger, merger_task in enumerate(tasks):
            merged_channels = merger_task.output_channels
            if merger_task.work != "sums" or not merged_channels.size:
                continue
            chunks = flow.chunks(index, merged_channels)
            messages = tuple(pixels * chunk.size for chunk in chunks)
            for device, task in enumerate(tasks):
                if device != merger and task.input_range.size:
                    yield Transfer(device, merger, index, messages, sums=True)


@dataclass(frozen=True)
class Leg:
    """The time of simultaneous transfers over several links."""

    busy: float = 0.0
    """Seconds in which the busiest link, or access of a device to the network, transmits."""
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
    """Messages that the source sends as soon as it has computed their values."""
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
        # The source begins to forward when it has sent its own output and the first message to forward has arrived.
        serial = self._serial_share
        gathering = self.gathering
        own_sent = serial * self.compute + self.own.busy
        first_arrival = serial * (self.compute + gathering.busy) + gathering.delay
        forwarding_start = max(own_sent, first_arrival)
        # The last message to forward leaves after all others, and not before it has arrived.
        after_others = forwarding_start + self.forwarding.busy
        after_arrival = gathered + serial * self.forwarding.busy
        forwarded = max(after_others, after_arrival)
        return max(forwarded + self.forwarding.delay, sent)

    @property
    def _serial_share(self) -> float:
        """1 if computing and sending follow one another, 0 if both overlap."""
        # A single message is sent after the whole output is computed, and forwarded after it has arrived. With several
        # messages, computing and sending take place at the same time, so that only the slower of both counts.
        return 1.0 if self.chunks == 1 else 0.0

    def _computed_and_sent(self, leg: Leg) -> float:
        """Return the seconds until the output is computed and the messages on a leg have arrived."""
        longer = max(self.compute, leg.busy)
        shorter = min(self.compute, leg.busy)
        return longer + self._serial_share * shorter + leg.delay


def predict_latency(phases: Sequence[Phase]) -> float:
    """Return the seconds of one inference, with no other in flight; computing and sending overlap within a layer."""
    return sum(phase.seconds for phase in phases)


def predict_interval(phases: Sequence[Phase], in_flight: int = 1) -> float:
    """Return the seconds between two results: the latency of one request, or less if several requests overlap.

    >>> predict_interval([Phase(compute=2.0, network=1.0, gathering=Leg(busy=1.0))], in_flight=2)
    2.0
    """
    # With many requests in flight, the busiest processor or the busiest link determines the interval.
    computing = sum(phase.compute for phase in phases)
    sending = sum(phase.network for phase in phases)
    return max(computing, sending, predict_latency(phases) / in_flight)


def make_phases(
    flow: Dataflow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link]
) -> tuple[Phase, ...]:
    """Return the phases of one full request; ``devices`` are in the order of the plan."""
    transfers: dict[int, list[Transfer]] = {}
    for transfer in all_transfers(flow):
        transfers.setdefault(transfer.value, []).append(transfer)
    rows = layer_costs(flow)
    seconds = {}
    for index in range(flow.tiled_count, len(rows)):
        seconds[index] = _last_finish([rows[index]], devices)
    # All tiled layers are one phase, from the image to their map, under the number `INPUT`. With reuse they are two:
    # the tiles that wait for their neighbours are a second phase, under the number of the second-to-last tiled layer,
    # whose number no other phase has.
    seconds[INPUT] = _last_finish(rows[: flow.tiled_count], devices)
    if flow.overlaps:
        seconds[INPUT], seconds[flow.tiled_count - 2] = _tile_seconds(flow, devices)
    phases = []
    for value in range(INPUT, len(flow.graph.layers)):
        compute = seconds.get(value, 0.0)
        sent = transfers.get(value, ())
        phases.append(_make_phase(compute, sent, flow, devices, links))
    return tuple(phases)


def _last_finish(
    rows: Sequence[Sequence[Cost]], devices: Sequence[DeviceSpec]
) -> float:
    """Return the seconds until the last device has computed some layers; ``rows`` has the cost for each device."""
    finish_times = []
    for index, device in enumerate(devices):
        load = Cost()
        for row in rows:
            load += row[index]
        finish_times.append(device.seconds(load))
    return max(finish_times)


def _tile_seconds(flow: Dataflow, devices: Sequence[DeviceSpec]) -> tuple[float, float]:
    """Return the seconds until all independent tiles are done, and the additional seconds of the other tiles."""
    layers = flow.graph.layers[: flow.tiled_count]
    independent = [Cost()] * len(devices)
    dependent = [Cost()] * len(devices)
    for tile, made in zip(flow.plan.tiles, flow.computed_regions, strict=True):
        costs = tile_costs(layers, made, flow.settings.samples)
        cost = sum(costs, Cost())
        loads = (
            dependent if waits_for_neighbours(tile.row, tile.column) else independent
        )
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
    """Return the phase computing for ``compute`` seconds and making the transfers ``moved``."""
    # By leg, and under "all" for all transfers: the busy seconds of each link, and of each access to the network.
    busy: dict[str, defaultdict[tuple[str, int, int], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    delays: defaultdict[str, float] = defaultdict(float)
    for transfer in moved:
        sender = transfer.sender
        receiver = transfer.receiver
        pair = (devices[sender].name, devices[receiver].name)
        link = links[pair]
        bits = 8 * transfer.wire_bytes(flow.settings.samples)
        leg = _leg_of(transfer, flow.plan.source)
        delays[leg] = max(delays[leg], link.delay)
        # An access without a limit has None.
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
    # Each merger gets different sums, which a device computes one after the other, like chunks.
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
