"""What somebody needs to know to run the same again and to explain a difference."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import testbed
from testbed.scenario.trial import Trial
from testbed.trace.outcome import Outcome
from testbed.workload import WorkloadPart

RUNNING = "running"
"""Status of a run that is not over, or was cut off."""
RECORDED_PACKAGES = ("torch", "numpy", "flask", "cheroot", "requests", "pydantic", "docker", "pyroute2")


def manifest(
    trial: Trial, runtime: Literal["emulate", "simulate"], weights: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what is known as a run begins; its status is ``running``."""
    return {
        "scenario": trial.scenario.name,
        "seed": trial.scenario.seed,
        "point": trial.point,
        "repetition": trial.repetition,
        "runtime": runtime,
        "status": RUNNING,
        "error": None,
        "wall_seconds": 0.0,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "weights": weights or _drawn(trial.scenario.workload),
        "command": shlex.join(["testbed", *sys.argv[1:]]),
        "revision": _revision(),
        "versions": {
            "testbed": testbed.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in RECORDED_PACKAGES},
        },
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "host": {},
    }


def finished(facts: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Return the manifest of a run that began with these ``facts`` and is over."""
    return {
        **facts,
        "status": outcome.status,
        "error": outcome.error,
        "wall_seconds": outcome.wall_seconds,
        "host": outcome.host,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Return the git revision of this code, with a mark when it was changed since; None outside a checkout."""
    home = Path(testbed.__file__).resolve().parent.parent
    if not (home / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _drawn(workload: WorkloadPart) -> str:
    text = "random, drawn from the seed"
    return text if workload.initialisation is None else f"{text} as of {workload.initialisation}"
