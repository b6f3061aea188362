"""Random faults in containers: final weights are those of the batches that no recovery undid."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from testbed.common import yamltext
from testbed.trace.events import Event
from testbed.trace.log import EventLog
from tests.helpers.commands import run_command
from tests.helpers.delayed_gradients import DelayedReference
from tests.helpers.runs import make_scenario, scenario_keys
from tests.helpers.schedules import STEPS, random_keys
from tools.stress import containers
from tools.stress.generate import random_scenario

pytestmark = [pytest.mark.containers, pytest.mark.timeout(240)]

SEEDS = int(os.environ.get("RANDOM_FAULTS_ON_CONTAINERS", "1"))
"""Number of schedules; each takes at least half a minute."""


def test_random_scenario_has_no_violations() -> None:
    # `make stress ARGS=--containers` runs many. With this seed, a device of a pipeline is killed.
    assert containers.find_violations(random_scenario(72)) == []


@pytest.mark.parametrize("seed", range(2, 2 + SEEDS))
def test_weights_after_random_faults_equal_reference(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    keys = random_keys(seed)
    tree = scenario_keys(**keys) | {"name": f"random-{seed}", "time_limit": "120s"}
    # Devices that share a machine may be late for longer than the 500 ms of the schedule.
    tree["workload"]["method"]["stall_timeout"] = "1s"
    path, results = tmp_path / "scenario.yaml", tmp_path / "results"
    # JSON turns tuples into lists, which YAML needs.
    path.write_text(yamltext.written(json.loads(json.dumps(tree))))
    completed = run_command("run", path, "--out", results, "--accept-links")
    metrics = json.loads((results / "metrics.json").read_text())
    if "not enough devices" in str(metrics["error"]):
        return
    assert metrics["status"] == "finished", completed.stderr
    assert metrics["steps"] == STEPS
    lines = (results / "events.jsonl").read_text().splitlines()
    outcome = SimpleNamespace(events=EventLog(map(Event.from_json, lines)))
    reference = DelayedReference(make_scenario(**keys)).replay(outcome, STEPS)
    weights = load_file(results / "weights.safetensors")
    for name, expected in reference.newest.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)
