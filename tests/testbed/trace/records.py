"""Hand-made events, and values computed from them, for tests of metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from testbed.trace.events import TESTBED, Event
from testbed.trace.metrics_spec import Metric
from testbed.trace.record import RunView


def in_order(*groups: Iterable[Event]) -> list[Event]:
    """Return the events of all groups, sorted by time."""
    events: list[Event] = []
    for group in groups:
        events += group
    return sorted(events, key=lambda event: event.time)


def without(events: Iterable[Event], *names: str) -> list[Event]:
    """Return all events except of some names."""
    return [event for event in events if event.event not in names]


def with_fields(
    events: Iterable[Event], is_changed: Callable[[Event], bool], **fields: Any
) -> list[Event]:
    """Return the events with other fields where a condition holds."""
    changed = []
    for event in events:
        if is_changed(event):
            event = event._replace(fields={**event.fields, **fields})
        changed.append(event)
    return changed


def fault_event(
    time: float, action: str, target: str, phase: str = "strike", **fields: Any
) -> Event:
    """Return the event of a fault, by default at the intended time."""
    defaults = {"action": action, "target": target, "phase": phase, "intended": time}
    return Event(time, TESTBED, "fault", defaults | fields)


def recovery_event(time: float, phase: str, **fields: Any) -> Event:
    return Event(time, "a", "recovery", {"phase": phase, **fields})


def metric_values(metrics: Iterable[Metric], record: RunView) -> dict[str, Any]:
    """Return the values of metrics by their names."""
    return {metric.name: metric.compute(record) for metric in metrics}


def columns_of(rows: Iterable[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    """Return some values of each row of a table."""
    return [tuple(row[key] for key in keys) for row in rows]


def steadiness(metrics: dict[str, Any]) -> list[bool]:
    """Return the flag of each step for being undisturbed."""
    return [row["steady"] for row in metrics["series"]["steps"]]


def checks_by_name(judged: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the checks of a verdict by their names."""
    return {check["name"]: check for check in judged["checks"]}
