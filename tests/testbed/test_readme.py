"""The scenario of the README, and the first method of docs/method.md."""

from __future__ import annotations

import re
from pathlib import Path

from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.expect import evaluate
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.registry import metrics_of
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text()
METHOD_PAGE = (ROOT / "docs" / "method.md").read_text()
FIRST_METHOD = METHOD_PAGE.partition("## A program with messages")[0]
"""The part of the page about methods before its second method."""
EXAMPLES = ROOT / "scenarios" / "examples"


def code_blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_scenario_of_readme_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(code_blocks("yaml", README)[0])
    (trial,) = trials(load(path))
    assert prepare(trial).plan.method == "pipeline"


def test_page_contains_method_and_scenario_of_example() -> None:
    method = (EXAMPLES / "ring.py").read_text()
    assert code_blocks("python", FIRST_METHOD) == [method]
    scenario = (EXAMPLES / "ring.yaml").read_text()
    assert code_blocks("yaml", FIRST_METHOD)[0] in scenario


def test_example_method_meets_expectations_despite_faults() -> None:
    (trial,) = trials(load(EXAMPLES / "ring.yaml"))
    prepared = prepare(trial)
    outcome = simulate(prepared, None)
    assert outcome.status == "finished", outcome.error
    declared = prepared.method.declared
    values = metrics(outcome, prepared.experiment, prepared.plan, declared)
    results = evaluate(prepared.scenario.expect, values, metrics_of(declared))
    # The method itself defines this metric.
    assert "tokens_lost" in {result.key for result in results}
    assert [result for result in results if not result.holds] == []


def test_example_method_finishes_with_faults_of_readme(tmp_path: Path) -> None:
    (tmp_path / "ring.py").write_text(code_blocks("python", FIRST_METHOD)[0])
    (tmp_path / "mine.yaml").write_text(code_blocks("yaml", README)[0])
    # A fault of this scenario waits for a span of a pipeline. The method declares no spans, so any is accepted.
    changes = [
        "workload.task=infer",
        "workload.epochs=null",
        "workload.requests=61",
        "workload.method={file: ring.py, name: ring}",
    ]
    (trial,) = trials(load(tmp_path / "mine.yaml", changes))
    assert simulate(prepare(trial), None).status == "finished"
