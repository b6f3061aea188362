"""Latencies of inference."""

from __future__ import annotations

import pytest

from testbed.trace.events import Event
from tests.helpers.recorded import calm_metrics


def test_latencies_of_inference() -> None:
    events = [
        Event(
            float(number), "a", "request", {"request": number, "latency": number / 100}
        )
        for number in range(1, 101)
    ]
    found = calm_metrics(events=events)
    assert found["requests"] == 100
    assert found["latency"] == pytest.approx(0.505)
    assert found["latency_p95"] == pytest.approx(0.9505)
    assert found["latency_max"] == 1.0
    assert found["requests_per_second"] == pytest.approx(1.0)
    assert "step_time" not in found


def test_each_device_counts_its_own_requests() -> None:
    events = [
        Event(1.0 + place, name, "request", {"request": 0, "latency": 0.5})
        for place, name in enumerate("ab")
    ]
    assert calm_metrics(events=events)["requests"] == 2


def test_a_request_that_is_asked_again_counts_once_as_it_ended() -> None:
    events = [
        Event(1.0, "a", "request", {"request": 0, "latency": 0.5}),
        Event(2.0, "a", "failed", {"request": 1, "error": "b was lost", "after": 0.5}),
        Event(4.0, "a", "request", {"request": 0, "latency": 0.9}),
        Event(5.0, "a", "request", {"request": 1, "latency": 0.9}),
        Event(6.0, "a", "failed", {"request": 2, "error": "b was lost", "after": 0.5}),
    ]
    found = calm_metrics(events=events)
    assert (found["requests"], found["requests_failed"], found["latency"]) == (
        2,
        1,
        0.9,
    )
    # From 3.1 to 5.0, two of them, and 0.9 s each is what the plan promises.
    assert found["over_predicted"] == pytest.approx(1.9 / 2 / 0.9)
