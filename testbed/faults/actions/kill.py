"""A device loses its power, and has it again."""

from __future__ import annotations

from typing import ClassVar

from testbed.faults.conditions import Conditions, FaultAction


class Kill(FaultAction[str]):
    """A device ends at once: its memory is lost, its disk is kept."""

    name = "kill"
    switches = True

    def apply(self, now: Conditions, handle: str) -> Conditions:
        """Switch the device off, unless it is off."""
        return now.switch(self.value, {"up": "down", "paused": "down"})

    def undo(self, now: Conditions, handle: str) -> Conditions:
        """Boot the device."""
        return Restart(self.value).apply(now, handle)


class Restart(FaultAction[str]):
    """A killed device boots."""

    name = "restart"
    undoes: ClassVar[tuple[str, ...]] = (Kill.name,)
    switches = True
    waits = True

    def apply(self, now: Conditions, handle: str) -> Conditions:
        """Boot the device, unless it is on."""
        return now.switch(self.value, {"down": "up", "retired": "up"})
