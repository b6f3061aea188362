"""What a run says of itself as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.trace.course import METRICS
from tests.helpers import recorded


def values(**changes: Any) -> dict[str, Any]:
    record = recorded.make_calm_record(**changes)
    return {figure.name: figure.compute(record) for figure in METRICS}


def test_a_run_lasts_until_its_leads_program_has_ended() -> None:
    late = recorded.make_events(faulty=False)[-1]._replace(time=9.0, device="b")
    found = values(events=[*recorded.make_events(faulty=False), late])
    assert found["duration"] == 5.6, "what b still does afterwards is no part of it"
    assert values(events=recorded.make_events(faulty=False)[:-1])["duration"] == 5.5, (
        "the last that was seen of it"
    )


@pytest.mark.parametrize("status", ["finished", "failed", "timed out", "interrupted"])
def test_only_a_run_that_finished_can_be_trusted(status: str) -> None:
    found = values(status=status)
    assert found["status"] == status
    assert found["trusted"] is (status == "finished")


def test_the_share_of_the_host_is_its_lateness_on_the_path_over_the_undisturbed_steps() -> (
    None
):
    def late(event: Any) -> Any:
        whose = event.event == "compute" and event.device == "b"
        return event._replace(fields={**event.fields, "late": 0.02}) if whose else event

    found = values(events=[late(event) for event in recorded.make_events(faulty=False)])
    # Each step of one second waits for one forward of b; the first step, which is no steady one, does not count.
    assert found["host_share"] == pytest.approx(0.02)
