"""How long one request takes alone if nothing overlaps: what T and C mean in seconds.

A request is a row of phases: all that is sent on account of one layer's input, the computing of that layer on all
devices at once, all that is sent of its output. A phase of sending takes as long as the busiest of what it uses, a
link or a device's access, and one delay. A run overlaps some of this, and waits for acknowledgements between messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.partition.distributed.network import Network
from testbed.partition.distributed.plan import DistributedPlan
from testbed.partition.distributed.resources import early, multiplications
from testbed.partition.distributed.transfers import Transfer, transfers


def interval(
    network: Network,
    plan: DistributedPlan,
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    samples: int = 1,
    in_flight: int = 1,
) -> float:
    """Return the seconds from one result to the next; with one request under way, its latency.

    With several, one's computing overlaps with another's sending. ``devices`` are those of the plan.
    """
    computing = computing_time(network, plan, devices, samples)
    sending = sending_time(network, plan, devices, links, samples)
    return max(computing, sending, (computing + sending) / in_flight)


def computing_time(network: Network, plan: DistributedPlan, devices: Sequence[DeviceSpec], samples: int = 1) -> float:
    """Return the seconds that the slowest device takes for each layer, together; the tiled layers count as one."""
    rows, count = multiplications(network, plan), early(plan)
    tiled = [sum(row[device] for row in rows[:count]) for device in range(len(devices))]
    return sum(
        max(2 * samples * work / device.speed for work, device in zip(row, devices, strict=True))
        for row in (tiled, *rows[count:])
    )


def sending_time(
    network: Network,
    plan: DistributedPlan,
    devices: Sequence[DeviceSpec],
    links: Mapping[Pair, Link],
    samples: int = 1,
) -> float:
    """Return the seconds that all phases of sending take."""
    phases = groupby(transfers(network, plan), key=lambda each: (each.layer, each.what))
    return sum(_phase(list(phase), devices, links, samples) for _, phase in phases)


def _phase(phase: Sequence[Transfer], devices: Sequence[DeviceSpec], links: Mapping[Pair, Link], samples: int) -> float:
    busy: dict[tuple[str, ...], float] = defaultdict(float)
    delays = []
    for each in phase:
        sender, receiver = devices[each.sender], devices[each.receiver]
        link, size = links[sender.name, receiver.name], each.wire_bytes(samples)
        busy["link", sender.name, receiver.name] += link.transmission_time(size)
        busy["uplink", sender.name] += 8 * size / sender.uplink if sender.uplink else 0.0
        busy["downlink", receiver.name] += 8 * size / receiver.downlink if receiver.downlink else 0.0
        delays.append(link.delay)
    return max(busy.values()) + max(delays)
