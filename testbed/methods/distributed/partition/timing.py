"""How long one inference should take: layer after layer, whichever takes longer, computing it or moving what it made.

Sending overlaps with computing within a layer, and hardly beyond it: the next layer needs all of this one's output. So
each layer takes max(compute, bytes / rate) of the device or link that is busiest with it, and one delay for each device
that its values pass on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from testbed.hardware import DeviceSpec
from testbed.methods.distributed.partition.dataflow import Dataflow
from testbed.methods.distributed.partition.resources import multiplications
from testbed.methods.distributed.partition.transfers import Transfer, transfers
from testbed.models.shapes import INPUT
from testbed.network.link import Link, Pair


@dataclass(frozen=True)
class Phase:
    """One layer, or all of the tiled ones, in seconds."""

    compute: float
    """Of the device that is last."""
    network: float
    """Of the busiest link, access to the network included: bytes / rate."""
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


def phases(flow: Dataflow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link]) -> tuple[Phase, ...]:
    """Return what one full request consists of; devices in the order of the plan."""
    samples = flow.execution.samples
    moved: dict[int, list[Transfer]] = {}
    for transfer in transfers(flow):
        moved.setdefault(transfer.value, []).append(transfer)
    rows = multiplications(flow)
    work = {index: _seconds(rows[index : index + 1], devices, samples) for index in range(flow.tiled, len(rows))}
    # All tiled layers count as one, between the image and their map.
    work[INPUT] = _seconds(rows[: flow.tiled], devices, samples)
    return tuple(
        Phase(work.get(value, 0.0), *_network(moved.get(value, ()), flow, devices, links))
        for value in range(INPUT, len(flow.graph.layers))
    )


def _seconds(rows: Sequence[Sequence[int]], devices: Sequence[DeviceSpec], samples: int) -> float:
    """Return when the last device is done with its part of these layers; a multiplication comes with an addition."""
    loads = (sum(row[device] for row in rows) for device in range(len(devices)))
    return max(2.0 * samples * load / spec.speed for load, spec in zip(loads, devices, strict=True))


def _network(
    moved: Sequence[Transfer], flow: Dataflow, devices: Sequence[DeviceSpec], links: Mapping[Pair, Link]
) -> tuple[float, float]:
    """Return the seconds for which the busiest link carries these, and the delays of all legs."""
    busy: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    delays: dict[bool, float] = {}
    for transfer in moved:
        sender, receiver = transfer.sender, transfer.receiver
        link = links[devices[sender].name, devices[receiver].name]
        size = 8 * transfer.wire_bytes(flow.execution.samples)
        busy["link", sender, receiver] += size / link.rate if link.rate else 0.0
        busy["up", sender, sender] += size / (devices[sender].uplink or inf)
        busy["down", receiver, receiver] += size / (devices[receiver].downlink or inf)
        handed_on = flow.way == "source" and sender == flow.plan.source
        delays[handed_on] = max(delays.get(handed_on, 0.0), link.delay)
    return max(busy.values(), default=0.0), sum(delays.values())
