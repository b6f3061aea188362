"""Concurrent simulations, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from testbed_controller.lab.paths import ROOT

TESTBED = Path(sys.executable).parent / "testbed"
# Long enough to be killed meanwhile.
LONG_RUNS = ("--set", "workload.epochs=10000", "--set", "repetitions=3", "--jobs", "2")


def simulating_processes(session: int) -> list[int]:
    """Return the process ids of simulations in a session."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
            command_line = (stat.parent / "cmdline").read_bytes()
        except OSError:
            # The process has ended meanwhile.
            continue
        # Fields of proc(5) after the program's name: the state is the first one, and the session the fourth.
        fields = text.rpartition(")")[2].split()
        is_zombie = fields[0] == "Z"
        is_simulation = b"spawn_main" in command_line
        if int(fields[3]) == session and is_simulation and not is_zombie:
            pids.append(int(stat.parent.name))
    return pids


def test_simulations_end_with_a_killed_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["run", "quickstart", "--runtime", "simulate", *LONG_RUNS, "--out", out]
    command = subprocess.Popen(
        [TESTBED, *arguments],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    # A new session has the id of its first process.
    session = command.pid
    try:
        start_deadline = time.monotonic() + 60
        while len(list(out.glob("*/plan.json"))) < 2:
            assert command.poll() is None
            assert time.monotonic() < start_deadline
            time.sleep(0.1)
        assert len(simulating_processes(session)) == 2
        command.kill()
        command.wait()
        end_deadline = time.monotonic() + 20
        while simulating_processes(session):
            assert time.monotonic() < end_deadline
            time.sleep(0.1)
    finally:
        for pid in simulating_processes(session):
            os.kill(pid, signal.SIGKILL)
