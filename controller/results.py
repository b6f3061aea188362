"""What a run leaves on disk, and reading it back.

One folder a run: ``scenario.yaml`` (resolved), ``plan.json``, ``manifest.json``, ``events.jsonl``, ``metrics.json``,
``fidelity.json``, ``trace.json`` (for ui.perfetto.dev), ``weights.safetensors`` where there are any, ``report.html``.
A sweep or repeated run is a folder of such folders with ``summary.json`` and ``summary.csv``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import io
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import testbed
from testbed.methods.base import Plan
from testbed.scenario.experiment import Experiment
from testbed.scenario.schema import Scenario
from testbed.trace.gantt import run_end
from testbed.trace.metrics import finite, metrics
from testbed.trace.outcome import Outcome
from testbed.trace.perfetto import trace

RECORDED_PACKAGES = ("torch", "numpy", "flask", "cheroot", "requests", "pydantic", "docker", "pyroute2")


def write(folder: Path, experiment: Experiment, plan: Plan, outcome: Outcome, *, command: str | None = None) -> Path:
    """Write a run to ``folder``, or beside it with a number when that exists, and return where it is.

    Nothing is to be seen at the final place until all of it is there. ``command`` is what reproduces the run; the
    command line of this process unless given. Raises OSError where the place cannot be written.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    figures = metrics(outcome, experiment, plan)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        # mkdtemp makes the folder private; results are to be read by whoever may read the parent.
        draft.chmod(0o777 & ~_umask())
        (draft / "scenario.yaml").write_text(scenario_yaml(experiment.scenario), encoding="utf-8")
        _write_json(draft / "plan.json", plan.model_dump(mode="json"))
        _write_json(draft / "manifest.json", manifest(experiment, outcome, command))
        with (draft / "events.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(event.to_json() + "\n" for event in outcome.events)
        _write_json(draft / "metrics.json", figures)
        _write_json(draft / "fidelity.json", _fidelity(outcome, figures))
        end = run_end(outcome.events, plan.lead)
        (draft / "trace.json").write_text(json.dumps(trace(outcome.events, end, experiment.scenario.name)))
        if outcome.weights:
            _write_weights(draft / "weights.safetensors", outcome.weights)
        return _publish(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def scenario_yaml(scenario: Scenario) -> str:
    """Return the scenario as YAML with every default spelled out; it loads back equal."""
    text = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 110
    yaml.dump(scenario.model_dump(mode="json", by_alias=True, exclude_none=True), text)
    return text.getvalue()


def manifest(experiment: Experiment, outcome: Outcome, command: str | None = None) -> dict[str, Any]:
    """Return what somebody needs to know to run the same again and to explain a difference."""
    return {
        "scenario": experiment.scenario.name,
        "seed": experiment.scenario.seed,
        "point": experiment.point,
        "repetition": experiment.repetition,
        "runtime": outcome.runtime,
        "status": outcome.status,
        "error": outcome.error,
        "wall_seconds": outcome.wall_seconds,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command if command is not None else shlex.join(["testbed", *sys.argv[1:]]),
        "revision": _revision(),
        "versions": {
            "testbed": testbed.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in RECORDED_PACKAGES},
        },
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "host": outcome.host,
    }


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _publish(draft: Path, folder: Path) -> Path:
    """Rename the finished draft to the first free name."""
    number = 1
    while True:
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        number += 1
        if place.exists() and not _is_empty(place):
            continue
        try:
            # Replaces an empty folder, fails on one that somebody filled since we looked.
            draft.rename(place)
        except OSError:
            if not place.exists():
                raise
            continue
        return place


def _is_empty(place: Path) -> bool:
    return place.is_dir() and not any(place.iterdir())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(finite(value), indent=2, default=str) + "\n", encoding="utf-8")


def _write_weights(path: Path, weights: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    # safetensors refuses tensors that share memory or are not contiguous.
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}, path)


def _fidelity(outcome: Outcome, figures: dict[str, Any]) -> dict[str, Any]:
    links = [
        {
            "source": item.source,
            "destination": item.destination,
            "requested": {
                "rate": item.requested.rate,
                "delay": item.requested.delay,
                "loss": item.requested.loss,
                "up": item.requested.up,
            },
            "rate": item.rate,
            "delay": item.delay,
            "loss": item.loss,
            "packets": item.packets,
            "problem": item.problem,
        }
        for item in outcome.links
    ]
    return {"verdict": figures["verdict"], "figures": outcome.fidelity, "links": links}


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
