"""Interruptions of runs on containers, by signals or by a loss of the engine; nothing may remain of a run.

Each seed starts a short run, waits for a random time, and interrupts the run: by SIGINT once, twice or three times,
SIGTERM, SIGHUP, SIGKILL of the controller, SIGKILL of the controller and its reaper (after which `testbed down` must
remove everything), or by an engine that does not respond for some seconds. Violations are containers, networks and
state that remain after `PATIENCE` seconds, tracebacks, unreadable results, and a run that does not end properly after a
loss of the engine.
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
from tools.stress.engineproxy import EngineProxy, proxied

CUT = "engine cut"
TESTBED = [str(Path(sys.executable).with_name("testbed"))]
SCENARIO = Path(__file__).parents[2] / "scenarios" / "smoke" / "pause.yaml"
MAX_DELAY = 25.0
"""Latest interruption, in seconds from the start of the run, which may have finished by then."""
PATIENCE = 40.0
"""Seconds in which the remains of a run must disappear."""
MAX_CUT = 12.0
"""Longest loss of the engine in seconds."""
INTERRUPTIONS: dict[str, Sequence[signal.Signals]] = {
    "SIGINT": [signal.SIGINT],
    "SIGINT twice": [signal.SIGINT] * 2,
    "SIGINT three times": [signal.SIGINT] * 3,
    "SIGTERM": [signal.SIGTERM],
    "SIGHUP": [signal.SIGHUP],
    "SIGKILL": [signal.SIGKILL],
    "SIGKILL of both": [signal.SIGKILL],
    CUT: [],
}
"""Kinds of interruptions, each with the signals for the controller. "SIGKILL of both" kills the reaper as well."""


def draw_interruption(seed: int) -> tuple[str, float, float]:
    """Draw an interruption of a run.

    Returns the kind, the seconds until the interruption, and the seconds between signals or without engine.
    """
    draw = random.Random(seed)
    kind = draw.choice(list(INTERRUPTIONS))
    after = draw.uniform(0.5, MAX_DELAY)
    gap = draw.uniform(0.05, 1.5)
    if kind == CUT:
        gap = MAX_CUT * gap / 1.5
    return kind, after, gap


def find_violations(kind: str, after: float, gap: float) -> list[str]:
    """Interrupt a run and return the violations; see `draw_interruption` for the arguments."""
    with tempfile.TemporaryDirectory() as folder, proxied(Path(folder)) as proxy:
        # A separate state folder, so that other runs are neither interrupted nor counted.
        os.environ["XDG_STATE_HOME"] = folder
        results = Path(folder) / "results"
        status, output, remains = _interrupt_run(proxy, Path(folder), kind, after, gap)
        violations = list(remains)
        if "Traceback" in output:
            violations.append("a traceback")
        summary = ""
        if (results / "manifest.json").exists():
            try:
                summary = files.load(results).metrics["verdict"]["summary"]
            except TestbedError as error:
                violations.append(f"results: {error}")
        if kind == CUT and not _has_ended_well(status, output, summary):
            violations.append(f"status {status}: {output[-500:]}")
        return [f"left: {each}" for each in violations]


def _interrupt_run(
    proxy: EngineProxy, folder: Path, kind: str, after: float, gap: float
) -> tuple[int, str, list[str]]:
    """Interrupt a new run; return exit status and output of the command, and the remains of all runs."""
    command = [*TESTBED, "run", str(SCENARIO), "--accept-links"]
    command += ["--out", str(folder / "results")]
    environment = None
    if kind == CUT:
        environment = {**os.environ, "DOCKER_HOST": proxy.address}
    with (folder / "output").open("w+") as output:
        run = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
        with suppress(subprocess.TimeoutExpired):
            run.wait(after)
        runs = set(runstate.runs())
        if kind == CUT:
            proxy.cut()
            time.sleep(gap)
            proxy.mend()
        _send_signals(run, kind, gap)
        status = run.wait()
        # A run that was created after the interruption.
        runs |= set(runstate.runs())
        if kind == "SIGKILL of both":
            for name in runs:
                down = [*TESTBED, "down", name]
                subprocess.run(down, stdout=output, stderr=output, check=False)
        remains = _find_remains(runs | set(runstate.runs()))
        output.seek(0)
        return status, output.read(), remains


def _has_ended_well(status: int, output: str, summary: str) -> bool:
    """Return whether a run with a temporary loss of the engine ended correctly."""
    if status == 0:
        return True
    # Before the run has started, the command can only report the missing engine.
    if status == HostError.exit_code and "no Docker engine responds" in output:
        return True
    # A pause lasts until the engine responds again, so the method may recover, which the scenario does not expect.
    is_unmet = status == ExpectationError.exit_code
    return is_unmet and "longer than it should" in summary


def _send_signals(run: subprocess.Popen[bytes], kind: str, gap: float) -> None:
    """Send the signals to a run in progress, and for "SIGKILL of both" to the reaper as well."""
    # The reaper first: it would remove the run as soon as the controller dies.
    if kind == "SIGKILL of both":
        for path in Path(f"/proc/{run.pid}/task").glob("*/children"):
            for child in path.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
    for number in INTERRUPTIONS[kind]:
        if run.poll() is None:
            run.send_signal(number)
            time.sleep(gap)


def _find_remains(runs: set[str]) -> list[str]:
    """Return the remains of runs after at most `PATIENCE` seconds."""
    client = connect()
    until = time.monotonic() + PATIENCE
    while True:
        remains = [f"{each} on the engine" for each in labelled_runs(client) & runs]
        remains += [f"{each}'s state" for each in runstate.runs()]
        if not remains or time.monotonic() > until:
            return remains
        time.sleep(0.5)
