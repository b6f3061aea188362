"""The wheel of the project: an installed testbed works in an empty folder, without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed_controller.lab.images import image_tags
from tests.helpers import copy_sources
from tests.helpers.wheels import unpack_wheel

MAIN = "from testbed_controller.cli.main import main; main()"
"""The script `testbed` that pip installs."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the content of the wheel, which is built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_sources(folder / "source")
    content = unpack_wheel(folder / "source", folder)
    shutil.rmtree(folder / "source")
    return content


def run_python(
    installed: Path, folder: Path, *command: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the installed packages in a folder outside the checkout."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def run_testbed(installed: Path, folder: Path, arguments: Sequence[str]) -> None:
    result = run_python(installed, folder, "-c", MAIN, *arguments)
    assert result.returncode == 0, result.stderr


def test_installed_testbed_runs_quickstart_in_working_directory(
    installed: Path, tmp_path: Path
) -> None:
    run_testbed(installed, tmp_path, ["run", "quickstart", "--runtime", "simulate"])
    (results,) = (tmp_path / "results").iterdir()
    assert (results / "report.html").is_file()
    assert json.loads((results / "metrics.json").read_text())["steps"] > 0


def test_installed_testbed_has_methods_and_scenarios_of_papers(
    installed: Path, tmp_path: Path
) -> None:
    # One scenario of each paper.
    scenarios = [
        "papers/stahl-example",
        "papers/ftpipehd-figure-5",
        "papers/pipelearn-table-3",
        "papers/edgepipe-headlines",
        "papers/versatilefl-figure-5",
    ]
    run_testbed(installed, tmp_path, ["validate", *scenarios])


def test_new_study_passes_its_tests(installed: Path, tmp_path: Path) -> None:
    run_testbed(installed, tmp_path, ["init", "my-study"])
    study = tmp_path / "my-study"
    assert {path.name for path in study.iterdir()} == {
        "my-study.yaml",
        "model.py",
        "method.py",
        "test_study.py",
    }
    # The other tests of a study take longer.
    options = ["-q", "-p", "no:cacheprovider", "-k", "same_seed"]
    result = run_python(installed, study, "-m", "pytest", *options)
    assert result.returncode == 0, result.stdout


def test_installed_testbed_uses_images_of_checkout(
    installed: Path, tmp_path: Path
) -> None:
    # Tags are hashes of the sources, hence equal only for equal sources.
    program = (
        "from testbed_controller.lab.images import image_tags; print(image_tags())"
    )
    result = run_python(installed, tmp_path, "-c", program)
    assert result.stdout.strip() == str(image_tags()), result.stderr
    # The status depends on the engine of this machine.
    doctor = run_python(installed, tmp_path, "-c", MAIN, "doctor")
    assert "Traceback" not in doctor.stderr
    assert "python" in doctor.stdout
