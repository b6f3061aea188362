"""The benchmark of torch's pipelining over gloo, in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.prepare import prepare
from testbed.scenario.expand import trials
from tools.bench import gloo

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]


def test_torch_pipelining_runs_on_lab(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(gloo, "STEPS", 1)
    monkeypatch.setattr(gloo, "DEVICES", 2)
    prepared = prepare(trials(gloo.make_scenario("1f1b"))[0])
    times = gloo.measure_schedules({"1f1b": prepared})["1f1b"]
    # Messages of gloo pass the same links, so a step cannot be much shorter than the plan predicts.
    assert prepared.plan.step_time is not None
    assert times.step > 0.8 * prepared.plan.step_time
    assert times.processor > 0
