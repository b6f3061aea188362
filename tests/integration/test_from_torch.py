"""The scenario that a script in plain torch was converted to, in containers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.commands import run_command
from tests.testbed.test_from_torch import run_script

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

STEPS = 50
"""More than two epochs."""


def test_containers_have_losses_of_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out = tmp_path / "out"
    scenario = ROOT / "scenarios/examples/fromtorch.yaml"
    # The expectations of the scenario hold for its full number of steps.
    changes = ("--set", f"workload.steps={STEPS}", "--set", "expect={}")
    completed = run_command("run", scenario, "--accept-links", "--out", out, *changes)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    expected_losses, expected_f1 = run_script(STEPS)
    losses = [step["loss"] for step in metrics["series"]["steps"]]
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert metrics["metrics"]["f1"] == pytest.approx(expected_f1, abs=1e-6)
