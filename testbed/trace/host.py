"""Time added by the host to the times that follow from the scenario."""

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
    """Seconds added by late computations."""
    messaging: float
    """Seconds added by late messages."""

    @property
    def share(self) -> float:
        """The added time as a share of the total duration."""
        if self.seconds <= 0:
            return 0.0
        return (self.computing + self.messaging) / self.seconds


def added_time(record: RunView) -> HostTime:
    """Return the time added by the host to undisturbed steps, or to requests."""
    windows = [(step.device, step.window) for step in record.steady]
    # Requests begin and end at the coordinator.
    windows += [(record.plan.coordinator, window) for window in record.request_windows]
    seconds = sum(end - start for _, (start, end) in windows)
    # On the virtual clock no host adds time, so the search for paths through a million events would find nothing.
    if record.outcome.runtime == "simulate":
        return HostTime(seconds, 0.0, 0.0)
    packets = record.outcome.fidelity.get("lateness", {}).get("mean", 0.0)
    paths = CriticalPaths(record.log, record.experiment, packets)
    lateness = PathTime()
    for device, window in windows:
        lateness += paths.lateness(device, window)
    return HostTime(seconds, lateness.computing, lateness.messaging)


def processor_time(record: RunView) -> dict[str, float] | None:
    """Return processor time in seconds by consumer; None for a run without measurements of processor time.

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
    """Return the seconds by which the host delayed a computation, given the fields of the ``compute`` event.

    Logs of older versions have the deficit alone.
    """
    if late is not None:
        return float(late)
    return float(deficit or 0.0)


def waited(log: EventLog, phase: Intervals) -> dict[str, float]:
    """Return the seconds for which each device's threads waited for a processor during a phase.

    A ``host`` event has the wait of a whole interval, so the phase gets the share of the interval that it covers.
    """
    waits: dict[str, float] = defaultdict(float)
    rows = log.of("host").rows("device", "time", "waited", "interval")
    for device, time, seconds, interval in rows:
        if interval <= 0:
            continue
        start = time - interval
        # A phase may have a million intervals, so only those around this event are clipped.
        first = np.searchsorted(phase[:, 1], start)
        last = np.searchsorted(phase[:, 0], time, "right")
        covered = total(clip(phase[first:last], start, time))
        waits[device] += seconds * covered / interval
    return waits


def deficits(log: EventLog, phase: Intervals) -> dict[str, float]:
    """Return the seconds of delay caused by the host, by device, for computations ending in a phase.

    The intervals of the phase are in order and disjoint.
    """
    delays: dict[str, float] = defaultdict(float)
    times: list[float] = []
    late_computations: list[tuple[str, float]] = []
    rows = log.of("compute").rows("device", "time", "late", "deficit")
    for device, time, late, deficit in rows:
        seconds = lateness(late, deficit)
        if seconds != 0.0:
            times.append(time)
            late_computations.append((device, seconds))
    is_within = contains(phase, np.array(times))
    for device, seconds in compress(late_computations, is_within):
        delays[device] += seconds
    return delays
