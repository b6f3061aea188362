"""Stored definitions of user-defined metrics: results are read without executing code beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common.formats import escape_control
from testbed.trace.disturbances import Recovery
from testbed.trace.metrics_spec import NOTHING, Metric, MetricsSpec
from testbed.trace.record import RunView
from testbed_controller.cli.main import testbed
from testbed_controller.results.declared import (
    FILE,
    load_metrics_spec,
    store_metrics_spec,
)
from testbed_controller.results.files import load, load_metrics, trial_in
from tests.helpers import ROOT, recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a user-defined method; changed code beside the results writes a file when imported."""
    folder = tmp_path_factory.mktemp("results") / "mean"
    scenario = str(ROOT / "scenarios/examples/mean.yaml")
    arguments = ["run", scenario, "--runtime", "simulate", "--out", str(folder)]
    result = CliRunner().invoke(testbed, arguments)
    assert result.exit_code == 0, result.output
    code = f"from pathlib import Path\nPath({str(folder / 'executed')!r}).touch()\n"
    (folder / "mean.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    "command", [["report", "."], ["compare", ".", "."], ["validate", "scenario.yaml"]]
)
def test_commands_that_read_results_execute_no_code_beside_them(
    folder: Path, command: list[str]
) -> None:
    name, *files = command
    paths = [str(folder / file) for file in files]
    result = CliRunner().invoke(testbed, [name, *paths])
    assert result.exit_code == 0, result.output
    assert not (folder / "executed").exists()
    if name == "validate":
        assert "not executed" in result.output
    elif name == "report":
        # A metric of the method.
        assert "replies that were left out" in result.output


def test_plan_refuses_code_in_folder_of_results(folder: Path) -> None:
    # A plan would execute the code of the method.
    result = CliRunner().invoke(testbed, ["plan", str(folder / "scenario.yaml")])
    assert "which only 'testbed run' executes" in str(result.exception)
    assert not (folder / "executed").exists()


def test_metrics_of_user_defined_method_are_restored(folder: Path) -> None:
    late = json.loads((folder / "metrics.json").read_text())["late"]
    assert late >= 2
    run = load(folder)
    assert run.metrics["late"] == late
    assert load_metrics(folder).metrics["late"] == late
    for expectation in run.expectations:
        assert expectation.holds


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, which a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.mark.parametrize("name", [FILE, "metrics.json"])
@pytest.mark.parametrize("content", [[], [1], "text", None, {"recovery_list": [3]}])
def test_damaged_definitions_are_ignored(
    name: str, content: object, copied: Path
) -> None:
    (copied / name).write_text(json.dumps(content))
    declared = load_metrics_spec(copied, trial_in(copied))
    # Damaged values leave the definitions valid.
    assert declared == NOTHING or name == "metrics.json"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("<5ms_share", 0.25),
        ("cache.<device>", {"a": 1.0, "b": 2.0}),
        ("layers.<layer>.age", {"0": 3.0, "1": 4.0}),
    ],
)
def test_stored_metric_has_computed_value(
    name: str, value: object, copied: Path
) -> None:
    trial = trial_in(copied)
    metric = Metric(name, "number", "any value", lambda _: value)  # type: ignore[arg-type, return-value]
    # Placeholders in angle brackets stand for names; other angle brackets belong to the name.
    stored = {
        "<5ms_share": 0.25,
        "cache": {"a": 1.0, "b": 2.0},
        "layers": {"0": {"age": 3.0}, "1": {"age": 4.0, "size": 1.0}},
    }
    store_metrics_spec(copied, trial, MetricsSpec((metric,)), stored)
    (copied / "metrics.json").write_text(json.dumps(stored))
    [restored] = load_metrics_spec(copied, trial).metrics
    assert restored.compute(recorded.make_record()) == value


def test_definitions_with_names_of_testbed_metrics_are_ignored(copied: Path) -> None:
    # A later version of the testbed may have a metric with the same name.
    trial = trial_in(copied)
    metric = Metric("accuracy", "share", "any value", lambda _: 0.5)
    store_metrics_spec(copied, trial, MetricsSpec((metric,)), {})
    assert load_metrics_spec(copied, trial) == NOTHING


def test_simultaneous_recoveries_keep_their_fields(copied: Path) -> None:
    class RecoveriesOnly:
        recoveries = (Recovery(2.0, resumed=3.0), Recovery(2.0, resumed=4.0))

    items = [{"detected": 2.0, "moved": 1}, {"detected": 2.0, "moved": 2}]
    stored = {"recovery_list": items}
    trial = trial_in(copied)
    store_metrics_spec(copied, trial, MetricsSpec(), stored)
    (copied / "metrics.json").write_text(json.dumps(stored))
    restored = load_metrics_spec(copied, trial).recovery
    assert restored is not None
    view: RunView = RecoveriesOnly()  # type: ignore[assignment]
    fields = [restored(item, view) for item in view.recoveries]
    assert fields == [{"moved": 1}, {"moved": 2}]


def test_control_characters_are_escaped_and_long_texts_cut() -> None:
    # \x1b[31m would colour the terminal, \x07 would ring its bell.
    assert escape_control("a\x1b[31mb\tc\n\x07") == "a\\x1b[31mb\tc\n\\x07"
    assert escape_control("é✔") == "é✔"
    assert escape_control("x" * 3000) == "x" * 2000 + "... (1000 more characters)"
