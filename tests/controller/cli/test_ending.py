"""The end of a command: without garbage collection, and with a closed output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Functions registered with atexit are called in reverse order, so this one after those of main.
PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count(), len(gc.get_objects())))
sys.argv = ["testbed", "--help"]
from testbed_controller.cli.main import main
main()
"""


def test_objects_are_hidden_from_garbage_collector_at_end() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    frozen, tracked = map(int, process.stdout.splitlines()[-1].split())
    # Imported modules have tens of thousands of objects, which a last collection would visit.
    assert frozen > 1000
    assert tracked < frozen / 100


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "methods"],
        ["show", "--help"],
        # Options of the group itself are parsed before any subcommand is invoked.
        ["--help"],
        ["--version"],
    ],
)
def test_command_with_closed_output_ends_like_other_programs(
    arguments: list[str],
) -> None:
    program = f"""
import sys
from testbed_controller.cli.main import main
sys.argv = ["testbed", *{arguments}]
main()
"""
    # As in `testbed show methods | head -1`: nobody reads from the pipe.
    reader, output = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE
    )
    os.close(output)
    # A shell reports 128 + SIGPIPE (13).
    assert process.returncode == 141
    assert process.stderr == b""
