"""Rounds of work: the event that ends one, and how long rounds take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from testbed.trace.events import Event, EventType
from testbed.trace.figures import Figure
from testbed.trace.record import Record


def rounds_of(record: Record) -> Sequence[Event]:
    """Return the events of the rounds that are over."""
    return record.of("round")


def _round_time(record: Record) -> float | None:
    durations = [event.fields["duration"] for event in rounds_of(record)]
    return median(durations) if durations else None


ROUND = EventType(
    "round",
    "the server has averaged the models of a round; samples by device",
    fields=("round", "start", "duration", "samples"),
)
ROUND_TIME = Figure(
    "round_time",
    "seconds",
    "median, from one average of the models to the next",
    _round_time,
    brief=True,
    compared=True,
)
