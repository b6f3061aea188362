"""Comparison of both clocks: a short figure of each paper, run in containers and simulated.

The values are stored in ``containers.json`` beside ``figures.yaml``, whose entry `Containers` names the scenario.
"""

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
"""Changes that remove the expectations: a run that misses one would fail, although its times can be compared."""


@dataclass(frozen=True)
class Clocks:
    """The metrics of one scenario on both clocks, with their provenance."""

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


def measure_clocks(folder: Path, short_figure: Containers) -> Clocks:
    """Run the scenario in containers and simulated, and store the values.

    Raises `InputError` if a run fails or does not finish. A verdict of ``not trusted`` is stored and shown, since the
    ratio then describes the host.
    """
    # Simulated first, to find a mistake in the scenario before the longer run in containers.
    simulated = _run_once(folder, short_figure, "simulate")
    emulated = _run_once(folder, short_figure, "emulate")
    manifest = emulated.run.manifest
    command = compose_command(
        f"papers/{short_figure.scenario}", short_figure.changes, "emulate"
    )
    clocks = Clocks(
        containers=_metrics(emulated, short_figure),
        simulated=_metrics(simulated, short_figure),
        verdict=emulated.run.metrics["verdict"]["kind"],
        date=manifest["date"][:10],
        processor=processor_name(),
        revision=manifest["revision"],
        command=shlex.join(command),
    )
    text = json.dumps(vars(clocks), indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text + "\n", encoding="utf-8")
    return clocks


def _run_once(folder: Path, short_figure: Containers, runtime: str) -> testbed.Result:
    """Run the scenario on one clock, without the results of an earlier call."""
    results_folder = RUNS / f"{short_figure.scenario}-{runtime}"
    shutil.rmtree(results_folder, ignore_errors=True)
    file = folder / "scenarios" / f"{short_figure.scenario}.yaml"
    changes = {**short_figure.changes, **WITHOUT_EXPECTATIONS}
    run_scenario(file, changes, results_folder, runtime)
    (result,) = testbed.open_results(results_folder)
    if result.run.outcome.status != "finished":
        raise InputError(
            f"{results_folder}: the run did not finish; its report names the reason"
        )
    return result


def _metrics(result: testbed.Result, short_figure: Containers) -> dict[str, float]:
    """Return the compared metrics of a run; raises `InputError` for a run lacking a metric."""
    values = {}
    for name in short_figure.metrics:
        value = metric_of(result, name)
        if value is None:
            raise InputError(f"{result.path}: the run has no metric '{name}'")
        values[name] = value
    return values
