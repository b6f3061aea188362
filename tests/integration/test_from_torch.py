"""The scenario that a script in plain torch became, in containers: the losses of the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.commands import run_command
from tests.testbed.test_from_torch import by_the_script

pytestmark = [pytest.mark.containers, pytest.mark.timeout(300)]

STEPS = 50
"""More than twice through the data."""


def test_containers_learn_as_the_script_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out, fewer = (
        tmp_path / "out",
        ["--set", f"workload.steps={STEPS}", "--set", "expect={}"],
    )
    done = run_command(
        "run",
        ROOT / "scenarios/examples/fromtorch.yaml",
        "--accept-links",
        "--out",
        out,
        *fewer,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    losses, f1 = by_the_script(STEPS)
    assert [step["loss"] for step in metrics["series"]["steps"]] == pytest.approx(
        losses, abs=1e-5
    )
    assert metrics["metrics"]["f1"] == pytest.approx(f1, abs=1e-6)
