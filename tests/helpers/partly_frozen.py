"""Runs of small networks of which only some weights are trained."""

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
    """Prepare a scenario with another method; devices of a method in rounds share the data."""
    options = dict(method)
    keys = {
        "workload.method": options,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    if in_rounds:
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
    """Simulate to the end."""
    outcome = simulate(
        prepared, load_data(prepared.scenario.workload.data), weights=weights
    )
    assert outcome.status == "finished", outcome.error
    return outcome


def build_whole_model(prepared: Prepared) -> nn.Module:
    """Return the whole network as the run begins with it."""
    problem = prepared.problem
    return problem.model.build(0, len(problem.model.units), problem.seed)
