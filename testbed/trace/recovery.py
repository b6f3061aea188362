"""Metrics of faults and recoveries."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from testbed.trace.disturbances import Recovery
from testbed.trace.host import deficits
from testbed.trace.intervals import intervals
from testbed.trace.metrics_spec import Metric, Metrics, Row
from testbed.trace.record import RunView


def _longest_span(spans: list[float]) -> float | None:
    return max(spans, default=None)


def _completed_recoveries(record: RunView) -> list[Recovery]:
    return [item for item in record.recoveries if item.resumed is not None]


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
        lambda record: _longest_span(
            [
                item.detected - item.struck
                for item in record.recoveries
                if item.struck is not None
            ]
        ),
        compared=True,
    ),
    Metric(
        "resume_time",
        "seconds",
        "maximum time from a detection to the resumption",
        lambda record: _longest_span(
            [
                (item.resumed or 0.0) - item.detected
                for item in _completed_recoveries(record)
            ]
        ),
        compared=True,
    ),
    Metric(
        "recovery_time",
        "seconds",
        "maximum time from a fault to the resumption",
        lambda record: _longest_span(
            [item.duration or 0.0 for item in _completed_recoveries(record)]
        ),
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
    details = record.tell_recovery
    rows = []
    for item in record.recoveries:
        row = _recovery_item(item, record)
        if details is not None:
            row |= details(item, record)
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
    note = "from the strike until work went on"
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
