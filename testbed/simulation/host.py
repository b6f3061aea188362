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
    """A device from one boot to the next, as seen by the host and the channels of the device."""

    name: str
    running: bool
    """Whether the program has not returned."""
    leaving: bool
    """Whether the program has been asked to leave."""
    exposed: dict[bool, Callable[[], Mapping[str, Any]]]
    """Functions that return weights: under True the weights of the device's part of the model, under False all."""

    def deliver(
        self,
        message: Message,
        size: int,
        start: float,
        duration: float,
        cast: int | None = None,
    ) -> None:
        """Put an arrived message of ``size`` bytes into the inbox.

        ``start`` and ``duration`` describe the arrival, in seconds; ``cast`` is the number of a broadcast.
        """

    def write(self, event: str, fields: dict[str, Any]) -> None:
        """Write an event, unless the device is dead."""

    def add(self, form: Form, row: Row) -> None:
        """Record an event as a row of values, which is faster; ``form`` has the names of event and fields."""

    def pause(self) -> None:
        """Stop the processors and suspend the program."""

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
    """The simulated counterpart of a container: persists across boots of its device, and is the target of faults."""

    name: str
    spec: DeviceSpec
    number: int
    """Index among the hosts of the world."""
    factor: float = 1.0
    """Current speed of the processor as a share of full speed."""
    cores: Shared | None = None
    """Cores that several hosts share, as a rate in seconds of work per second; None without shared cores."""
    device: Guest | None = None
    """The running device; None while off or booting."""
    pending_boot: int | None = None
    """Number of the boot under way; None without one. A kill during the boot resets it, which voids the boot."""
    boots: int = 0
    """Number of restarts."""
    # On the host, since the device object ends with each boot.
    disk: dict[str, Message] = field(default_factory=dict)
    """Messages saved by programs; persistent across restarts."""
    paused: bool = False
    deferred_calls: deque[tuple[Callable[[Any], None], Any]] = field(
        default_factory=deque
    )
    """Functions with their arguments, called when the pause ends: arrivals, and the end of a boot."""

    def state(self) -> DeviceState:
        """Return the state of the host; a booting host is up."""
        if self.device is None and self.pending_boot is None:
            return "down"
        return "paused" if self.paused else "up"

    def condition(self) -> str:
        """Describe the host's state, and the event awaited by a running program."""
        if self.device is None:
            return "boots" if self.pending_boot is not None else "is off"
        return "is paused" if self.paused else self.device.waits_for()
