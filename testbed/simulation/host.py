"""The machine that a device's program runs on, and that faults strike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from testbed.faults.conditions import DeviceState
from testbed.hardware import DeviceSpec
from testbed.simulation.sharing import Shared
from testbed.trace.log import Form, Row
from testbed.wire.message import Message


class Guest(Protocol):
    """What runs on a host from one boot to the next: a program and the device that it sees."""

    name: str
    running: bool
    """Whether the program has not returned."""
    leaving: bool
    """Whether it has been told to leave."""
    exposed: dict[bool, Callable[[], Mapping[str, Any]]]
    """Returns the weights that the device holds."""

    def deliver(self, message: Message, size: int, start: float, duration: float, cast: int | None = None) -> None:
        """Put an arrived message into the inbox."""

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Write an event, unless the device is dead."""

    def add(self, form: Form, row: Row) -> None:
        """Write an event by its form, which is quicker."""

    def pause(self) -> None:
        """Stop the processor and hold back the program."""

    def resume(self) -> None:
        """Let the processor and the program go on."""

    def change_speed(self, factor: float) -> None:
        """Do what is left of the work under way at ``factor`` times the speed so far."""

    def kill(self) -> None:
        """End the program wherever it is."""

    def waits_for(self) -> str:
        """Say what the program waits for."""


@dataclass(eq=False, slots=True)
class Host:
    """One machine, whatever runs on it."""

    name: str
    spec: DeviceSpec
    number: int
    """Among the hosts of its world."""
    factor: float = 1.0
    """The share of its own speed at which it computes right now."""
    cores: Shared | None = None
    """Cores of the machine that it shares, in seconds of work a second; None where it is a machine itself."""
    device: Guest | None = None
    """What its present program sees; None while it is off or boots."""
    booting: int | None = None
    """Number of the boot under way."""
    boots: int = 0
    """How often it was switched on again."""
    disk: dict[str, Message] = field(default_factory=dict)
    """What its programs have saved; outlives them all."""
    paused: bool = False
    held: deque[tuple[Callable[[Any], None], Any]] = field(default_factory=deque)
    """What arrived while it was paused, and what to do about it then."""

    def state(self) -> DeviceState:
        """Return whether it is on; while it boots it is."""
        if self.device is None and self.booting is None:
            return "down"
        return "paused" if self.paused else "up"

    def condition(self) -> str:
        """Say how the machine is and, where a program runs, what that waits for."""
        if self.device is None:
            return "boots" if self.booting is not None else "is off"
        return "is paused" if self.paused else self.device.waits_for()
