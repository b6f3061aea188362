"""Everything except plots works without matplotlib, which the extra `plots` installs."""

from __future__ import annotations

import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

HINT = "pip install 'edge-testbed[plots]'"
SCENARIO = """
name: small
devices:
  source: {profile: laptop}
workload:
  model: {name: mlp, hidden: [8]}
  data: {name: digits, train: 64, test: 20}
  method: {name: single}
  batch_size: 16
  steps: 4
"""
PROGRAM = """
import sys

sys.modules["matplotlib"] = None  # an import of it now raises ModuleNotFoundError

from click.testing import CliRunner

from testbed_controller.api import open_results
from testbed_controller.cli.main import testbed
from testbed.common.errors import InputError


def call(*arguments):
    print(CliRunner().invoke(testbed, arguments, catch_exceptions=False).output)


def expect_refusal(act, *arguments):
    try:
        act(*arguments)
    except InputError as error:
        assert str(error).count("pip install 'edge-testbed[plots]'") == 1, error
        assert "matplotlib" in str(error), error
    else:
        raise AssertionError(f"{arguments}: not refused")


def export(*arguments):
    result = CliRunner().invoke(testbed, arguments, standalone_mode=False)
    raise result.exception or AssertionError(result.output)


simulated = ("--runtime", "simulate")
call("run", "small.yaml", *simulated, "--out", "one")
call("run", "small.yaml", *simulated, "--out", "two", "--set", "seed=2")
call("run", "small.yaml", *simulated, "--out", "several", "--set", "sweep={seed: [1, 2]}")
call("report", "one")
call("compare", "one", "two", "--out", "compared.html")
expect_refusal(export, "export", "one", "--plots")
expect_refusal(export, "export", "several", "--plots")
expect_refusal(export, "compare", "one", "two", "--plots", "figures")
expect_refusal(open_results("one")[0].plot, "Loss")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with runs, a sweep and a comparison, all made without matplotlib."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "small.yaml").write_text(SCENARIO)
    # In a process of its own, as this one may have imported matplotlib already.
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.parametrize(
    "page", ["one/report.html", "several/sweep.html", "compared.html"]
)
def test_pages_name_missing_extra_instead_of_charts(folder: Path, page: str) -> None:
    text = unescape((folder / page).read_text())
    # Once for all charts of a page.
    assert text.count(HINT) == 1
    assert "<svg" not in text
    # The timeline of a run is drawn by the browser.
    assert (page == "one/report.html") == ('class="gantt"' in text)


def test_refused_plots_leave_no_files(folder: Path) -> None:
    assert not (folder / "one" / "export").exists()
    assert not (folder / "figures").exists()
    assert not list(folder.rglob("*.svg"))
