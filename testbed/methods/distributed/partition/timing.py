"""How long one inference should take: layer after layer, whichever takes longer, computing it or moving what it made.

Sending overlaps with computing within a layer, and hardly beyond it: the next layer needs all of this one's output.
What a layer made goes in chunks: a device computes them, a link takes them to the device that wants them or to the
source, and what others made the source forwards, behind what it made itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.overlap import is_late
from testbed.methods.distributed.partition.resources import costs
from testbed.methods.distributed.partition.tiles import costs as tile_costs
from testbed.methods.distributed.partition.transfers import Transfer, transfers
from testbed.models.shapes import INPUT
from testbed.network.link import Link, Pair


@dataclass(frozen=True)
class Leg:
    """What goes over links at the same time, in seconds."""

    busy: float = 0.0
    """Of the busiest link, access to the network included: bytes / rate."""
    delay: float = 0.0
    """Of the link with the longest."""


@dataclass(frozen=True)
class Phase:
    """One layer, or all of the tiled ones."""

    compute: float
    """Seconds, of the device that is last."""
    network: float = 0.0
    """Seconds, of the busiest link with everything that it carries."""
    gathering: Leg = Leg()
    """From other devices than the source."""
    own: Leg = Leg()
    """From the source, what it can send as soon as it has computed it."""
    forwarding: Leg = Leg()
    """What can be sent when something of the same layer has been received."""
    chunks: int = 1
    """In how many messages an output goes over a link."""

    @property
    def seconds(self) -> float:
        """From its input to its output, where both are needed."""
        # One message is sent when all is computed and forwarded when all is received. Of several, the first passes
        # while the layer before still sends its last, so the slowest station alone counts.
        share = 1.0 if self.chunks == 1 else 0.0
        gathered, sent = (
            max(self.compute, leg.busy) + share * min(self.compute, leg.busy) + leg.delay
            for leg in (self.gathering, self.own)
        )
        if not self.forwarding.busy:
            return max(gathered, sent)
        # The way out of the source is busy with its own output until there is something to forward.
        first = share * (self.compute + self.gathering.busy) + self.gathering.delay
        begun = max(share * self.compute + self.own.busy, first)
        forwarded = max(begun + self.forwarding.busy, gathered + share * self.forwarding.busy)
        return max(forwarded + self.forwarding.delay, sent)


def overlapped(phases: Sequence[Phase]) -> float:
    """Return the seconds of one inference alone, sending and computing each layer at the same time: the prediction."""
    return sum(phase.seconds for phase in phases)


def interval(phases: Sequence[Phase], in_flight: int = 1) -> float:
    """Return the seconds from one result to the next; with several under way one's computing hides another's sending.

    With one under way that is its latency.
    """
    computing, sending = sum(phase.compute for phase in phases), sum(phase.network for phase in phases)
    return max(computing, sending, overlapped(phases) / in_flight)


def phases(flow: Dataflow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link]) -> tuple[Phase, ...]:
    """Return what one full request consists of; devices in the order of the plan."""
    moved: dict[int, list[Transfer]] = {}
    for transfer in transfers(flow):
        moved.setdefault(transfer.value, []).append(transfer)
    rows = costs(flow)
    work = {index: _seconds(rows[index : index + 1], devices) for index in range(flow.tiled, len(rows))}
    # All tiled layers count as one, between the image and their map; or as two, the second of the tiles that wait.
    work[INPUT] = _seconds(rows[: flow.tiled], devices)
    if flow.overlaps:
        work[INPUT], work[flow.tiled - 2] = _in_turns(flow, devices)
    return tuple(
        _phase(work.get(value, 0.0), moved.get(value, ()), flow, devices, links)
        for value in range(INPUT, len(flow.graph.layers))
    )


def _seconds(rows: Sequence[Sequence[Cost]], devices: Sequence[DeviceSpec]) -> float:
    """Return when the last device is done with its part of these layers."""
    loads = (sum((row[device] for row in rows), Cost()) for device in range(len(devices)))
    return max(spec.seconds(load) for load, spec in zip(loads, devices, strict=True))


def _in_turns(flow: Dataflow, devices: Sequence[DeviceSpec]) -> tuple[float, float]:
    """Return when the last device is done with the tiles that wait for none, and how much later with the others."""
    layers, ends = flow.graph.layers[: flow.tiled], [0.0, 0.0]
    loads = [[Cost(), Cost()] for _ in devices]
    for tile, made in zip(flow.plan.tiles, flow.computed, strict=True):
        cost = sum(tile_costs(layers, made, flow.execution.samples), Cost())
        loads[tile.device][is_late(tile.row, tile.column)] += cost
    for (early, late), spec in zip(loads, devices, strict=True):
        ends = [max(ends[0], spec.seconds(early)), max(ends[1], spec.seconds(early + late))]
    return ends[0], max(0.0, ends[1] - ends[0])


def _phase(
    compute: float,
    moved: Sequence[Transfer],
    flow: Dataflow,
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
) -> Phase:
    busy: dict[str, defaultdict[tuple[str, int, int], float]] = defaultdict(lambda: defaultdict(float))
    delays: defaultdict[str, float] = defaultdict(float)
    for transfer in moved:
        sender, receiver = transfer.sender, transfer.receiver
        link = links[devices[sender].name, devices[receiver].name]
        size = 8 * transfer.wire_bytes(flow.execution.samples)
        leg = "forwarding" if transfer.forwarded else "own" if sender == flow.plan.source else "gathering"
        delays[leg] = max(delays[leg], link.delay)
        for way in (busy["all"], busy[leg]):
            way["link", sender, receiver] += size / link.rate if link.rate else 0.0
            way["up", sender, sender] += size / (devices[sender].uplink or inf)
            way["down", receiver, receiver] += size / (devices[receiver].downlink or inf)
    legs = {leg: Leg(max(busy[leg].values()), delays[leg]) for leg in delays}
    chunks = max((len(transfer.messages) for transfer in moved), default=1)
    # Each receiver of sums gets others, computed one after the other.
    sums = {each.receiver for each in moved if each.sums}
    chunks = max(1, chunks) * max(1, len(sums))
    return Phase(compute, max(busy["all"].values(), default=0.0), **legs, chunks=chunks)
