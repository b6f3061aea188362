"""Published ports of containers that cannot be reached from the controller."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.common.errors import HostError
from testbed_controller.lab import health, ports
from testbed_controller.lab.ports import port_problem


def make_engine(status: int) -> Any:
    """Return an engine and its container, where commands end with ``status``: 0 if the port accepts connections."""
    api = SimpleNamespace(
        exec_create=lambda *_: {"Id": "x"},
        exec_start=lambda _: b"",
        exec_inspect=lambda _: {"ExitCode": status},
    )
    return SimpleNamespace(api=api)


@pytest.fixture
def closed_url() -> str:
    """Return a local URL with a closed port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_port_reachable_only_within_container_is_reported(
    closed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The remedy depends on the place of the controller: another host, or a container on the same one.
    monkeypatch.setattr(ports, "_is_in_container", lambda: False)
    assert "--network" not in port_problem(make_engine(0), "shaper", closed_url)
    assert "add '--hosts NAME'" in port_problem(make_engine(0), "shaper", closed_url)
    monkeypatch.setattr(ports, "_is_in_container", lambda: True)
    assert "'--network host'" in port_problem(make_engine(0), "shaper", closed_url)


def test_starting_container_has_no_port_problem(closed_url: str) -> None:
    assert port_problem(make_engine(1), "shaper", closed_url) == ""


def test_open_port_has_no_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert port_problem(make_engine(0), "shaper", url) == ""


def test_unreachable_shaper_is_refused_within_five_seconds(
    closed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(health.time, "sleep", sleep)
    monkeypatch.setattr(health.Health, "check_alive", lambda *_: None)
    with pytest.raises(HostError, match=r"shaper: .* unreachable from here"):
        health.Health(make_engine(0), "run", {}).wait_for(
            {"shaper": closed_url}, published=True
        )
    assert now[0] < 5.0
