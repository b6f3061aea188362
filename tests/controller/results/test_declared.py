"""Reading results executes nothing that lies beside them, and shows what a method of one's own said of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from testbed.common.formats import escape_control
from testbed_controller.cli.main import testbed
from testbed_controller.results.files import load, load_metrics
from tests.helpers import ROOT


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


def test_control_characters_are_shown_and_long_texts_cut() -> None:
    assert escape_control("a\x1b[31mb\tc\n\x07") == "a\\x1b[31mb\tc\n\\x07"
    assert escape_control("é✔") == "é✔"
    assert escape_control("x" * 3000) == "x" * 2000 + "... (1000 more characters)"
