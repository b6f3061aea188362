"""A script in plain torch and the scenario that it became: the same losses, step by step."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from testbed.ml.data import catalog
from testbed.ml.preparation import data_folder
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT
from tests.helpers.runs import fields_of

EXAMPLES = ROOT / "scenarios" / "examples"


@cache
def by_the_script(steps=200):
    spec = importlib.util.spec_from_file_location(
        "fromtorch", EXAMPLES / "fromtorch.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.STEPS = steps
    return script.main()


@pytest.mark.parametrize(
    "method", ["{name: single}", "{name: pipeline, micro_batches: 1, partition: even}"]
)
def test_losses_are_those_of_the_script(method):
    scenario = load(str(EXAMPLES / "fromtorch.yaml"), [f"workload.method={method}"])
    prepared = prepare(trials(scenario)[0])
    outcome = simulate(
        prepared, catalog.load(scenario.workload.data, data_folder(scenario))
    )
    assert outcome.status == "finished", outcome.error
    losses, f1 = by_the_script()
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-5
    )
    assert fields_of(outcome, "evaluate")[-1]["metrics"]["f1"] == pytest.approx(
        f1, abs=1e-6
    )


def test_the_page_shows_script_and_scenario():
    page = (ROOT / "docs" / "from-torch.md").read_text()
    script, scenario = (
        (EXAMPLES / f"fromtorch.{ending}").read_text() for ending in ("py", "yaml")
    )
    assert f"```python\n{script}```" in page
    assert f"```yaml\n{scenario}```" in page
