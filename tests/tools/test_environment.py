"""Installation of the Python environment: supported interpreters and builds of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("failing_check", "error"),
    [
        ("version_info[:2]", "is not Python 3.11 to 3.14"),
        ("releaselevel", "release candidate"),
    ],
    ids=["version", "release candidate"],
)
def test_unsupported_python_is_refused_before_anything_is_installed(
    failing_check: str, error: str, tmp_path: Path
) -> None:
    # A fake interpreter, for which one of the checks (python -c CHECK) fails.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *"{failing_check}"*) exit 1;; esac\n')
    python.chmod(0o755)
    paths = [python, tmp_path / "venv", tmp_path / "stamp"]
    outcome = subprocess.run(
        [ROOT / "images" / "environment", *paths],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert outcome.returncode == 3
    assert error in outcome.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("build", "installs"),
    [
        ("", ["torch==2.13.0+cpu", "-r requirements.lock"]),
        ("cuda", ["-r requirements.lock"]),
    ],
    ids=["default", "cuda"],
)
def test_cpu_build_of_torch_is_installed_unless_cuda_is_requested(
    build: str, installs: list[str], tmp_path: Path
) -> None:
    # The interpreter of the environment is fake, and records its calls. The path has a space, as paths of users may.
    python = tmp_path / "an environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/calls"\n')
    python.chmod(0o755)
    paths = [sys.executable, tmp_path / "an environment", tmp_path / "stamp"]
    environment = {**os.environ, "TESTBED_TORCH": build}
    outcome = subprocess.run(
        [ROOT / "images" / "environment", *paths], cwd=ROOT, env=environment, timeout=60
    )
    assert outcome.returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    install_calls = [call for call in calls if " install " in call]
    # The last call installs the packages of this repository.
    *library_calls, _ = install_calls
    assert len(library_calls) == len(installs)
    for call in library_calls:
        assert call.endswith(tuple(installs))
    assert not install_calls[-1].endswith(tuple(installs))
