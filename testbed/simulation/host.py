"""A simulated host, the target of faults, and the program running on it."""

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
    """A program with its device, from one boot to the next."""

    name: str
    running: bool
    """Whether the program has not returned."""
    leaving: bool
    """Whether the program has been asked to leave."""
    exposed: dict[bool, Callable[[], Mapping[str, Any]]]
    """Functions that return the weights of the device."""

    def deliver(
        self,
        message: Message,
        size: int,
        start: float,
        duration: float,
        cast: int | None = None,
    ) -> None:
        """Put an arrived message into the inbox."""

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Write an event, unless the device is dead."""

    def add(self, form: Form, row: Row) -> None:
        """Record an event by its form, which is faster."""

    def pause(self) -> None:
        """Stop the processor and hold back the program."""

    def resume(self) -> None:
        """Resume processor and program."""

    def change_speed(self, factor: float) -> None:
        """Rescale the remaining work to ``factor`` times the previous speed."""

    def kill(self) -> None:
        """Stop the program."""

    def waits_for(self) -> str:
        """Describe the awaited event."""


@dataclass(eq=False, slots=True)
class Host:
    """A machine that persists across boots of its device."""

    name: str
    spec: DeviceSpec
    number: int
    """Index among the hosts of the world."""
    factor: float = 1.0
    """Current share of full speed."""
    cores: Shared | None = None
    """Cores of the shared machine as a rate in seconds of work per second; None for a machine of its own."""
    device: Guest | None = None
    """The running device; None while off or booting."""
    booting: int | None = None
    """Number of the boot under way."""
    boots: int = 0
    """Number of restarts."""
    # On the host, since the device object ends with each boot.
    disk: dict[str, Message] = field(default_factory=dict)
    """Messages saved by programs; persistent across restarts."""
    paused: bool = False
    held: deque[tuple[Callable[[Any], None], Any]] = field(default_factory=deque)
    """Arrivals during a pause, with their handlers."""

    def state(self) -> DeviceState:
        """Return the state of the host; a booting host is up."""
        if self.device is None and self.booting is None:
            return "down"
        return "paused" if self.paused else "up"

    def condition(self) -> str:
        """Describe the host's state, and the event awaited by a running program."""
        if self.device is None:
            return "boots" if self.booting is not None else "is off"
        return "is paused" if self.paused else self.device.waits_for()
