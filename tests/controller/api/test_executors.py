"""Progress messages of the executors of prepared runs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from testbed_controller.api import executors
from testbed_controller.api.executors import InTurn, PlannedRun
from tests.helpers import recorded


def test_brackets_in_the_label_of_a_point_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Text in brackets is markup for rich, which would remove the text.
    finished = SimpleNamespace(outcome=SimpleNamespace(status="finished"))
    monkeypatch.setattr(executors, "run_recorded", lambda *_: finished)
    runs = {}
    for number in range(2):
        point = {"label": f"FedAvg [paper {number}]"}
        trial = replace(recorded.make_trial(), point=point)
        prepared = cast(Any, SimpleNamespace(trial=trial))
        runs[number] = PlannedRun(prepared, tmp_path)
    output = io.StringIO()
    console = Console(file=output, width=80)
    InTurn("simulate").execute(runs, console, lambda *_: None)
    assert "FedAvg [paper 0]" in output.getvalue()
