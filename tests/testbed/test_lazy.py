"""Modules that planning commands must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process, since the process of the tests has imported the modules already."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_planning_command_imports_no_large_library(command: str) -> None:
    program = (
        "import sys; from testbed_controller.cli.main import testbed\n"
        f"testbed.main([{command!r}, 'quickstart'], standalone_mode=False)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'docker')))"
    )
    process = run_python(program)
    assert process.returncode == 0, process.stderr


def test_pipeline_methods_import_no_messaging_before_run() -> None:
    program = (
        "import sys; from testbed.methods import METHODS\n"
        "for name in ('pipeline', 'gpipe', 'ftpipehd', 'pipedream', 'respipe', 'sequential'): METHODS[name]\n"
        "sys.exit(any(name in sys.modules for name in ('asyncio', 'testbed.messaging.mailbox')))"
    )
    process = run_python(program)
    assert process.returncode == 0, process.stderr
