"""Time added by the host to the scenario's own times."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import compress

from testbed.common.lazy import np
from testbed.trace.critical import CriticalPaths, PathTime
from testbed.trace.intervals import Intervals, clip, contains, total
from testbed.trace.log import EventLog
from testbed.trace.metrics_spec import Metric, Row
from testbed.trace.record import RunView


@dataclass(frozen=True)
class HostTime:
    """Time added by the host to undisturbed steps or requests, in seconds."""

    seconds: float
    """Total duration of the steps or requests."""
    computing: float
    messaging: float

    @property
    def share(self) -> float:
        """Share of their time."""
        if self.seconds <= 0:
            return 0.0
        return (self.computing + self.messaging) / self.seconds


def added_time(record: RunView) -> HostTime:
    """Return the time added by the host to undisturbed steps, or to requests."""
    windows = [(step.device, step.window) for step in record.steady]
    # Requests are asked and answered at the coordinator.
    windows += [(record.plan.coordinator, window) for window in record.served]
    seconds = sum(end - start for _, (start, end) in windows)
    # The virtual clock has no host, so the search for paths through a million events would find nothing.
    if record.outcome.runtime == "simulate":
        return HostTime(seconds, 0.0, 0.0)
    packets = record.outcome.fidelity.get("lateness", {}).get("mean", 0.0)
    paths = CriticalPaths(record.log, record.experiment, packets)
    lateness = PathTime()
    for device, window in windows:
        lateness += paths.lateness(device, window)
    return HostTime(seconds, lateness.computing, lateness.messaging)


def processor_time(record: RunView) -> dict[str, float] | None:
    """Return processor time in seconds by consumer; None for a run without such measurements.

    ``computing`` is the devices' own work, and ``agents``, ``shaper`` and ``controller`` are overhead of the emulation.
    Kernel packet processing, the engine, and user programs are not included.
    """
    shaper = record.outcome.fidelity.get("processor_seconds")
    controller = record.outcome.fidelity.get("controller_seconds")
    rows = record.log.of("host").rows("processor", "computing")
    # Events of older results lack the fields.
    measured = [row for row in rows if None not in row]
    if shaper is None or controller is None or not measured:
        return None
    processor, computing = map(sum, zip(*measured, strict=True))
    return {
        "computing": float(computing),
        "agents": float(processor) - float(computing),
        "shaper": shaper,
        "controller": controller,
    }


def _overhead_share(record: RunView) -> float | None:
    seconds = record.cached(processor_time)
    if not seconds or not seconds["computing"]:
        return None
    return (sum(seconds.values()) - seconds["computing"]) / seconds["computing"]


def _processor_metric(name: str, consumer: str) -> Metric:
    def compute(record: RunView) -> float | None:
        seconds = record.cached(processor_time)
        return None if seconds is None else seconds[name]

    meaning = f"processor time of {consumer}; in containers"
    return Metric(f"processor_{name}", "seconds", meaning, compute)


METRICS = (
    _processor_metric("computing", "the devices' computations"),
    _processor_metric("agents", "the agents beside computations"),
    _processor_metric("shaper", "the shaper"),
    _processor_metric("controller", "the controller"),
    Metric(
        "overhead",
        "share",
        (
            "processor time of agents, shaper and controller, divided by that of "
            "the devices' computations; in containers"
        ),
        _overhead_share,
    ),
)

ROWS = (
    Row(
        "Processor time",
        "{processor_computing}",
        "of computing; beside it {processor_agents} of agents, {processor_shaper} of the shaper and "
        "{processor_controller} of the controller, together {overhead} of the computing",
    ),
)


def lateness(late: float | None, deficit: float | None) -> float:
    """Return the delay of a computation caused by the host; older logs contain only its time deficit."""
    return float(late if late is not None else deficit or 0.0)


def waited(log: EventLog, phase: Intervals) -> dict[str, float]:
    """Return the seconds that each device's threads waited for a processor in a phase, spread evenly over each
    interval."""
    waits: dict[str, float] = defaultdict(float)
    rows = log.of("host").rows("device", "time", "waited", "interval")
    for device, time, seconds, interval in rows:
        if interval <= 0:
            continue
        start = time - interval
        # Only the intervals of the phase around this event: a phase may have a million.
        first = np.searchsorted(phase[:, 1], start)
        last = np.searchsorted(phase[:, 0], time, "right")
        covered = total(clip(phase[first:last], start, time))
        # An event has only the sum of its interval, so a phase gets the part of the time that it covers.
        waits[device] += seconds * covered / interval
    return waits


def deficits(log: EventLog, phase: Intervals) -> dict[str, float]:
    """Return the seconds of delay caused by the host for each device's computations that ended in a phase.

    The intervals of the phase are in order and disjoint.
    """
    deficit_by_device: dict[str, float] = defaultdict(float)
    times: list[float] = []
    lates: list[tuple[str, float]] = []
    computations = log.of("compute")
    for device, time, late, deficit in computations.rows(
        "device", "time", "late", "deficit"
    ):
        seconds = lateness(late, deficit)
        if seconds != 0.0:
            times.append(time)
            lates.append((device, seconds))
    for device, seconds in compress(lates, contains(phase, np.array(times))):
        deficit_by_device[device] += seconds
    return deficit_by_device
