"""The pace before a fault and after the last recovery or repartition, and how busy the busiest is then."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from testbed.framing import wire_bytes
from testbed.network.link import Link, Pair
from testbed.trace.disturbances import Recovery
from testbed.trace.events import Event
from testbed.trace.intervals import Interval, subtract, total

Row = Mapping[str, Any]
"""A step of ``series``: step, time, seconds, steady."""


def pauses(events: Sequence[Event]) -> list[Interval]:
    """Return when training stood still for a repartition without a failure."""
    return [(event.time - event.fields["seconds"], event.time) for event in _repartitions(events)]


def pace_figures(events: Sequence[Event], steps: Sequence[Row], outlived: Sequence[Recovery]) -> dict[str, float]:
    """Return the time per step before the first fault, absent without one, and after the last change, if any."""
    figures = {}
    struck = [item.struck for item in outlived if item.struck is not None]
    before = [row["seconds"] for row in steps if row["steady"] and struck and row["time"] <= min(struck)]
    if before:
        figures["step_time_before"] = median(before)
    changed = last_change(events, outlived)
    last = [row["seconds"] for row in after(steps, changed)]
    if last:
        figures["step_time_after"] = median(last)
    return figures


def last_change(events: Sequence[Event], outlived: Sequence[Recovery]) -> float:
    """Return when the last repartition or recovery was over; the begin of the run where there was none."""
    resumed = [item.resumed for item in outlived if item.resumed is not None]
    return max([0.0, *resumed, *(event.time for event in _repartitions(events))])


def after(steps: Sequence[Row], moment: float) -> list[Row]:
    """Return the undisturbed steps that began after a moment; all but the first where a fault outlasts the run."""
    rows = [row for row in steps if row["time"] - row["seconds"] >= moment]
    return [row for row in rows if row["steady"]] or rows[1:]


def busiest_share(
    computing: Collection[Sequence[Interval]], links: Mapping[Pair, Link], events: Sequence[Event], steps: Sequence[Row]
) -> float | None:
    """Return the largest share of these steps' time that a device computes or a link carries; None without steps.

    ``computing`` are the devices' disjoint intervals.
    """
    windows = [(row["time"] - row["seconds"], row["time"]) for row in steps]
    seconds = total(windows)
    if seconds <= 0:
        return None
    busy = [total(part) - total(subtract(part, windows)) for part in computing]
    carried: dict[Pair, float] = {}
    inside = _Membership(windows)
    for event in events:
        if event.event == "send" and inside.holds(event.time):
            pair = (event.device, event.fields["peer"])
            link = links.get(pair)
            if link is not None:
                carried[pair] = carried.get(pair, 0.0) + link.transmission_time(wire_bytes(event.fields["bytes"]))
    return min(1.0, max([*busy, *carried.values()], default=0.0) / seconds)


class _Membership:
    """Says of instants that only rise whether they lie in one of several disjoint intervals."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._left = sorted(intervals, reverse=True)

    def holds(self, moment: float) -> bool:
        while self._left and self._left[-1][1] < moment:
            self._left.pop()
        return bool(self._left) and self._left[-1][0] < moment


def _repartitions(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.event == "repartition"]
