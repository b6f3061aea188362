"""What a command does not need, it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", [["validate", "quickstart"], ["plan", "quickstart"]])
def test_planning_loads_neither_torch_nor_matplotlib(command: list[str]) -> None:
    program = (
        "import sys; from controller.cli.main import testbed\n"
        f"testbed.main({command!r}, standalone_mode=False)\n"
        "sys.exit(', '.join(name for name in ('torch', 'matplotlib') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
