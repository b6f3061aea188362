"""How long one inference should take: layer after layer, whichever takes longer, computing it or moving what it made.

Sending overlaps with computing within a layer, and hardly beyond it: the next layer needs all of this one's output. So
each layer takes max(compute, bytes / rate) of the device or link that is busiest with it, and one delay for each device
that its values pass on the way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from testbed.hardware import DeviceSpec
from testbed.models.chain import BYTES_PER_VALUE
from testbed.network.framing import wire_bytes
from testbed.network.link import Link, Pair
from testbed.partition.distributed.flow import Flow, Transfer
from testbed.partition.distributed.network import IMAGE
from testbed.partition.distributed.tiles import multiplications
from testbed.partition.pipeline import ENVELOPE


@dataclass(frozen=True)
class Phase:
    """One layer, or all of the tiled ones, in seconds."""

    compute: float
    """Of the device that is last."""
    network: float
    """Of the busiest link, access to the network included: bytes / rate."""
    legs: float
    """The same where all passes the source, if it collected everything before it hands anything on."""
    delay: float
    """Of each leg one."""

    @property
    def seconds(self) -> float:
        """From its input to its output, where both are needed."""
        return max(self.compute, self.network) + self.delay


def overlapped(phases: Sequence[Phase]) -> float:
    """Return the seconds of one inference alone, sending and computing each layer at the same time: the prediction."""
    return sum(phase.seconds for phase in phases)


def interval(phases: Sequence[Phase], in_flight: int = 1) -> float:
    """Return the seconds from one result to the next; with several under way one's computing hides another's sending.

    With one under way that is its latency.
    """
    computing, sending = sum(phase.compute for phase in phases), sum(phase.network for phase in phases)
    return max(computing, sending, overlapped(phases) / in_flight)


def in_turn(phases: Sequence[Phase]) -> float:
    """Return the seconds of one inference alone if nothing were sent while anything is computed."""
    return sum(phase.compute + phase.legs + phase.delay for phase in phases)


def phases(
    flow: Flow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link], samples: int = 1
) -> tuple[Phase, ...]:
    """Return what one inference with so many samples consists of; devices in the order of the plan."""
    moved: dict[int, list[Transfer]] = {}
    for transfer in flow.transfers():
        moved.setdefault(transfer.value, []).append(transfer)
    work: dict[int, float] = {}
    for index in range(len(flow.network.layers)):
        if index >= flow.tiled:
            flops = (2.0 * samples * flow.multiplications(index, device) for device in range(len(devices)))
            work[index] = max(each / spec.speed for each, spec in zip(flops, devices, strict=True))
    if flow.plan.tiling:
        loads = Counter[int]()
        for tile in flow.plan.tiling.tiles:
            loads[tile.device] += 2 * samples * sum(multiplications(flow.network.layers[: flow.tiled], tile))
        work[IMAGE] = max(load / devices[device].speed for device, load in loads.items())
    return tuple(
        Phase(work.get(value, 0.0), *_network(moved.get(value, ()), flow, devices, links, samples))
        for value in range(IMAGE, len(flow.network.layers))
    )


def _network(
    transfers: Sequence[Transfer], flow: Flow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link], samples: int
) -> tuple[float, float, float]:
    """Return the seconds for which the busiest link carries these, the same leg by leg, the delays of all legs."""
    busy: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    by_leg: dict[bool, defaultdict[tuple[str, int, int], float]] = {}
    delays: dict[bool, float] = {}
    for sender, receiver, _, elements in transfers:
        link = links[devices[sender].name, devices[receiver].name]
        size = 8 * wire_bytes(BYTES_PER_VALUE * samples * elements + ENVELOPE)
        handed_on = flow.way == "source" and sender == flow.plan.source
        for carried in (busy, by_leg.setdefault(handed_on, defaultdict(float))):
            carried["link", sender, receiver] += size / link.rate if link.rate else 0.0
            carried["up", sender, sender] += size / (devices[sender].uplink or inf)
            carried["down", receiver, receiver] += size / (devices[receiver].downlink or inf)
        delays[handed_on] = max(delays.get(handed_on, 0.0), link.delay)
    legs = sum(max(carried.values()) for carried in by_leg.values())
    return max(busy.values(), default=0.0), legs, sum(delays.values())
