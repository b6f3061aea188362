"""Obstacles to a run that a report about a host names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from testbed_controller.hosts import survey
from testbed_controller.hosts.survey import COPIED_BY_FIRST_RUN
from tests.controller.hosts.test_contexts import make_host


def obstacles(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """Return the obstacles of a host without images, except for the missing images."""
    tags = SimpleNamespace(by_kind={"device": "device:1", "shaper": "shaper:1"})
    monkeypatch.setattr(survey, "find_tags", lambda client: tags)
    monkeypatch.setattr(survey, "image_exists", lambda client, tag: False)
    monkeypatch.setattr(survey, "_try_reach", lambda name: make_host(name, **changes))
    [report] = survey.survey(["b"])
    return [text for text in report.missing if not text.endswith(COPIED_BY_FIRST_RUN)]


def test_worker_of_a_swarm_has_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacles(monkeypatch) == []


def test_host_outside_a_swarm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    [obstacle] = obstacles(monkeypatch, address="", managers=())
    assert obstacle.startswith("b is not in a swarm")


def test_old_engine_in_a_swarm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    [obstacle] = obstacles(monkeypatch, version="18.09.1")
    assert obstacle.startswith("b has Docker 18.09.1: install version 19")
