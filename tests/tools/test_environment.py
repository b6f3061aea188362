"""Which Pythons the environment is made with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("question", "answer"), [("version_info[:2]", "is not Python 3.11 to 3.14"), ("releaselevel", "release candidate")]
)
def test_a_python_that_does_not_do_is_refused_before_anything_is_made(
    question: str, answer: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$2" in *"{question}"*) exit 1;; esac\n')
    python.chmod(0o755)
    made = [python, tmp_path / "venv", tmp_path / "stamp"]
    found = subprocess.run([ROOT / "images" / "environment", *made], capture_output=True, text=True, timeout=60)
    assert found.returncode == 3
    assert answer in found.stderr
    assert not (tmp_path / "venv").exists()
