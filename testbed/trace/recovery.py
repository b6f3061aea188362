"""Metrics of faults and recoveries."""

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
        # Without a recorded fault, such as a link that is too slow, nobody knows when the cause began.
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
    durations = [recovery.duration for recovery in record.recoveries]
    return max((each for each in durations if each is not None), default=None)


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
    """Return ``fault_list``: every injected fault."""
    rows = []
    for strike in record.strikes:
        late = strike.struck - strike.intended
        rows.append({**asdict(strike), "late": late, "mends": strike.is_repair})
    return rows


def recovery_list(record: RunView) -> list[dict[str, Any]]:
    """Return every detected fault, with the method's own report of the recovery.

    ``deficit`` is the lateness of computations in seconds caused by the host during the recovery: the mean over the
    processors of the worst device.
    """
    describe = record.describe_recovery
    rows = []
    for item in record.recoveries:
        row = _recovery_item(item, record)
        if describe is not None:
            row |= describe(item, record)
        rows.append(row)
    return rows


def _recovery_item(item: Recovery, record: RunView) -> dict[str, Any]:
    begun = item.detected if item.struck is None else item.struck
    # Without a resumption there is no time that the host could have prolonged.
    until = begun if item.resumed is None else item.resumed
    late = deficits(record.log.within(begun, until), intervals([(begun, until)]))
    processors = {spec.name: spec.processors for spec in record.experiment.devices}
    deficit = 0.0
    for name, seconds in late.items():
        deficit = max(deficit, seconds / processors.get(name, 1))
    return {
        "struck": item.struck,
        "detected": item.detected,
        "resumed": item.resumed,
        "seconds": item.duration,
        "step": item.step,
        "missing": list(item.missing),
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
        "faults that were noticed and not outlived",
        when=lambda metrics: metrics["unrecovered"],
    ),
)
