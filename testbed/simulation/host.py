"""The machine that a device's program runs on, and that faults strike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from testbed.hardware import DeviceSpec
from testbed.wire import Message

if TYPE_CHECKING:
    from testbed.simulation.device import SimulatedDevice


@dataclass(eq=False, slots=True)
class Host:
    """One machine, whatever runs on it."""

    name: str
    spec: DeviceSpec
    speed: float = field(init=False)
    """FLOP/s right now."""
    device: SimulatedDevice | None = None
    """What its present program sees; None while it is off or boots."""
    booting: int | None = None
    """Number of the boot under way."""
    boots: int = 0
    """How often it was switched on."""
    disk: dict[str, Message] = field(default_factory=dict)
    """What its programs have saved; outlives them all."""
    paused: bool = False
    held: list[tuple[Callable[[Any], None], Any]] = field(default_factory=list)
    """What arrived while it was paused, and what to do about it then."""
    overdue: list[tuple[Callable[[Any], None], Any]] = field(default_factory=list)
    """Time-outs that passed while it was paused; what arrived comes first."""

    def __post_init__(self) -> None:
        self.speed = self.spec.speed

    def condition(self) -> str:
        """Say how the machine is and, where a program runs, what that waits for."""
        if self.device is None:
            return "boots" if self.booting is not None else "is off"
        return "is paused" if self.paused else self.device.waits_for()
