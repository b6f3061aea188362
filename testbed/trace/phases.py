"""How fast a run went before, during and after each disturbance."""

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
MOST_NAMED = 8
"""Disturbances of a phase that its row names; of more the first."""


@dataclass
class _Phase:
    name: str
    start: float
    seconds: float = 0.0
    whole: list[Step] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def _steps(self) -> list[float]:
        """Return the seconds of steps of one size: the usual one, or where there is none that of most of these."""
        usual = [step.seconds for step in self.whole if step.usual]
        if usual or not self.whole:
            return usual
        # A device that is out takes its samples along; a single step of another size is but the end of an epoch.
        size, number = Counter(step.samples for step in self.whole).most_common(1)[0]
        return [step.seconds for step in self.whole if step.samples == size] if number > 1 else []

    def to_json(self) -> dict[str, Any]:
        steps = self._steps()
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
    """Return ``phase_list``, in the order of their first beginnings; empty for a run that nothing disturbed.

    The run is cut where a disturbance (a fault until it is undone and outlived, a recovery, a pause) begins or ends. A
    phase is all pieces with the same disturbances. A step or a request counts for the piece that holds all of it, a
    device's first step for none, and one of an unusual number of samples only where a phase has no others, as rounds do
    that a device is missing from; ``step_time`` and ``latency`` are medians.
    """
    cuts = sorted({0.0, record.end, *(moment for _, (a, b) in record.disturbances for moment in (a, b))})
    cuts = [cut for cut in cuts if 0.0 <= cut <= record.end]
    if len(cuts) <= 2:
        return []
    names = _names(record, cuts)
    found: dict[str, _Phase] = {}
    for name, start, end in zip(names, cuts, cuts[1:], strict=False):
        phase = found.setdefault(name, _Phase(name, start))
        phase.seconds += end - start
    for step in record.steps:
        if step.comparable and (piece := _piece(step.window, cuts)) is not None:
            found[names[piece]].whole.append(step)
    for window in record.served:
        if (piece := _piece(window, cuts)) is not None:
            found[names[piece]].latencies.append(window[1] - window[0])
    return [phase.to_json() for phase in found.values()]


def _names(record: RunView, cuts: Sequence[float]) -> list[str]:
    """Return what goes on in each piece between two cuts."""
    active: dict[int, list[str]] = defaultdict(list)
    for name, (start, end) in record.disturbances:
        first, last = bisect_right(cuts, start) - 1, bisect_right(cuts, end) - 1
        for piece in range(max(0, first), min(last, len(cuts) - 1)):
            active[piece].append(name)
    quiet = [piece for piece in range(len(cuts) - 1) if piece not in active]
    names = []
    for piece in range(len(cuts) - 1):
        if piece in active:
            names.append(" + ".join(dict.fromkeys(active[piece])))
        elif piece == quiet[0] == 0:
            names.append(BEFORE)
        else:
            names.append(AFTER if piece == len(cuts) - 2 else BETWEEN)
    return names


def _piece(window: Interval, cuts: Sequence[float]) -> int | None:
    """Return the number of the piece that holds a window whole; None where a cut lies in it."""
    piece = bisect_right(cuts, window[0]) - 1
    return piece if 0 <= piece < len(cuts) - 1 and window[1] <= cuts[piece + 1] else None


def _timed(metrics: Metrics) -> list[dict[str, Any]]:
    return [phase for phase in metrics["phase_list"] if phase["steps"] or phase["requests"]]


def _named(phase: Mapping[str, Any]) -> str:
    names = phase["name"].split(" + ")
    return " + ".join(names if len(names) <= MOST_NAMED else [*names[:2], f"{len(names) - 2} more"])


TABLE = Table(
    "Phases",
    "Steps or requests with no beginning or end of a disturbance in them; medians",
    _timed,
    (
        Column("Phase", "text", _named),
        Column("From", "moment", "start"),
        Column("For", "seconds", "seconds"),
        Column("Number", "number", lambda phase: phase["steps"] or phase["requests"]),
        Column("Each takes", "seconds", lambda phase: phase["step_time"] or phase["latency"]),
    ),
)
