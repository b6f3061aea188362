"""A run whose results are stored, as plain data, and the names of results folders."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from testbed.common.errors import InputError
from testbed.experiment import Experiment
from testbed.plan import Plan
from testbed.scenario.expect import Expectation, evaluate
from testbed.scenario.points import point_parts
from testbed.scenario.schema import Trial
from testbed.trace.gantt import run_end
from testbed.trace.log import EventLog
from testbed.trace.metrics_spec import NOTHING, Metric, MetricsSpec
from testbed.trace.outcome import Outcome
from testbed.trace.record import Standstill, pauses
from testbed.trace.registry import metrics_of

LONGEST_NAME = 200
"""Maximum number of characters in the name of a run's folder; file systems allow 255 bytes."""


@dataclass(frozen=True)
class Run:
    """A run as stored in a results folder. The run may have finished, failed, or been interrupted."""

    path: Path
    """Results folder of the run."""
    trial: Trial
    plan: Plan
    outcome: Outcome
    """Outcome without weights."""
    manifest: dict[str, Any]
    """Content of ``manifest.json``: command, versions, status, and more."""
    metrics: dict[str, Any]
    """Content of ``metrics.json`` without expectations."""
    declared: MetricsSpec = NOTHING
    """Metric definitions of the run's method and workload."""

    @property
    def experiment(self) -> Experiment:
        """The facts of the run for a runtime."""
        return self.trial.experiment

    @property
    def expectations(self) -> list[Expectation]:
        """Return the conditions of `expect` with their results. Raises `InputError` for an unknown metric."""
        try:
            return evaluate(
                self.trial.scenario.expect, self.metrics, self.metric_definitions
            )
        except KeyError as error:
            text = f"{self.path}: unknown metric {error} in `expect`: install the package that the run was made with"
            raise InputError(text) from None

    def without_events(self) -> Run:
        """Return the run without events, because the events of all runs of a sweep may exceed the memory."""
        return replace(self, outcome=replace(self.outcome, events=[]))

    @property
    def point(self) -> str:
        """The sweep point as text, equal for all repetitions of the point."""
        return json.dumps(self.trial.point, sort_keys=True, default=str)

    @property
    def metric_definitions(self) -> dict[str, Metric]:
        """All metrics available to the run, by name."""
        return metrics_of(self.declared)

    @property
    def pauses(self) -> list[Standstill]:
        """Pauses of the work without a fault, for example a change of the partition, from events of the method."""
        log = EventLog.made_of(self.outcome.events)
        return pauses(log.within(-math.inf, self.end), self.declared.events)

    @property
    def end(self) -> float:
        """Seconds until the coordinator's program had ended."""
        return run_end(self.outcome.events, self.plan.coordinator)


def run_name(trial: Trial) -> str:
    """Return the folder name of a run, for example ``quickstart`` or ``quickstart,rate=10mbit,repetition=2``."""
    parts = point_parts(trial.point)
    if trial.repetition:
        parts.append(f"repetition={trial.repetition + 1}")
    text = ",".join([trial.scenario.name, *parts])
    # Without characters that have a meaning in a path or in a shell.
    name = re.sub(r"[^\w=,.-]", "_", text)
    if len(name) <= LONGEST_NAME:
        return name
    # The digest keeps apart two names that differ only in the part cut off.
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def run_names(trials: Sequence[Trial]) -> list[str]:
    """Return a different folder name for each run of a sweep.

    `run_name` returns the same name for points with the same label, and for values that differ only in characters such
    as ``/``: a number is then appended to all but the first.
    """
    names: list[str] = []
    counts: dict[str, int] = {}
    for trial in trials:
        name = run_name(trial)
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return names
