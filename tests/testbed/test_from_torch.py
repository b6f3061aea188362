"""The plain torch script of docs/from-torch.md and the equivalent scenario."""

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
def run_script(steps=200):
    """Return the losses and the F1 score of the script."""
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
def test_scenario_has_losses_and_score_of_script(method):
    scenario = load(str(EXAMPLES / "fromtorch.yaml"), [f"workload.method={method}"])
    (trial,) = trials(scenario)
    dataset = catalog.load(scenario.workload.data, data_folder(scenario))
    outcome = simulate(prepare(trial), dataset)
    assert outcome.status == "finished", outcome.error
    script_losses, script_f1 = run_script()
    losses = [fields["loss"] for fields in fields_of(outcome, "step")]
    # Sums in another order differ by rounding.
    assert losses == pytest.approx(script_losses, abs=1e-5)
    f1 = fields_of(outcome, "evaluate")[-1]["metrics"]["f1"]
    assert f1 == pytest.approx(script_f1, abs=1e-6)


def test_page_contains_script_and_scenario():
    page = (ROOT / "docs" / "from-torch.md").read_text()
    script = (EXAMPLES / "fromtorch.py").read_text()
    scenario = (EXAMPLES / "fromtorch.yaml").read_text()
    assert f"```python\n{script}```" in page
    assert f"```yaml\n{scenario}```" in page
