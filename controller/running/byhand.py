"""What commands from outside do to a lab, written down for the run that goes on in it.

Each step is a line of JSON beside the run's state file, with the instant at which it took effect on the clock that all
processes of the host share. The run reads the lines as they come and has them among its events.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controller.lab import runstate
from controller.lab.lab import Lab
from controller.lab.tail import Tail
from controller.running.faults import Containers, events_of
from testbed.common.errors import InputError
from testbed.faults.actions.flap import Flap
from testbed.faults.conditions import Changed, FaultAction
from testbed.faults.machines import RecordedStep, carry_out
from testbed.faults.parts import ActionPart
from testbed.faults.script import FaultOperation
from testbed.faults.setting import Setting
from testbed.scenario.loading import parse
from testbed.trace.events import TESTBED, Event


class Journal:
    """The steps carried out by hand on one lab, in the order in which they took effect."""

    def __init__(self, run_id: str) -> None:
        self._path: Path = runstate.path_of(run_id).with_suffix(".journal")
        self._tail = Tail(self._path)

    def write(self, instant: float, events: list[tuple[str, dict[str, Any]]]) -> None:
        """Append events of one instant, in seconds of the monotonic clock; several processes may."""
        line = json.dumps([instant, events]) + "\n"
        with self._path.open("a") as file:
            file.write(line)

    def news(self, origin: float) -> list[Event]:
        """Return the events since the last call, as those of a run that started at ``origin``; none is before 0."""
        return [
            Event(max(0.0, instant - origin), TESTBED, event, fields)
            for instant, events in self._tail.news()
            for event, fields in events
        ]


def checked(run_id: str, given: Mapping[str, object]) -> tuple[Containers, FaultAction[Any], str]:
    """Check an action, given as a scenario writes it; return the devices of the run, the action and a handle for it.

    Raises InputError where a scenario could not have it either.
    """
    action = parse(ActionPart, given).action
    lab = Lab.open(run_id)
    for _, name in action.named():
        if name not in lab.devices:
            raise InputError(f"there is no device '{name}' in {lab.run_id}: {', '.join(lab.devices)}")
    run = lab.experiment
    for _, text in action.problems(Setting(run.devices, run.links, radio=run.radio)):
        raise InputError(text)
    return Containers(lab), action, f"{action.name}-{secrets.token_hex(3)}"


def strike(run_id: str, given: Mapping[str, object]) -> str:
    """Check an action, carry it out, and say what it changed."""
    containers, action, handle = checked(run_id, given)
    changed = carry_out_by_hand(FaultOperation(action, handle), containers)
    if action.switches:
        nothing = "" if changed.devices else f" is {containers.states()[action.target]}, nothing to do"
        return f"{action.name}: {action.target}{nothing}"
    if action.undoes:
        return summary(changed)
    return f"{handle}: {summary(changed)}; undo with: testbed fault undo {handle}"


def summary(changed: Changed) -> str:
    """Say what an action changed."""
    links = [f"{len(changed.links)} directed links changed"] if changed.links or not changed.speeds else []
    speeds = [f"{name} computes at {factor:.4g} times its own speed" for name, factor in changed.speeds.items()]
    return ", ".join(links + speeds)


def carry_out_by_hand(step: RecordedStep, containers: Containers) -> Changed:
    """Carry out a step, and write down what it was and what it changed."""
    changed = carry_out(step, containers)
    Journal(containers.run_id).write(time.monotonic(), events_of(step, changed, containers.shown.speeds))
    return changed


def flap(containers: Containers, action: Flap, handle: str, seconds: float | None) -> Iterator[tuple[int, float]]:
    """Take links down and up from now on until it is over; they are up when this ends, however it ends.

    Yields after each change how often they went down so far, and by how many seconds the latest of the changes was
    late. ``seconds`` None is without end, unless the action says how often.
    """
    began = time.monotonic()
    turns, late = 0, 0.0
    try:
        for phase, when in action.turns(0.0, math.inf if seconds is None else seconds):
            time.sleep(max(0.0, began + when - time.monotonic()))
            carry_out_by_hand(FaultOperation(action, handle, phase), containers)
            turns, late = turns + (phase == "strike"), max(late, time.monotonic() - began - when)
            yield turns, late
    finally:
        if handle in containers.shown.in_force:
            carry_out_by_hand(FaultOperation(action, handle, "undo"), containers)
