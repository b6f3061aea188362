"""A device leaves and says so before, and one that is away comes back."""

from __future__ import annotations

from testbed.faults.actions.kill import Kill, Restart
from testbed.faults.conditions import Conditions, FaultAction


class Retire(FaultAction[str]):
    """A device is told to leave; it is off as soon as its program, which hands over what it holds, has returned."""

    name = "retire"
    switches = True
    waits = True

    def apply(self, now: Conditions, handle: str) -> Conditions:
        """Let the device leave, unless it is off or stands still."""
        return now.switch(self.value, {"up": "retired"})

    def undo(self, now: Conditions, handle: str) -> Conditions:
        """Boot the device."""
        return Join(self.value).apply(now, handle)


class Join(Restart):
    """A device that was killed or has retired boots."""

    name = "join"
    undoes = (Kill.name, Retire.name)
