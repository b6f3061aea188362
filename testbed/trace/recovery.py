"""Metrics of faults and recoveries, and their lists in ``metrics.json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from testbed.trace.disturbances import Recovery
from testbed.trace.host import deficits
from testbed.trace.intervals import intervals
from testbed.trace.metrics_spec import Metric, Metrics, Row
from testbed.trace.record import RunView


def _completed_recoveries(record: RunView) -> list[Recovery]:
    return [item for item in record.recoveries if item.resumed is not None]


def _detection_time(record: RunView) -> float | None:
    times = []
    for recovery in record.recoveries:
        # A cause that is no recorded fault, such as a link that is too slow, has no known start.
        if recovery.struck is not None:
            times.append(recovery.detected - recovery.struck)
    return max(times, default=None)


def _resume_time(record: RunView) -> float | None:
    times = []
    for recovery in record.recoveries:
        if recovery.resumed is not None:
            times.append(recovery.resumed - recovery.detected)
    return max(times, default=None)


def _recovery_time(record: RunView) -> float | None:
    durations = []
    for recovery in record.recoveries:
        if recovery.duration is not None:
            durations.append(recovery.duration)
    return max(durations, default=None)


METRICS = (
    Metric(
        "faults",
        "number",
        "number of injected faults, repairs excluded",
        lambda record: sum(not strike.is_repair for strike in record.strikes),
    ),
    Metric(
        "recoveries",
        "number",
        "faults detected and recovered from",
        lambda record: len(_completed_recoveries(record)),
        compared=True,
    ),
    Metric(
        "unrecovered",
        "number",
        "faults detected and not recovered from",
        lambda record: len(record.recoveries) - len(_completed_recoveries(record)),
    ),
    Metric(
        "detection_time",
        "seconds",
        "maximum time from a fault to its detection",
        _detection_time,
        compared=True,
    ),
    Metric(
        "resume_time",
        "seconds",
        "maximum time from a detection to the resumption",
        _resume_time,
        compared=True,
    ),
    Metric(
        "recovery_time",
        "seconds",
        "maximum time from a fault to the resumption",
        _recovery_time,
        brief=True,
        compared=True,
    ),
)


def faults(record: RunView) -> list[dict[str, Any]]:
    """Return ``fault_list``: every injected fault or repair, with the lateness in seconds."""
    rows = []
    for strike in record.strikes:
        late = strike.struck - strike.intended
        rows.append({**asdict(strike), "late": late, "mends": strike.is_repair})
    return rows


def recovery_list(record: RunView) -> list[dict[str, Any]]:
    """Return ``recovery_list``: every detected fault, with the fields added by the method.

    ``deficit`` is the lateness of computations in seconds caused by the host during the recovery: the mean over the
    processors of the worst device.
    """
    describe = record.describe_recovery
    rows = []
    for recovery in record.recoveries:
        row = _recovery_row(recovery, record)
        if describe is not None:
            row |= describe(recovery, record)
        rows.append(row)
    return rows


def _recovery_row(recovery: Recovery, record: RunView) -> dict[str, Any]:
    start = recovery.detected if recovery.struck is None else recovery.struck
    # Without a resumption there is no time that the host could have prolonged.
    end = start if recovery.resumed is None else recovery.resumed
    delays = deficits(record.log.within(start, end), intervals([(start, end)]))
    processors = {spec.name: spec.processors for spec in record.experiment.devices}
    deficit = 0.0
    for name, seconds in delays.items():
        deficit = max(deficit, seconds / processors.get(name, 1))
    return {
        "struck": recovery.struck,
        "detected": recovery.detected,
        "resumed": recovery.resumed,
        "seconds": recovery.duration,
        "step": recovery.step,
        "missing": list(recovery.missing),
        "deficit": deficit,
    }


def _recovery_note(metrics: Metrics) -> str:
    note = "from the fault until work continued"
    if metrics["recoveries"] > 1:
        note = f"the longest of {{recoveries}}, {note}"
    return note


ROWS = (Row("Recovery", "{recovery_time}", _recovery_note),)
LAST_ROWS = (
    Row(
        "Unrecovered",
        "{unrecovered}",
        "faults detected and not recovered from",
        when=lambda metrics: metrics["unrecovered"],
    ),
)
"""Rows of the report after those of the method."""
