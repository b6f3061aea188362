"""What commands from outside do to a lab, written down for the run that goes on in it.

Each step is a line of JSON beside the run's state file, with the instant at which it took effect on the clock that all
processes of the host share. The run reads the lines as they come and has them among its events.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller.lab import runstate
from controller.running.faults import Containers, events_of
from testbed.faults.actions.flap import Flap
from testbed.faults.conditions import Changed
from testbed.faults.machines import RecordedStep, carry_out
from testbed.faults.script import FaultOperation
from testbed.trace.events import TESTBED, Event


class Journal:
    """The steps carried out by hand on one lab, in the order in which they took effect."""

    def __init__(self, run_id: str) -> None:
        self._path: Path = runstate.path_of(run_id).with_suffix(".journal")
        self._read = 0

    def write(self, instant: float, events: list[tuple[str, dict[str, Any]]]) -> None:
        """Append events of one instant, in seconds of the monotonic clock; several processes may."""
        line = json.dumps([instant, events]) + "\n"
        with self._path.open("a") as file:
            file.write(line)

    def news(self, origin: float) -> list[Event]:
        """Return the events since the last call, as those of a run that started at ``origin``; none is before 0."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        found = []
        for line in whole.splitlines():
            instant, events = json.loads(line)
            found += [Event(max(0.0, instant - origin), TESTBED, event, fields) for event, fields in events]
        return found


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
