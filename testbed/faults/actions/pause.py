"""A device stands still, and goes on."""

from __future__ import annotations

from testbed.faults.conditions import Conditions, FaultAction


class Pause(FaultAction[str]):
    """A device stands still: its memory and its connections are kept."""

    name = "pause"
    switches = True

    def apply(self, now: Conditions, handle: str) -> Conditions:
        """Stop the device, unless it is off."""
        return now.switch(self.value, {"up": "paused"})

    def undo(self, now: Conditions, handle: str) -> Conditions:
        """Let the device go on."""
        return Resume(self.value).apply(now, handle)


class Resume(FaultAction[str]):
    """A paused device goes on."""

    name = "resume"
    undoes = (Pause.name,)
    switches = True

    def apply(self, now: Conditions, handle: str) -> Conditions:
        """Let the device go on, if it is paused."""
        return now.switch(self.value, {"paused": "up"})
