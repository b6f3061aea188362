"""Random faults on real containers: training ends with the weights of the batches that were not undone."""

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
"""How many schedules; each takes half a minute or more."""


def test_a_random_scenario_on_containers_violates_nothing() -> None:
    """One of those of `make stress ARGS=--containers`: a pipeline of which a device is killed."""
    assert containers.find_violations(random_scenario(72)) == []


@pytest.mark.parametrize("seed", range(2, 2 + SEEDS))
def test_random_faults_on_containers(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    keys = random_keys(seed)
    tree = scenario_keys(**keys) | {"name": f"random-{seed}", "time_limit": "120s"}
    tree["workload"]["method"]["stall_timeout"] = (
        "1s"  # devices that share a machine are late now and then
    )
    (tmp_path / "scenario.yaml").write_text(
        yamltext.written(json.loads(json.dumps(tree)))
    )
    results = tmp_path / "results"
    done = run_command(
        "run", tmp_path / "scenario.yaml", "--out", results, "--accept-links"
    )
    figures = json.loads((results / "metrics.json").read_text())
    if "not enough devices" in str(figures["error"]):
        return
    assert figures["status"] == "finished", done.stderr
    assert figures["steps"] == STEPS
    log = EventLog(
        map(Event.from_json, (results / "events.jsonl").read_text().splitlines())
    )
    expected = (
        DelayedReference(make_scenario(**keys))
        .replay(SimpleNamespace(events=log), STEPS)
        .newest
    )
    found = load_file(results / "weights.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
