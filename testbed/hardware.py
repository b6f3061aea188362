"""What a device is: its speed and memory, and the published figures behind the named profiles."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpec:
    """One emulated device."""

    name: str
    speed: float
    """FLOP/s that the pacing charges compute at (a multiply and an add are two)."""
    memory: float
    """Bytes; the container's limit and the planner's bound."""
    cpus: float | None = None
    """CFS quota for workloads that are not ours; None leaves pacing alone to set the speed."""
    profile: str = ""


@dataclass(frozen=True)
class Profile:
    """A kind of device, with where its figures come from."""

    name: str
    speed: float
    memory: float
    source: str
