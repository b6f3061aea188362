"""Rounds of federated work: end events and durations."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from testbed.trace.events import Event, EventType
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView


def rounds_of(record: RunView) -> Sequence[Event]:
    """Return the end events of all completed rounds."""
    return record.of("round")


def _round_time(record: RunView) -> float | None:
    durations = [event.fields["duration"] for event in rounds_of(record)]
    return median(durations) if durations else None


ROUND = EventType(
    "round",
    "end of a round: the server averaged the models; samples by device",
    fields=("round", "start", "duration", "samples"),
)
ROUND_TIME = Metric(
    "round_time",
    "seconds",
    "median time from one average of the models to the next",
    _round_time,
    brief=True,
    compared=True,
)
