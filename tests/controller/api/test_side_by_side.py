"""Runs that are simulated side by side, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from testbed_controller.lab.paths import ROOT

TESTBED = Path(sys.executable).parent / "testbed"
LONG = ("--set", "workload.epochs=10000", "--set", "repetitions=3", "--jobs", "2")


def workers(group: int) -> list[int]:
    """Return the processes of a session that simulate."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts, line = status.read_text(), (status.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it is gone
        fields = facts.rpartition(")")[2].split()
        if int(fields[3]) == group and fields[0] != "Z" and b"spawn_main" in line:
            found.append(int(status.parent.name))
    return found


def test_processes_that_simulate_end_with_the_command_even_if_it_is_killed(
    tmp_path: Path,
) -> None:
    command = [
        TESTBED,
        "run",
        "quickstart",
        "--runtime",
        "simulate",
        *LONG,
        "--out",
        tmp_path / "out",
    ]
    running = subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        begun = time.monotonic() + 60
        while len(list(tmp_path.glob("out/*/plan.json"))) < 2:
            assert running.poll() is None
            assert time.monotonic() < begun
            time.sleep(0.1)
        assert len(workers(running.pid)) == 2
        running.kill()
        running.wait()
        over = time.monotonic() + 20
        while workers(running.pid):
            assert time.monotonic() < over
            time.sleep(0.1)
    finally:
        for each in workers(running.pid):
            os.kill(each, signal.SIGKILL)
