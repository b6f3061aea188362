"""The scenario of the README and the first method of docs/method.md work."""

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
METHOD = (
    (ROOT / "docs" / "method.md").read_text().partition("## A program with messages")[0]
)
EXAMPLES = ROOT / "scenarios" / "examples"


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_scenario_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("yaml")[0])
    (trial,) = trials(load(path))
    assert prepare(trial).plan.method == "pipeline"


def test_the_method_is_the_example() -> None:
    assert blocks("python", METHOD) == [(EXAMPLES / "ring.py").read_text()]
    assert blocks("yaml", METHOD)[0] in (EXAMPLES / "ring.yaml").read_text()


def test_the_method_runs_with_its_faults_and_its_figure_is_expected() -> None:
    prepared = prepare(trials(load(EXAMPLES / "ring.yaml"))[0])
    outcome = simulate(prepared, None)
    assert outcome.status == "finished", outcome.error
    declared = prepared.method.declared
    found = metrics(outcome, prepared.experiment, prepared.plan, declared)
    results = evaluate(prepared.scenario.expect, found, metrics_of(declared))
    assert {result.key for result in results} >= {"tokens_lost"}
    assert [result for result in results if not result.holds] == []


def test_the_method_meets_the_faults_of_the_first_scenario_without_a_word_of_its_spans(
    tmp_path: Path,
) -> None:
    (tmp_path / "ring.py").write_text(blocks("python", METHOD)[0])
    (tmp_path / "mine.yaml").write_text(blocks("yaml")[0])
    changes = [
        "task=infer",
        "epochs=null",
        "requests=61",
        "method={file: ring.py, name: ring}",
    ]
    prepared = prepare(
        trials(
            load(tmp_path / "mine.yaml", [f"workload.{change}" for change in changes])
        )[0]
    )
    assert simulate(prepared, None).status == "finished"
