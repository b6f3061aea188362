"""A command ends at once: what it imported is not looked through once more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count(), len(gc.get_objects())))  # called after what main registers
sys.argv = ["testbed", "--help"]
from testbed_controller.cli.main import main
main()
"""


def test_nothing_is_left_to_the_garbage_collector_at_the_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    kept, left = map(int, ended.stdout.splitlines()[-1].split())
    assert kept > 1000
    assert left < kept / 100


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
def test_command_whose_output_nobody_reads_ends_like_other_programs(
    arguments: list[str],
) -> None:
    program = f"""
import sys
from testbed_controller.cli.main import main
sys.argv = ["testbed", *{arguments}]
main()
"""
    unread, output = os.pipe()
    os.close(unread)
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE
    )
    os.close(output)
    assert (ended.returncode, ended.stderr) == (141, b"")
