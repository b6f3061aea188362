"""Metrics of a device for Prometheus, and the Grafana board of the documentation."""

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


def render(totals: Totals) -> str:
    """Return the metrics of a device with some totals, in Prometheus' format."""
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


def count_events() -> Totals:
    """Return the totals of three steps, an evaluation and a request."""
    totals = Totals()
    totals.count_event("step", {"step": 0, "loss": 2.0})
    totals.count_event("step", {"step": 1, "loss": 1.5})
    totals.count_event("evaluate", {"step": 1, "accuracy": 0.5, "loss": 1.25})
    totals.count_event("request", {"request": 0, "latency": 0.1})
    # A step without a loss leaves the metric at the last known loss.
    totals.count_event("step", {"step": 2, "loss": None})
    return totals


@pytest.mark.parametrize(
    "line",
    [
        "testbed_steps_total 3.0",
        "testbed_requests_total 1.0",
        "testbed_loss 1.5",
        "testbed_accuracy 0.5",
        "testbed_test_loss 1.25",
    ],
)
def test_metrics_include_totals_and_last_values(line: str) -> None:
    assert line in render(count_events()).splitlines()


def test_unknown_loss_is_not_exported() -> None:
    assert "testbed_loss" not in render(Totals())


def test_grafana_board_uses_existing_metrics() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    used: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            used.update(re.findall(r"testbed_[a-z_]+", target["expr"]))
    exported = re.findall(r"^(testbed_[a-z_]+)", render(count_events()), re.MULTILINE)
    assert len(used) > 10
    assert used <= set(exported)


def test_prometheus_targets_are_readable_by_the_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = runstate.RunState("quickstart-1", "secret")
    runstate.write_targets(state, {"a": "http://127.0.0.1:4000/devices/a"})
    [path] = (tmp_path / "testbed").iterdir()
    # The file contains the token.
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
    # The file is not mistaken for the state of a run, and disappears with the run.
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
    ids=[
        "header",
        "header without scheme",
        "wrong header",
        "query of a read",
        "query of a write",
        "no query",
        "nothing",
    ],
)
def test_token_is_accepted_in_the_header_or_the_query_of_a_read(
    environ: Mapping[str, Any], allowed: bool
) -> None:
    # Prometheus can send the token only in a query.
    assert authorised(environ, "secret") is allowed
