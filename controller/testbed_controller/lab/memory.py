"""Whether the devices of a run fit into the memory of the machine that they share."""

from __future__ import annotations

from collections.abc import Iterable

from testbed.common.errors import HostError
from testbed.common.formats import size
from testbed.hardware import DeviceSpec

RESERVED = 1 << 30
"""Bytes of a machine's memory that are left to its engine and shaper."""
AGENT = 25e6
"""Bytes of an agent that has imported no torch, as measured (docs/speed.md)."""
TORCH_AGENT = 172e6
"""The same with torch, without weights and samples: 128 such devices took 22 GB, the files that they share included."""


def device_memory(device: DeviceSpec, *, torch: bool = True) -> float:
    """Return the bytes that a device takes at least; its limit, which is seldom reached, where that is less."""
    return min(device.memory, TORCH_AGENT if torch else AGENT)


def too_small(devices: Iterable[DeviceSpec], *, torch: bool) -> str | None:
    """Return which devices cannot hold their agent in a container, and the remedy; None where all can."""
    agent = TORCH_AGENT if torch else AGENT
    small = [f"{device.name} ({size(device.memory)})" for device in devices if device.memory < agent]
    if not small:
        return None
    return (
        f"containers cannot hold {', '.join(small[:5])}{' and others' if len(small) > 5 else ''}: an agent"
        f"{' with torch' if torch else ''} takes {size(agent)}: give them more memory, or '--runtime simulate'"
    )


def check_memory(devices: Iterable[DeviceSpec], memory: float, *, torch: bool) -> None:
    """Raise HostError where devices take more than a machine has; ``memory`` is that of the machine in bytes."""
    taken = [device_memory(device, torch=torch) for device in devices]
    if sum(taken) <= memory - RESERVED:
        return
    agent = f"{size(TORCH_AGENT)} for each agent with torch" if torch else f"{size(AGENT)} for each agent"
    raise HostError(
        f"{len(taken)} devices take at least {size(sum(taken))} of memory ({agent}), the engine's machine has "
        f"{size(memory)}, and {size(RESERVED)} is kept for engine and shaper: use fewer devices, several hosts "
        "(--hosts), or '--runtime simulate'"
    )
