"""Memory of a run's devices, compared with the memory of their machine."""

from __future__ import annotations

from collections.abc import Iterable

from testbed.common.errors import HostError
from testbed.common.formats import size
from testbed.hardware import DeviceSpec

RESERVED = 1 << 30
"""Memory reserved for engine and shaper, in bytes."""
AGENT = 25e6
"""Measured memory of an agent without torch, in bytes (docs/speed.md)."""
TORCH_AGENT = 172e6
"""Memory of an agent with torch but without weights and samples, in bytes: 128 devices, which share the files of
libraries in memory, took 22 GB."""


def device_memory(device: DeviceSpec, *, torch: bool = True) -> float:
    """Return the minimum memory of a device in bytes: the memory of an agent, or a smaller limit of the device.

    >>> device_memory(DeviceSpec("worker1", 1e9, memory=4e9), torch=True)
    172000000.0
    """
    # If the limit of a container is below the memory of an agent, then the container takes at most its limit.
    return min(device.memory, TORCH_AGENT if torch else AGENT)


def describe_small_memory(devices: Iterable[DeviceSpec], *, torch: bool) -> str | None:
    """Return an error naming the devices with too little memory for an agent; None if all have enough."""
    needed = TORCH_AGENT if torch else AGENT
    small = []
    for device in devices:
        if device.memory < needed:
            small.append(f"{device.name} ({size(device.memory)})")
    if not small:
        return None
    names = ", ".join(small[:5])
    if len(small) > 5:
        names += " and others"
    agent = "an agent with torch" if torch else "an agent"
    return (
        f"too little memory: {names}: {agent} takes {size(needed)}: use more memory, "
        "or '--runtime simulate'"
    )


def check_memory(devices: Iterable[DeviceSpec], memory: float, *, torch: bool) -> None:
    """Raise HostError if the devices exceed the ``memory`` of their machine in bytes."""
    required = [device_memory(device, torch=torch) for device in devices]
    if sum(required) <= memory - RESERVED:
        return
    agent = f"{size(AGENT)} for each agent"
    if torch:
        agent = f"{size(TORCH_AGENT)} for each agent with torch"
    raise HostError(
        f"{len(required)} devices take at least {size(sum(required))} of memory ({agent}), the engine's machine has "
        f"{size(memory)}, and {size(RESERVED)} is reserved for engine and shaper: use fewer devices, several hosts "
        "(--hosts), or '--runtime simulate'"
    )
