"""Installation of the Python environment: accepted interpreters and builds of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("version_info[:2]", "is not Python 3.11 to 3.14"),
        ("releaselevel", "release candidate"),
    ],
)
def test_unsupported_python_is_refused_before_anything_is_installed(
    question: str, answer: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *"{question}"*) exit 1;; esac\n')
    python.chmod(0o755)
    paths = [python, tmp_path / "venv", tmp_path / "stamp"]
    outcome = subprocess.run(
        [ROOT / "images" / "environment", *paths],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert outcome.returncode == 3
    assert answer in outcome.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("build", "installs"),
    [
        ("", ["torch==2.13.0+cpu", "-r requirements.lock"]),
        ("cuda", ["-r requirements.lock"]),
    ],
)
def test_cpu_build_of_torch_is_installed_unless_cuda_is_requested(
    build: str, installs: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "an environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >>"{tmp_path}/calls"\n')
    python.chmod(0o755)
    paths = [sys.executable, tmp_path / "an environment", tmp_path / "stamp"]
    environment = {**os.environ, "TESTBED_TORCH": build}
    done = subprocess.run(
        [ROOT / "images" / "environment", *paths], cwd=ROOT, env=environment, timeout=60
    )
    assert done.returncode == 0
    calls = [
        line
        for line in (tmp_path / "calls").read_text().splitlines()
        if " install " in line
    ]
    assert [line for line in calls if line.endswith(tuple(installs))] == calls[:-1]
    assert len(calls) == len(installs) + 1
