"""What a command does not need, it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "command", [["validate", "quickstart"], ["plan", "quickstart"]]
)
def test_planning_loads_nothing_heavy(command: list[str]) -> None:
    program = (
        "import sys; from testbed_controller.cli.main import testbed\n"
        f"testbed.main({command!r}, standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'docker')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_planning_a_pipeline_loads_nothing_that_runs_it() -> None:
    program = (
        "import sys; from testbed.methods import METHODS\n"
        "for name in ('pipeline', 'gpipe', 'ftpipehd', 'pipedream', 'respipe', 'sequential'): METHODS[name]\n"
        "sys.exit(any(name in sys.modules for name in ('asyncio', 'testbed.messaging.mailbox')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
