"""How long containers are waited for."""

from __future__ import annotations

import logging
from unittest.mock import MagicMock, Mock

import pytest

from testbed.common.errors import HostError
from testbed_controller.lab import health


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, of which each sleep takes ten seconds."""
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(health.time, "sleep", lambda _: now.append(now.pop() + 10.0))
    monkeypatch.setattr(health.Health, "check_alive", lambda *_: None)
    return now


def test_slowly_starting_containers_are_awaited(
    clock: list[float], monkeypatch
) -> None:
    urls = {f"device{number}": str(50.0 * number) for number in range(10)}
    monkeypatch.setattr(health, "is_healthy", lambda url: clock[0] >= float(url))
    health.Health(Mock(), "run", {}).wait_for(urls)
    assert clock[0] == 450.0


def test_silent_container_is_given_up(clock: list[float], monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO, "testbed_controller.lab.health")
    monkeypatch.setattr(health, "is_healthy", lambda url: url == "there")
    monkeypatch.setattr(health, "container_logs", lambda *_: [b"I am", b" here\n"])
    with pytest.raises(
        HostError, match="silent does not answer within 60 s; last log line: I am here"
    ):
        health.Health(Mock(), "run", {}).wait_for(
            {"other": "there", "silent": "not there"}
        )
    assert clock[0] <= 80.0
    assert caplog.messages == ["the log of silent ends with:\nI am here"]


def ended(code: int, running: list[int]) -> health.Health:
    """Return the health of a run with a container that ended with a status, and in turns so many that run."""
    status = {"Status": "exited", "ExitCode": code, "StartedAt": "2026-01-01T00:00:00Z"}
    client = Mock()
    client.api.inspect_container.return_value = {
        "State": {**status, "FinishedAt": "2026-01-01T00:01:00Z"}
    }
    client.api.containers.side_effect = [[{}] * count for count in running]
    client.events.return_value = MagicMock(__iter__=lambda _: iter(()))
    return health.Health(client, "run", {})


@pytest.mark.usefixtures("clock")
def test_an_engine_that_stops_in_an_orderly_way_is_named() -> None:
    ending = ended(0, [3, 1, 0]).ending("shaper")
    assert ending is not None
    assert "the container engine was stopped" in ending.text


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("code", [0, 1])
def test_a_container_that_ends_while_others_run_has_ended_by_itself(code: int) -> None:
    ending = ended(code, [3] * 9).ending("shaper")
    assert ending is not None
    assert ending.text == f"ended by itself with exit code {code}"
