"""How conditions are brought about: the few things that containers and simulated devices have to be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from testbed.faults.conditions import Changed, Conditions, DeviceState


class RecordedStep(Protocol):
    """Something that changes conditions: an action, its undoing, entries of a trace, a setting made by hand."""

    @property
    def switches(self) -> bool:
        """Whether it changes the state of a device and nothing else."""

    def apply(self, now: Conditions) -> Conditions:
        """Return the conditions after it."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the fields of each event to record for it."""


class Machines(Protocol):
    """The devices of a run and what links them: containers and their shaper, or a simulated world."""

    @property
    def shown(self) -> Conditions:
        """The links and speeds in force; what it says of the devices' states may be out of date."""

    def states(self) -> Mapping[str, DeviceState]:
        """Look up the state of every device."""

    def lock(self) -> AbstractContextManager[object]:
        """Keep others from changing links and speeds within a block."""

    def show(self, now: Conditions, changed: Changed) -> None:
        """Let the devices have the links and speeds that changed, at once; ``now`` is what is in force with them."""

    def kill(self, device: str) -> None:
        """End a device at once: its memory is lost."""

    def restart(self, device: str) -> None:
        """Boot a device that is down, with the links and the speed that are in force."""

    def retire(self, device: str) -> None:
        """Ask a device to leave; once its program has returned, it is off."""
        ...

    def pause(self, device: str) -> None:
        """Let a device stand still: its memory is kept."""

    def resume(self, device: str) -> None:
        """Let a paused device go on."""


def carry_out(step: RecordedStep, machines: Machines) -> Changed:
    """Bring about the conditions after a step; return what changed.

    A step that switches a device takes no lock: a boot takes long, and a kill must not wait for it.
    """
    if step.switches:
        before = replace(machines.shown, devices=machines.states())
        changed = step.apply(before).changed(before)
        for name, state in changed.devices.items():
            _switch(machines, name, before.devices[name], state)
        return changed
    with machines.lock():
        before = machines.shown
        after = step.apply(before)
        changed = after.changed(before)
        machines.show(after, changed)
    return changed


def _switch(machines: Machines, device: str, before: DeviceState, after: DeviceState) -> None:
    if after == "down":
        machines.kill(device)
    elif after == "retired":
        machines.retire(device)
    elif after == "paused":
        machines.pause(device)
    elif before == "paused":
        machines.resume(device)
    else:
        machines.restart(device)
