"""What the host added to the scenario's own times."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import compress

import numpy as np

from testbed.trace.critical import CriticalPaths, PathTime
from testbed.trace.intervals import Intervals, clip, total, within
from testbed.trace.log import EventLog
from testbed.trace.record import Record


@dataclass(frozen=True)
class HostTime:
    """What the host added to the undisturbed steps or requests; all in seconds."""

    seconds: float
    """Seconds that they took together."""
    computing: float
    messaging: float

    @property
    def share(self) -> float:
        """Share of their time."""
        return (self.computing + self.messaging) / self.seconds if self.seconds > 0 else 0.0


def added(record: Record) -> HostTime:
    """Return what the host added to the steps that are undisturbed, or to the requests."""
    windows = [(step.device, step.window) for step in record.steady]
    windows += [(record.plan.lead, window) for window in record.served]
    seconds = sum(end - start for _, (start, end) in windows)
    if record.outcome.runtime == "simulate":  # paths through a million events, and no host on any
        return HostTime(seconds, 0.0, 0.0)
    packets = record.outcome.fidelity.get("lateness", {}).get("mean", 0.0)
    paths = CriticalPaths(record.log, record.experiment, packets)
    found = sum((paths.lateness(device, window) for device, window in windows), PathTime())
    return HostTime(seconds, found.computing, found.messaging)


def lateness(late: float | None, deficit: float | None) -> float:
    """Return by how much the host made a computation late; older logs say only what it needed too much."""
    return float(late if late is not None else deficit or 0.0)


def waited(log: EventLog, phase: Intervals) -> dict[str, float]:
    """Return the seconds that threads of each device waited for the host within a phase, evenly over each interval."""
    found: dict[str, float] = defaultdict(float)
    for device, time, waited, span in log.of("host").rows("device", "time", "waited", "interval"):
        if span > 0:
            near = phase[np.searchsorted(phase[:, 1], time - span) : np.searchsorted(phase[:, 0], time, "right")]
            found[device] += waited * total(clip(near, time - span, time)) / span
    return found


def deficits(log: EventLog, phase: Intervals) -> dict[str, float]:
    """Return by how many seconds the host made each device's computations late that ended within a phase.

    The intervals of the phase are in order and disjoint.
    """
    found: dict[str, float] = defaultdict(float)
    times: list[float] = []
    lates: list[tuple[str, float]] = []
    for device, time, late, deficit in log.of("compute").rows("device", "time", "late", "deficit"):
        if (seconds := lateness(late, deficit)) != 0.0:
            times.append(time)
            lates.append((device, seconds))
    for device, seconds in compress(lates, within(phase, np.array(times))):
        found[device] += seconds
    return found
