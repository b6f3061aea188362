"""What a device tells Prometheus, and the board that shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.wire.token import authorised
from testbed_agent.device import Totals
from testbed_agent.metrics import render_metrics
from testbed_controller.lab import runstate
from tests.helpers import ROOT


def told(totals: Totals) -> str:
    device = SimpleNamespace(
        totals=totals,
        waiting=0,
        inbox=SimpleNamespace(bytes=0),
        processors=SimpleNamespace(waiting=0),
        lanes={"b": SimpleNamespace(waiting=3)},
    )
    runner = SimpleNamespace(
        state="running",
        pace=SimpleNamespace(factor=1.0),
        log=SimpleNamespace(count=7),
        device=device,
    )
    return render_metrics(runner, 1 << 20).decode()  # type: ignore[arg-type]


def learned() -> Totals:
    totals = Totals()
    for event, fields in (
        ("step", {"step": 0, "loss": 2.0}),
        ("step", {"step": 1, "loss": 1.5}),
        ("evaluate", {"step": 1, "accuracy": 0.5, "loss": 1.25}),
        ("request", {"request": 0, "latency": 0.1}),
        ("step", {"step": 2, "loss": None}),
    ):
        totals.count_event(event, fields)
    return totals


def test_metrics_include_loss_and_accuracy() -> None:
    text = told(learned())
    for line in (
        "testbed_steps_total 3.0",
        "testbed_requests_total 1.0",
        "testbed_loss 1.5",
        "testbed_accuracy 0.5",
        "testbed_test_loss 1.25",
    ):
        assert line in text.splitlines()
    assert "testbed_loss" not in told(Totals()), (
        "a device that knows of none tells none"
    )


def test_grafana_board_uses_existing_metrics() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"testbed_[a-z_]+", target["expr"])
    }
    there = set(re.findall(r"^(testbed_[a-z_]+)", told(learned()), re.MULTILINE))
    assert len(asked) > 10
    assert asked <= there


def test_targets_hold_ports_and_token_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = runstate.RunState("quickstart-1", "secret")
    runstate.write_targets(state, {"a": "http://127.0.0.1:4000/devices/a"})
    [path] = (tmp_path / "testbed").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == [
        {
            "targets": ["127.0.0.1:4000"],
            "labels": {
                "run": "quickstart-1",
                "device": "a",
                "__metrics_path__": "/devices/a/metrics",
                "__param_token": state.token_of("a"),
            },
        }
    ]
    assert runstate.runs() == []
    runstate.forget("quickstart-1")
    assert not path.exists()


@pytest.mark.parametrize(
    ("environ", "allowed"),
    [
        ({"HTTP_AUTHORIZATION": "Bearer secret"}, True),
        ({"HTTP_AUTHORIZATION": "secret"}, False),
        (
            {
                "HTTP_AUTHORIZATION": "Bearer wrong",
                "REQUEST_METHOD": "GET",
                "QUERY_STRING": "token=secret",
            },
            False,
        ),
        ({"REQUEST_METHOD": "GET", "QUERY_STRING": "a=1&token=secret"}, True),
        ({"REQUEST_METHOD": "POST", "QUERY_STRING": "token=secret"}, False),
        ({"REQUEST_METHOD": "GET"}, False),
        ({}, False),
    ],
)
def test_a_request_bears_the_token_in_its_header_or_a_reading_one_in_its_query(
    environ: Mapping[str, Any], allowed: bool
) -> None:
    assert authorised(environ, "secret") is allowed
