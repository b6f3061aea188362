"""`python -m tools.stress.signals`: runs on containers are ended by signals at random instants, and must leave nothing.

Each round starts a short run, waits for a random time, and sends what its draw says: SIGINT once, twice or three times,
SIGTERM, SIGHUP, SIGKILL of the controller, or of the controller and its reaper together, after which `testbed down` has
to find everything. A violation is what the engine or the state folder still holds `PATIENCE` seconds later, a
traceback, or a results folder that cannot be read.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from controller.lab import runstate
from controller.lab.engine import connect
from controller.lab.removal import labelled_runs
from controller.results import files
from testbed.common.errors import TestbedError

TESTBED = [str(Path(sys.executable).with_name("testbed"))]
SCENARIO = Path(__file__).parents[2] / "scenarios" / "smoke" / "pause.yaml"
LONGEST = 25.0
"""Seconds after its start at which a run is struck, at most: it may be over by then."""
PATIENCE = 40.0
WAYS: dict[str, Sequence[signal.Signals]] = {
    "SIGINT": [signal.SIGINT],
    "SIGINT twice": [signal.SIGINT] * 2,
    "SIGINT three times": [signal.SIGINT] * 3,
    "SIGTERM": [signal.SIGTERM],
    "SIGHUP": [signal.SIGHUP],
    "SIGKILL": [signal.SIGKILL],
    "SIGKILL of both": [signal.SIGKILL],
}


def main() -> int:
    """Attack for some seconds; end with 1 where something was left or lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw, until, rounds, violations = random.Random(options.seed), time.monotonic() + options.seconds, 0, 0
    print(f"seed {options.seed}", flush=True)
    while time.monotonic() < until:
        way, after = draw.choice(list(WAYS)), draw.uniform(0.5, LONGEST)
        gap = draw.uniform(0.05, 1.5)
        found = attack(way, after, gap)
        rounds, violations = rounds + 1, violations + bool(found)
        print(f"{rounds}: {way} after {after:.1f} s, {gap:.2f} s apart: {found or 'nothing left'}", flush=True)
    print(f"{rounds} rounds, {violations} violations")
    return 1 if violations else 0


def attack(way: str, after: float, gap: float) -> str:
    """Strike one run; say what is wrong then."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder  # no run of anybody else's is counted, nor struck
        results = Path(folder) / "results"
        command = [*TESTBED, "run", str(SCENARIO), "--accept-links", "--out", str(results)]
        with (Path(folder) / "said").open("w+") as said:
            run = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
            with suppress(subprocess.TimeoutExpired):
                run.wait(after)
            known = set(runstate.runs())
            _strike(run, way, gap)
            run.wait()
            if way == "SIGKILL of both":
                for each in known | set(runstate.runs()):
                    subprocess.run([*TESTBED, "down", each], stdout=said, stderr=said, check=False)
            wrong = _left(known | set(runstate.runs()))
            said.seek(0)
            wrong += ["a traceback"] if "Traceback" in said.read() else []
        if (results / "manifest.json").exists():
            try:
                files.load(results)
            except TestbedError as error:
                wrong.append(f"results: {error}")
        return ", ".join(wrong)


def _strike(run: subprocess.Popen[bytes], way: str, gap: float) -> None:
    """Send the signals to a run that goes on, and to its reaper where both are meant."""
    if way == "SIGKILL of both":
        for path in Path(f"/proc/{run.pid}/task").glob("*/children"):
            for child in path.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
    for number in WAYS[way]:
        if run.poll() is None:
            run.send_signal(number)
            time.sleep(gap)


def _left(runs: set[str]) -> list[str]:
    """Return what is still there of these runs after some time."""
    client, until = connect(), time.monotonic() + PATIENCE
    while True:
        left = [f"{each} on the engine" for each in labelled_runs(client) & runs]
        left += [f"{each}'s state" for each in runstate.runs()]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
