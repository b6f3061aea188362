from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from testbed.common.errors import HostError
from testbed_controller.lab import health, ports
from testbed_controller.lab.ports import port_problem


def engine(status: int) -> Any:
    """Return an engine whose container answers an exec with this status."""
    exec_ = {
        "exec_create": lambda *_: {"Id": "x"},
        "exec_start": lambda _: b"",
        "exec_inspect": Mock(),
    }
    exec_["exec_inspect"].return_value = {"ExitCode": status}
    return SimpleNamespace(api=SimpleNamespace(**exec_))


@pytest.fixture
def closed() -> str:
    """Return a URL of this machine at which nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_port_that_only_the_container_reaches_is_out_of_reach(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_is_in_container", lambda: False)
    assert "--network" not in port_problem(engine(0), "shaper", closed)
    assert "add '--hosts NAME'" in port_problem(engine(0), "shaper", closed)
    monkeypatch.setattr(ports, "_is_in_container", lambda: True)
    assert "'--network host'" in port_problem(engine(0), "shaper", closed)


def test_container_that_does_not_listen_yet_has_no_port_problem(closed: str) -> None:
    assert port_problem(engine(1), "shaper", closed) == ""


def test_a_port_that_accepts_has_no_problem() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert port_problem(engine(0), "shaper", url) == ""


def test_a_shaper_out_of_reach_is_refused_within_five_seconds(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        health.time, "sleep", lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr(health.Health, "check_alive", lambda *_: None)
    with pytest.raises(HostError, match=r"shaper: .* unreachable from here"):
        health.Health(engine(0), "run", {}).wait_for({"shaper": closed}, published=True)
    assert now[0] < 5.0
