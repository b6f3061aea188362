"""Reading results executes no code beside them, and shows the stored metrics of a user's method."""

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
from testbed_controller.results.declared import FILE, declared_in, keep
from testbed_controller.results.files import load, load_metrics, trial_in
from tests.helpers import ROOT, recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of a method in a file, which would leave a file if it were imported again."""
    made = tmp_path_factory.mktemp("results") / "mean"
    scenario = str(ROOT / "scenarios/examples/mean.yaml")
    done = CliRunner().invoke(
        testbed, ["run", scenario, "--runtime", "simulate", "--out", str(made)]
    )
    assert done.exit_code == 0, done.output
    (made / "mean.py").write_text(
        f"from pathlib import Path\nPath({str(made / 'executed')!r}).touch()\n"
    )
    return made


@pytest.mark.parametrize(
    "command", [["report", "."], ["compare", ".", "."], ["validate", "scenario.yaml"]]
)
def test_no_command_that_reads_results_executes_them(
    folder: Path, command: list[str]
) -> None:
    words = [command[0], *(str(folder / word) for word in command[1:])]
    done = CliRunner().invoke(testbed, words)
    assert done.exit_code == 0, done.output
    assert not (folder / "executed").exists()
    if command[0] == "validate":
        assert "not executed" in done.output
    elif command[0] == "report":
        assert "replies that were left out" in done.output


def test_plan_refuses_what_lies_among_results(folder: Path) -> None:
    done = CliRunner().invoke(testbed, ["plan", str(folder / "scenario.yaml")])
    assert "which only 'testbed run' executes" in str(done.exception)
    assert not (folder / "executed").exists()


def test_figures_of_an_own_method_are_those_that_it_computed(folder: Path) -> None:
    written = json.loads((folder / "metrics.json").read_text())
    assert written["late"] >= 2
    assert (
        load(folder).metrics["late"]
        == load_metrics(folder).metrics["late"]
        == written["late"]
    )
    assert all(one.holds for one in load(folder).expectations)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the run."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.mark.parametrize("name", [FILE, "metrics.json"])
@pytest.mark.parametrize("content", [[], [1], "text", None, {"recovery_list": [3]}])
def test_damaged_definitions_count_as_none(
    name: str, content: object, copied: Path
) -> None:
    (copied / name).write_text(json.dumps(content))
    declared = declared_in(copied, trial_in(copied))
    assert declared == NOTHING or name == "metrics.json"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("<5ms_share", 0.25),
        ("cache.<device>", {"a": 1.0, "b": 2.0}),
        ("layers.<layer>.age", {"0": 3.0, "1": 4.0}),
    ],
)
def test_stored_metric_has_the_computed_value(
    name: str, value: object, copied: Path
) -> None:
    trial = trial_in(copied)
    metric = Metric(name, "number", "any value", lambda _: value)  # type: ignore[arg-type, return-value]
    stored = {
        "<5ms_share": 0.25,
        "cache": {"a": 1.0, "b": 2.0},
        "layers": {"0": {"age": 3.0}, "1": {"age": 4.0, "size": 1.0}},
    }
    keep(copied, trial, MetricsSpec((metric,)), stored)
    (copied / "metrics.json").write_text(json.dumps(stored))
    [restored] = declared_in(copied, trial).metrics
    assert restored.compute(recorded.make_record()) == value


def test_names_that_the_testbed_uses_since_are_no_definitions(copied: Path) -> None:
    trial = trial_in(copied)
    metric = Metric("accuracy", "share", "any value", lambda _: 0.5)
    keep(copied, trial, MetricsSpec((metric,)), {})
    assert declared_in(copied, trial) == NOTHING


def test_recoveries_detected_at_one_time_keep_their_own_fields(copied: Path) -> None:
    class RecoveriesOnly:
        recoveries = (Recovery(2.0, resumed=3.0), Recovery(2.0, resumed=4.0))

    items = [{"detected": 2.0, "moved": 1}, {"detected": 2.0, "moved": 2}]
    stored = {"recovery_list": items}
    trial = trial_in(copied)
    keep(copied, trial, MetricsSpec(), stored)
    (copied / "metrics.json").write_text(json.dumps(stored))
    restored = declared_in(copied, trial).recovery
    assert restored is not None
    view: RunView = RecoveriesOnly()  # type: ignore[assignment]
    fields = [restored(item, view) for item in view.recoveries]
    assert fields == [{"moved": 1}, {"moved": 2}]


def test_control_characters_are_shown_and_long_texts_cut() -> None:
    assert escape_control("a\x1b[31mb\tc\n\x07") == "a\\x1b[31mb\tc\n\\x07"
    assert escape_control("é✔") == "é✔"
    assert escape_control("x" * 3000) == "x" * 2000 + "... (1000 more characters)"
