"""Latencies and counts of requests."""

from __future__ import annotations

import pytest

from testbed.trace.events import Event
from tests.helpers.recorded import calm_metrics


def request_event(time: float, device: str, number: int, latency: float) -> Event:
    return Event(time, device, "request", {"request": number, "latency": latency})


def failure_event(time: float, number: int) -> Event:
    fields = {"request": number, "error": "b was lost", "after": 0.5}
    return Event(time, "a", "failed", fields)


def test_latency_percentiles_and_throughput() -> None:
    # A request each second, with latencies of 0.01 to 1 s.
    events = []
    for number in range(1, 101):
        events.append(request_event(float(number), "a", number, number / 100))
    values = calm_metrics(events=events)
    assert values["requests"] == 100
    assert values["latency"] == pytest.approx(0.505)
    # Interpolated between the 95th and the 96th value.
    assert values["latency_p95"] == pytest.approx(0.9505)
    assert values["latency_max"] == 1.0
    assert values["requests_per_second"] == pytest.approx(1.0)
    assert "step_time" not in values


def test_requests_of_different_devices_count_separately() -> None:
    events = [request_event(1.0, "a", 0, 0.5), request_event(2.0, "b", 0, 0.5)]
    assert calm_metrics(events=events)["requests"] == 2


def test_repeated_request_counts_once_with_last_result() -> None:
    events = [
        request_event(1.0, "a", 0, 0.5),
        failure_event(2.0, 1),
        request_event(4.0, "a", 0, 0.9),
        request_event(5.0, "a", 1, 0.9),
        failure_event(6.0, 2),
    ]
    values = calm_metrics(events=events)
    assert values["requests"] == 2
    assert values["requests_failed"] == 1
    assert values["latency"] == 0.9
    # Two requests between 3.1 and 5.0 s; the plan predicts 0.9 s for each.
    assert values["over_predicted"] == pytest.approx(1.9 / 2 / 0.9)
