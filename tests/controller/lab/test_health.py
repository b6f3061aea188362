"""Waiting for containers to start, and causes of their end."""

from __future__ import annotations

import logging
from unittest.mock import MagicMock, Mock

import pytest

from testbed.common.errors import HostError
from testbed_controller.lab import health


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock: each sleep advances time by ten seconds. Return a list with the time."""
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(health.time, "sleep", lambda _: now.append(now.pop() + 10.0))
    monkeypatch.setattr(health.Health, "check_alive", lambda *_: None)
    return now


def test_slowly_starting_containers_are_awaited(
    clock: list[float], monkeypatch
) -> None:
    # The URL of a device is the time at which its agent answers; the last one is 450.
    urls = {f"device{number}": str(50.0 * number) for number in range(10)}
    monkeypatch.setattr(health, "is_healthy", lambda url: clock[0] >= float(url))
    health.Health(Mock(), "run", {}).wait_for(urls)
    assert clock[0] == 450.0


def test_silent_container_is_reported_with_end_of_its_log(
    clock: list[float], monkeypatch, caplog
) -> None:
    caplog.set_level(logging.INFO, "testbed_controller.lab.health")
    monkeypatch.setattr(health, "is_healthy", lambda url: url == "there")
    monkeypatch.setattr(health, "container_logs", lambda *_: [b"I am", b" here\n"])
    with pytest.raises(
        HostError, match="silent does not answer within 60 s; last log line: I am here"
    ):
        health.Health(Mock(), "run", {}).wait_for(
            {"other": "there", "silent": "not there"}
        )
    # 60 s, and two steps of the clock.
    assert clock[0] <= 80.0
    assert caplog.messages == ["the log of silent ends with:\nI am here"]


def health_after(exit_code: int, running: list[int]) -> health.Health:
    """Return the health of a run with an ended container; ``running`` has successive counts of running containers."""
    status = {
        "Status": "exited",
        "ExitCode": exit_code,
        "StartedAt": "2026-01-01T00:00:00Z",
    }
    client = Mock()
    client.api.inspect_container.return_value = {
        "State": {**status, "FinishedAt": "2026-01-01T00:01:00Z"}
    }
    client.api.containers.side_effect = [[{}] * count for count in running]
    client.events.return_value = MagicMock(__iter__=lambda _: iter(()))
    return health.Health(client, "run", {})


@pytest.mark.usefixtures("clock")
def test_stop_of_engine_is_reported_as_cause() -> None:
    # The engine stops all containers one after the other.
    ending = health_after(0, [3, 1, 0]).ending("shaper")
    assert ending is not None
    assert "the container engine was stopped" in ending.text


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("exit_code", [0, 1])
def test_container_that_ends_while_others_run_ended_by_itself(exit_code: int) -> None:
    ending = health_after(exit_code, [3] * 9).ending("shaper")
    assert ending is not None
    assert ending.text == f"ended by itself with exit code {exit_code}"
