"""How long containers are waited for."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from controller.lab import health
from testbed.common.errors import HostError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, of which each sleep takes ten seconds."""
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(health.time, "sleep", lambda _: now.append(now.pop() + 10.0))
    monkeypatch.setattr(health.Health, "check_alive", lambda *_: None)
    return now


def test_many_that_come_up_one_after_the_other_are_waited_for(clock: list[float], monkeypatch) -> None:
    urls = {f"device{number}": str(50.0 * number) for number in range(10)}
    monkeypatch.setattr(health, "healthy", lambda url: clock[0] >= float(url))
    health.Health(Mock(), "run", {}).wait_for(urls)
    assert clock[0] == 450.0


def test_one_that_stays_silent_is_given_up(clock: list[float], monkeypatch) -> None:
    monkeypatch.setattr(health, "healthy", lambda url: url == "there")
    monkeypatch.setattr(health, "container_logs", lambda *_: [b"I am", b" here\n"])
    with pytest.raises(HostError, match="silent does not answer within 60 s; the last it said: I am here"):
        health.Health(Mock(), "run", {}).wait_for({"other": "there", "silent": "not there"})
    assert clock[0] <= 80.0
