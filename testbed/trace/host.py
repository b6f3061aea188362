"""What the host added to the scenario's own times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.trace.critical import CriticalPaths, PathTime
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, clip, holds, total
from testbed.trace.record import Record


@dataclass(frozen=True)
class HostTime:
    """What the host added to the undisturbed steps or requests; all in seconds."""

    seconds: float
    """That they took together."""
    computing: float
    messaging: float

    @property
    def share(self) -> float:
        """Of their time."""
        return (self.computing + self.messaging) / self.seconds if self.seconds > 0 else 0.0


def added(record: Record) -> HostTime:
    """Return what the host added to the steps that are undisturbed, or to the requests."""
    windows = [(step.device, step.window) for step in record.steady]
    windows += [(record.plan.lead, window) for window in record.served]
    seconds = sum(end - start for _, (start, end) in windows)
    if record.outcome.runtime == "simulate":  # paths through a million events, and no host on any
        return HostTime(seconds, 0.0, 0.0)
    lateness = record.outcome.fidelity.get("lateness", {}).get("mean", 0.0)
    paths = CriticalPaths(record.outcome.events, record.experiment, lateness)
    found = sum((paths.lateness(device, window) for device, window in windows), PathTime())
    return HostTime(seconds, found.computing, found.messaging)


def late(computed: Mapping[str, Any]) -> float:
    """Return by how much the host made a computation late; older logs tell only what it needed too much."""
    return float(computed.get("late", computed.get("deficit", 0.0)))


def waited(own: Sequence[Event], phase: Sequence[Interval]) -> float:
    """Return the seconds that threads of a device waited for the host within a phase, evenly over each interval."""
    found = 0.0
    for event in own:
        if event.event == "host" and event.fields["interval"] > 0:
            span = event.fields["interval"]
            within = total(clip(phase, event.time - span, event.time))
            found += event.fields["waited"] * within / span
    return found


def deficit(own: Sequence[Event], phase: Sequence[Interval]) -> float:
    """Return by how many seconds the host made computations late that ended within a phase, in order and disjoint."""
    return sum(late(event.fields) for event in own if event.event == "compute" and holds(phase, event.time))
