"""Metrics of a run as a whole: duration, status, trust and host share."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.trace.course import METRICS
from testbed.trace.events import Event
from tests.helpers import recorded
from tests.testbed.trace.records import metric_values, with_fields


def course_metrics(**changes: Any) -> dict[str, Any]:
    return metric_values(METRICS, recorded.make_calm_record(**changes))


def test_run_lasts_until_coordinators_program_ends() -> None:
    events = recorded.make_events(faulty=False)
    # The last event is the coordinator's end at 5.6 s; another device ends later.
    later = events[-1]._replace(time=9.0, device="b")
    assert course_metrics(events=[*events, later])["duration"] == 5.6


def test_run_without_end_of_coordinator_lasts_until_last_event() -> None:
    events = recorded.make_events(faulty=False)[:-1]
    assert course_metrics(events=events)["duration"] == 5.5


@pytest.mark.parametrize("status", ["finished", "failed", "timed out", "interrupted"])
def test_only_finished_run_is_trusted(status: str) -> None:
    metrics = course_metrics(status=status)
    assert metrics["status"] == status
    assert metrics["trusted"] is (status == "finished")


def test_host_share_is_lateness_on_critical_path_of_undisturbed_steps() -> None:
    def is_computation_of_b(event: Event) -> bool:
        return event.event == "compute" and event.device == "b"

    events = with_fields(
        recorded.make_events(faulty=False), is_computation_of_b, late=0.02
    )
    # Each step of 1 s waits for one forward pass of b; the first step is no undisturbed one.
    assert course_metrics(events=events)["host_share"] == pytest.approx(0.02)
