"""What the README shows works: its scenario validates, its method runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from testbed.methods.base import Method
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found[1]


def test_the_scenario_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(block("yaml"))
    (trial,) = trials(load(path))
    assert prepare(trial).plan.method == "pipeline"


def test_the_method_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    ring: Method = names["Ring"]()
    path = tmp_path / "mine.yaml"
    path.write_text(block("yaml").split("faults:")[0])
    prepared = prepare(trials(load(path))[0])
    outcome = simulate(Prepared(prepared.trial, ring, prepared.problem, ring.plan(prepared.problem)), None)
    assert outcome.status == "finished"
    holders = [event.device for event in outcome.events if event.event == "compute"]
    assert sorted(holders) == ["source", "worker1", "worker2", "worker3"]
