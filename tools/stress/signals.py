"""Runs on containers are ended by signals at random instants, or have no engine for a while, and must leave nothing.

Each seed starts a short run, waits for a random time, and sends what its draw says: SIGINT once, twice or three times,
SIGTERM, SIGHUP, SIGKILL of the controller, or of the controller and its reaper together, after which `testbed down` has
to find everything; or the engine does not answer for some seconds. A violation is what the engine or the state folder
still holds `PATIENCE` seconds later, a traceback, a results folder that cannot be read, or a run without its engine for
a while that does not end as it should.
"""

from __future__ import annotations

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

from testbed.common.errors import ExpectationError, HostError, TestbedError
from testbed_controller.lab import runstate
from testbed_controller.lab.engine import connect
from testbed_controller.lab.removal import labelled_runs
from testbed_controller.results import files
from tools.stress.engineproxy import proxied

CUT = "engine cut"
TESTBED = [str(Path(sys.executable).with_name("testbed"))]
SCENARIO = Path(__file__).parents[2] / "scenarios" / "smoke" / "pause.yaml"
LONGEST = 25.0
"""Seconds after its start at which a run is struck, at most: it may be over by then."""
PATIENCE = 40.0
LONGEST_CUT = 12.0
"""Seconds."""
WAYS: dict[str, Sequence[signal.Signals]] = {
    "SIGINT": [signal.SIGINT],
    "SIGINT twice": [signal.SIGINT] * 2,
    "SIGINT three times": [signal.SIGINT] * 3,
    "SIGTERM": [signal.SIGTERM],
    "SIGHUP": [signal.SIGHUP],
    "SIGKILL": [signal.SIGKILL],
    "SIGKILL of both": [signal.SIGKILL],
    CUT: [],
}


def drawn(seed: int) -> tuple[str, float, float]:
    """Return the way of a seed, after how many seconds it strikes, and how many lie between its signals."""
    draw = random.Random(seed)
    way, after, gap = (
        draw.choice(list(WAYS)),
        draw.uniform(0.5, LONGEST),
        draw.uniform(0.05, 1.5),
    )
    return way, after, LONGEST_CUT * gap / 1.5 if way == CUT else gap


def violations(way: str, after: float, gap: float) -> list[str]:
    """Strike one run; return what is wrong then."""
    with tempfile.TemporaryDirectory() as folder, proxied(Path(folder)) as proxy:
        os.environ["XDG_STATE_HOME"] = (
            folder  # no run of anybody else's is counted, nor struck
        )
        results = Path(folder) / "results"
        command = [
            *TESTBED,
            "run",
            str(SCENARIO),
            "--accept-links",
            "--out",
            str(results),
        ]
        environment = (
            {**os.environ, "DOCKER_HOST": proxy.address} if way == CUT else None
        )
        with (Path(folder) / "said").open("w+") as said:
            run = subprocess.Popen(
                command,
                stdout=said,
                stderr=said,
                start_new_session=True,
                env=environment,
            )
            with suppress(subprocess.TimeoutExpired):
                run.wait(after)
            known = set(runstate.runs())
            if way == CUT:
                proxy.cut()
                time.sleep(gap)
                proxy.mend()
            _strike(run, way, gap)
            ended = run.wait()
            if way == "SIGKILL of both":
                for each in known | set(runstate.runs()):
                    subprocess.run(
                        [*TESTBED, "down", each], stdout=said, stderr=said, check=False
                    )
            wrong = _left(known | set(runstate.runs()))
            said.seek(0)
            text = said.read()
            wrong += ["a traceback"] if "Traceback" in text else []
            # Before a run has begun, that there is no engine is all there is to say.
            well = ended == 0 or (
                ended == HostError.exit_code and "no Docker engine responds" in text
            )
        if (results / "manifest.json").exists():
            try:
                summary = files.load(results).metrics["verdict"]["summary"]
            except TestbedError as error:
                wrong.append(f"results: {error}")
            else:
                # A pause that the engine was to end lasts until it answers: the method may recover, unlike expected.
                well |= (
                    ended == ExpectationError.exit_code
                    and "longer than it should" in summary
                )
        wrong += [f"status {ended}: {text[-500:]}"] if way == CUT and not well else []
        return [f"left: {each}" for each in wrong]


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
