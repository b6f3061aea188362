"""Step times and latencies before, during and after each disturbance: a fault, a recovery or a pause."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from testbed.trace.intervals import Interval
from testbed.trace.metrics_spec import Column, Metrics, Table
from testbed.trace.record import RunView, Step

BEFORE, BETWEEN, AFTER = "before", "between", "after"
"""Phases without a disturbance: up to the first one, between two, after the last one."""
MAX_NAMED = 8
"""Maximum number of disturbances named in a row."""


@dataclass
class _Phase:
    """All pieces of the run with the same disturbances; `phases` cuts the run into pieces."""

    name: str
    """The disturbances, or `BEFORE`, `BETWEEN` or `AFTER`."""
    start: float
    """Start of the first piece, in seconds of the run."""
    seconds: float = 0.0
    """Total duration of the pieces."""
    steps: list[Step] = field(default_factory=list)
    """Comparable steps that lie within one piece."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each request that lies within one piece."""

    def _comparable_durations(self) -> list[float]:
        """Return the durations of steps of one size: the usual size, or else the most frequent size of the phase."""
        usual = [step.seconds for step in self.steps if step.usual]
        if usual or not self.steps:
            return usual
        # While a device is missing, all steps have fewer samples. A single step of another size is the end of an epoch.
        size, count = Counter(step.samples for step in self.steps).most_common(1)[0]
        if count == 1:
            return []
        return [step.seconds for step in self.steps if step.samples == size]

    def to_json(self) -> dict[str, Any]:
        steps = self._comparable_durations()
        return {
            "name": self.name,
            "start": self.start,
            "seconds": self.seconds,
            "steps": len(steps),
            "step_time": median(steps) if steps else None,
            "requests": len(self.latencies),
            "latency": median(self.latencies) if self.latencies else None,
        }


def phases(record: RunView) -> list[dict[str, Any]]:
    """Return ``phase_list`` in the order of the phases' first start; empty for an undisturbed run.

    The run is cut at the start and end of each disturbance (a fault until undone and recovered from, a recovery, a
    pause). A phase is the set of all pieces with the same disturbances. A step or request belongs to the piece that
    contains it entirely. First steps of devices are excluded. Steps of an unusual number of samples count only in
    phases without usual steps, such as the rounds after a device has left. ``step_time`` and ``latency`` are medians.
    """
    instants = {0.0, record.end}
    for _, window in record.disturbances:
        instants.update(window)
    cuts = sorted(instant for instant in instants if 0.0 <= instant <= record.end)
    # One piece only: nothing disturbed the run.
    if len(cuts) <= 2:
        return []
    names = _disturbance_names(record, cuts)
    phases_by_name: dict[str, _Phase] = {}
    for name, start, end in zip(names, cuts, cuts[1:], strict=False):
        phase = phases_by_name.setdefault(name, _Phase(name, start))
        phase.seconds += end - start
    for step in record.steps:
        piece = _piece_index(step.window, cuts)
        if step.comparable and piece is not None:
            phases_by_name[names[piece]].steps.append(step)
    for window in record.request_windows:
        piece = _piece_index(window, cuts)
        if piece is not None:
            phases_by_name[names[piece]].latencies.append(window[1] - window[0])
    return [phase.to_json() for phase in phases_by_name.values()]


def _disturbance_names(record: RunView, cuts: Sequence[float]) -> list[str]:
    """Return the phase name of each piece between two cuts."""
    piece_count = len(cuts) - 1
    disturbances: dict[int, list[str]] = defaultdict(list)
    # Disturbances begin and end at cuts, so each covers whole pieces.
    for name, (start, end) in record.disturbances:
        first = bisect_right(cuts, start) - 1
        after_last = bisect_right(cuts, end) - 1
        for piece in range(max(0, first), min(after_last, piece_count)):
            disturbances[piece].append(name)
    names = []
    for piece in range(piece_count):
        if piece in disturbances:
            names.append(" + ".join(dict.fromkeys(disturbances[piece])))
        elif piece == 0:
            names.append(BEFORE)
        else:
            names.append(AFTER if piece == piece_count - 1 else BETWEEN)
    return names


def _piece_index(window: Interval, cuts: Sequence[float]) -> int | None:
    """Return the index of the piece containing an interval; None for an interval across a cut."""
    piece = bisect_right(cuts, window[0]) - 1
    if not 0 <= piece < len(cuts) - 1:
        return None
    return piece if window[1] <= cuts[piece + 1] else None


def _timed_phases(metrics: Metrics) -> list[dict[str, Any]]:
    return [
        phase for phase in metrics["phase_list"] if phase["steps"] or phase["requests"]
    ]


def _phase_name(phase: Mapping[str, Any]) -> str:
    names = phase["name"].split(" + ")
    if len(names) > MAX_NAMED:
        names = [*names[:2], f"{len(names) - 2} more"]
    return " + ".join(names)


TABLE = Table(
    "Phases",
    "Steps or requests during which no disturbance starts or ends; medians",
    _timed_phases,
    (
        Column("Phase", "text", _phase_name),
        Column("From", "moment", "start"),
        Column("For", "seconds", "seconds"),
        Column("Number", "number", lambda phase: phase["steps"] or phase["requests"]),
        Column(
            "Each takes",
            "seconds",
            lambda phase: phase["step_time"] or phase["latency"],
        ),
    ),
)
