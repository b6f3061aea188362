"""Runs of small networks with some frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from testbed.ml.data import load as load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from testbed_controller.api import load


def prepare_with(
    file: Path,
    method: Mapping[str, Any],
    changes: Mapping[str, Any],
    *,
    in_rounds: bool,
) -> Prepared:
    """Prepare a scenario file with another method; ``__`` in the keys of ``changes`` stands for a dot."""
    options = dict(method)
    keys: dict[str, Any] = {"workload.method": options}
    for key, value in changes.items():
        keys[key.replace("__", ".")] = value
    if in_rounds:
        # In rounds, devices own the data.
        keys["workload.data"] = {
            "name": "digits",
            "train": 96,
            "test": 40,
            "split": "iid",
        }
        options |= {"local_steps": 2}
    (trial,) = trials(load(file, keys))
    return prepare(trial)


def run_simulated(prepared: Prepared, weights: Any = None) -> Outcome:
    data = load_data(prepared.scenario.workload.data)
    outcome = simulate(prepared, data, weights=weights)
    assert outcome.status == "finished", outcome.error
    return outcome


def build_whole_model(prepared: Prepared) -> nn.Module:
    """Return the undivided network with the initial weights of the run."""
    problem = prepared.problem
    return problem.model.build(0, len(problem.model.units), problem.seed)
