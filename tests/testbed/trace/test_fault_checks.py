"""Checks of verdicts for late, missing and prolonged faults and late changes of links."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.trace.events import Event
from testbed.trace.metrics import metrics
from testbed.trace.verdict import verdict
from tests.helpers import recorded
from tests.helpers.recorded import recorded_metrics
from tests.testbed.trace.records import (
    checks_by_name,
    fault_event,
    in_order,
    with_fields,
)


def summary_of(**changes: Any) -> str:
    """Return the summary of the recorded run's verdict."""
    summary: str = recorded_metrics(**changes)["verdict"]["summary"]
    return summary


def is_strike(event: Event) -> bool:
    return event.fields.get("phase") == "strike"


@pytest.mark.parametrize(("late", "is_ok"), [(0.5, True), (0.51, False)])
def test_fault_may_be_up_to_500_ms_late(late: float, is_ok: bool) -> None:
    # The kill struck at 2.32 s.
    events = with_fields(recorded.make_events(), is_strike, intended=2.32 - late)
    record = recorded.make_record(events=events)
    assert checks_by_name(verdict(record))["faults"]["ok"] is is_ok


def test_late_fault_is_reported() -> None:
    # The kill struck at 2.32 s.
    events = with_fields(recorded.make_events(), is_strike, intended=1.0)
    assert "kill of b struck 1.32 s late" in summary_of(events=events)


def test_missing_fault_is_reported() -> None:
    events = recorded.make_events(faulty=False)
    assert "never struck: kill" in summary_of(events=events)


def test_slow_fault_counts_from_beginning() -> None:
    # A device may boot or hand over its state before the event of the fault.
    events = with_fields(recorded.make_events(), is_strike, intended=1.0, began=1.1)
    assert "late" not in summary_of(events=events)
    assert recorded_metrics(events=events)["fault_list"][0]["struck"] == 1.1


def test_fault_that_lasts_too_long_is_reported() -> None:
    def summary_with_pause_until(end: float) -> str:
        pause = [
            fault_event(3.0, "pause", "b"),
            fault_event(end, "pause", "b", "undo", intended=5.0),
        ]
        return summary_of(events=[*recorded.make_events(), *pause])

    assert "longer than intended" not in summary_with_pause_until(5.4)
    # As if the container engine had not answered for four seconds.
    summary = summary_with_pause_until(9.2)
    assert "pause of b lasted 4.20 s longer than intended" in summary


FLAP = {"flap": {"between": ["a", "b"], "down": "60ms", "up": "1s"}, "at": "1s"}


def checks_with_flap(*changes: Event) -> dict[str, dict[str, Any]]:
    """Return the checks of a run of a scenario with a flap, whose changes are given."""
    values = metrics(
        recorded.make_outcome(
            events=in_order(recorded.make_events(faulty=False), changes)
        ),
        recorded.make_trial(faults=[FLAP]).experiment,
        recorded.make_plan(),
    )
    return checks_by_name(values["verdict"])


def flap_event(time: float, phase: str, intended: float) -> Event:
    return fault_event(time, "flap", "a <-> b", phase, intended=intended)


def trace_event(time: float, intended: float) -> Event:
    fields = {"what": "link a->b rate", "value": "1mbit", "intended": intended}
    return Event(time, "testbed", "trace", fields)


def test_slightly_late_changes_by_trace_and_flap_are_accepted() -> None:
    checks = checks_with_flap(
        trace_event(2.04, intended=2.0),
        flap_event(1.02, "strike", intended=1.0),
        flap_event(1.075, "undo", intended=1.06),
    )
    assert checks["trace"]["ok"]
    assert checks["trace"]["detail"] == "1 changes by the trace, the latest 40 ms late"
    assert checks["flaps"]["ok"]


def test_late_changes_by_trace_and_flap_are_counted() -> None:
    checks = checks_with_flap(
        trace_event(2.04, intended=2.0),
        trace_event(3.06, intended=3.0),
        flap_event(1.02, "strike", intended=1.0),
        flap_event(1.095, "undo", intended=1.06),
    )
    assert not checks["trace"]["ok"]
    assert (
        checks["trace"]["detail"]
        == "1 of 2 changes by the trace, the latest 60 ms late (at most 50 ms)"
    )
    assert not checks["flaps"]["ok"]
    assert (
        checks["flaps"]["detail"]
        == "1 of 2 changes by the flaps, the latest 35 ms late (at most 30 ms)"
    )
