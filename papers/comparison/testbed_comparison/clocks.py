"""A short figure of each paper on both clocks: in containers and simulated, stored in ``containers.json``."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import testbed
from testbed import InputError
from testbed.ml.kernels import processor_name
from testbed_comparison.results import RUNS, compose_command, metric_of, run_scenario
from testbed_comparison.rows import Containers

FILE = "containers.json"
WITHOUT_EXPECTATIONS: dict[str, Any] = {"expect": {}}
"""Changes without which a run fails if its expectation does not hold, although its times can still be compared."""


@dataclass(frozen=True)
class Clocks:
    """The values of one scenario on both clocks, with their provenance."""

    containers: Mapping[str, float]
    simulated: Mapping[str, float]
    verdict: str
    """Verdict of the run in containers; ``not trusted`` if the host was too slow for the emulation."""
    date: str
    processor: str
    revision: str
    command: str

    def ratio(self, metric: str) -> float:
        """Return the value in containers divided by the simulated one."""
        return self.containers[metric] / self.simulated[metric]


def load_clocks(folder: Path) -> Clocks | None:
    """Return the kept values of a system; None before the first measurement.

    >>> load_clocks(Path("papers/ftpipehd")).verdict
    'trusted'
    """
    file = folder / FILE
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    return Clocks(**values)


def measure_clocks(folder: Path, wanted: Containers) -> Clocks:
    """Run the scenario in containers and simulated, and store the values.

    Raises `InputError` if a run fails or does not finish. A verdict of ``not trusted`` is stored and shown, since the
    ratio then describes the host.
    """
    # Simulated first: a mistake in the scenario shows before the longer run in containers.
    simulated = _run_once(folder, wanted, "simulate")
    emulated = _run_once(folder, wanted, "emulate")
    manifest = emulated.run.manifest
    command = compose_command(f"papers/{wanted.scenario}", wanted.changes, "emulate")
    clocks = Clocks(
        containers=_metrics(emulated, wanted),
        simulated=_metrics(simulated, wanted),
        verdict=emulated.run.metrics["verdict"]["kind"],
        date=manifest["date"][:10],
        processor=processor_name(),
        revision=manifest["revision"],
        command=shlex.join(command),
    )
    text = json.dumps(vars(clocks), indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")
    return clocks


def _run_once(folder: Path, wanted: Containers, runtime: str) -> testbed.Result:
    """Run the scenario anew on one clock."""
    runs = RUNS / f"{wanted.scenario}-{runtime}"
    shutil.rmtree(runs, ignore_errors=True)
    file = folder / "scenarios" / f"{wanted.scenario}.yaml"
    changes = {**wanted.changes, **WITHOUT_EXPECTATIONS}
    run_scenario(file, changes, runs, runtime)
    (result,) = testbed.open_results(runs)
    if result.run.outcome.status != "finished":
        raise InputError(f"{runs}: the run did not finish; its report names the reason")
    return result


def _metrics(result: testbed.Result, wanted: Containers) -> dict[str, float]:
    """Return the compared metrics of a run; raises `InputError` for a run without one of them."""
    values = {}
    for name in wanted.metrics:
        value = metric_of(result, name)
        if value is None:
            raise InputError(f"{result.path}: the run has no metric '{name}'")
        values[name] = value
    return values
