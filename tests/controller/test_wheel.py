"""The wheel is whole: what pip would install works away from the checkout, in an empty folder."""

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
"""What pip writes into `testbed`."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds what the wheel does, made from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_sources(folder / "source")
    content = unpack_wheel(folder / "source", folder)
    shutil.rmtree(folder / "source")
    return content


def run(installed: Path, here: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of what is installed, in a folder away from the checkout."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "XDG_CACHE_HOME": str(here / "cache"),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )


def command(installed: Path, here: Path, arguments: Sequence[str]) -> str:
    """Run `testbed` and return what it prints."""
    done = run(installed, here, "-c", MAIN, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_testbed_runs_the_quickstart_where_one_stands(
    installed: Path, tmp_path: Path
) -> None:
    command(installed, tmp_path, ["run", "quickstart", "--runtime", "simulate"])
    (results,) = (tmp_path / "results").iterdir()
    assert (results / "report.html").is_file()
    assert json.loads((results / "metrics.json").read_text())["steps"] > 0


def test_an_installed_testbed_has_the_methods_and_scenarios_of_papers(
    installed: Path, tmp_path: Path
) -> None:
    names = (
        "stahl-example",
        "ftpipehd-figure-5",
        "pipelearn-table-3",
        "edgepipe-headlines",
        "versatilefl-figure-5",
    )
    command(installed, tmp_path, ["validate", *(f"papers/{name}" for name in names)])


def test_a_study_of_ones_own_begins_with_what_runs(
    installed: Path, tmp_path: Path
) -> None:
    command(installed, tmp_path, ["init", "my-study"])
    study = tmp_path / "my-study"
    assert {path.name for path in study.iterdir()} == {
        "my-study.yaml",
        "model.py",
        "method.py",
        "test_study.py",
    }
    done = run(
        installed,
        study,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "same_seed",
    )
    assert done.returncode == 0, done.stdout


def test_an_installed_testbed_asks_for_the_images_of_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    done = run(
        installed,
        tmp_path,
        "-c",
        "from testbed_controller.lab.images import image_tags; print(image_tags())",
    )
    assert done.stdout.strip() == str(image_tags()), done.stderr
    doctor = run(installed, tmp_path, "-c", MAIN, "doctor")
    assert "Traceback" not in doctor.stderr
    assert "python" in doctor.stdout
