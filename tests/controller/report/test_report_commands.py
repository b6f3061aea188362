"""The commands `testbed compare` and `testbed report`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from testbed.common.errors import InputError
from testbed_controller.cli.report import compare as compare_command
from testbed_controller.cli.report import report as report_command
from tests.controller.report.recorded_runs import load_recorded


def run_compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(compare_command, list(map(str, arguments)))


def run_report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(report_command, list(map(str, arguments)))


def test_compare_writes_terminal_table_page_latex_and_json(tmp_path: Path) -> None:
    emulated = tmp_path / "a"
    simulated = tmp_path / "b"
    load_recorded(emulated)
    load_recorded(simulated, runtime="simulate", links=[], fidelity={})
    # Folders of output files are created.
    page = tmp_path / "out" / "compare.html"
    result = run_compare(emulated, simulated, "--out", page)
    assert result.exit_code == 0, result.output
    assert "step time" in result.output
    assert "emulated and simulated agree" in result.output
    assert "<h1>2 runs side by side</h1>" in page.read_text()
    latex_file = tmp_path / "another" / "table.tex"
    result = run_compare(emulated, simulated, "--latex", latex_file)
    assert result.exit_code == 0, result.output
    assert "step time" in latex_file.read_text()
    result = run_compare(tmp_path, "--json")
    first, second = json.loads(result.stdout)["runs"]
    assert first["label"] == "a"
    assert second["label"] == "b"


def test_comparison_of_single_run_is_refused(tmp_path: Path) -> None:
    load_recorded(tmp_path / "a")
    assert isinstance(run_compare(tmp_path / "a").exception, InputError)


def test_report_restores_missing_files(tmp_path: Path) -> None:
    folder = load_recorded(tmp_path / "a").path
    written = ("metrics.json", "trace.json", "fidelity.json")
    for name in written:
        (folder / name).unlink()
    result = run_report(folder)
    assert result.exit_code == 0, result.output
    assert "Step time" in result.output
    # The page is not written with the run.
    for name in (*written, "report.html"):
        assert (folder / name).is_file()
    assert json.loads(run_report(folder, "--json").stdout)["steps"] == 5


def test_report_of_sweep_is_summary(tmp_path: Path) -> None:
    load_recorded(tmp_path / "a")
    load_recorded(tmp_path / "b")
    result = run_report(tmp_path)
    assert result.exit_code == 0, result.output
    assert "Accuracy (%)" in result.output
    assert (tmp_path / "summary.csv").is_file()
    assert (tmp_path / "sweep.html").is_file()
    summary = json.loads(run_report(tmp_path, "--json").stdout)
    assert summary["points"][0]["runs"] == ["a", "b"]


def test_folder_without_run_is_refused(tmp_path: Path) -> None:
    error = run_report(tmp_path / "nothing").exception
    assert isinstance(error, InputError)
    assert "has no run" in str(error)
