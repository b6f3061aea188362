"""The table in docs/from-torch.md that compares the weights of split and undivided training."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT

MODEL_FILE = """
from torch import nn

def network(shape, classes, extra="none"):
    def block(inputs, outputs):
        extras = {"none": [], "normalisation": [nn.BatchNorm1d(outputs)], "dropout": [nn.Dropout(0.2)]}
        return nn.Sequential(nn.Linear(inputs, outputs), *extras[extra], nn.Tanh())
    return nn.Sequential(nn.Flatten(), block(64, 24), block(24, 20), block(20, 16), nn.Linear(16, classes))
"""
SCENARIO = """
name: equality
seed: 3
devices: {{a: {{speed: 1gflops}}, b: {{speed: 1gflops, count: {workers}}}}}
network: {{topology: mesh, link: {{rate: 50mbit, delay: 2ms}}}}
workload:
  task: train
  model: {{name: network, file: own.py, extra: {extra}}}
  data: {{name: digits, train: 96, test: 32, split: {split}}}
  method: {{{method}}}
  batch_size: 16
  steps: 6
  training: {training}
"""
# Title of a column, method and number of workers.
METHODS = {
    "`pipeline`, 1 micro-batch": (
        "name: pipeline, micro_batches: 1, partition: even",
        2,
    ),
    "`pipeline`, 4": ("name: pipeline, micro_batches: 4, partition: even", 2),
    "`gpipe`, 4": ("name: gpipe, micro_batches: 4, partition: even", 2),
    "`federated`, 1 device": ("name: federated, local_steps: 3", 1),
    "`split-learning`, 1 device": ("name: split-learning, split_point: 2", 1),
    "`pipelearn`, 1 device, `parallel_batches: 4`": (
        "name: pipelearn, split_point: 2, parallel_batches: 4",
        1,
    ),
    "`pipedream`": ("name: pipedream", 2),
}
# Title of a row, additional layer and training options.
FEATURES = {
    "plain SGD": ("none", "{}"),
    "momentum": ("none", "{optimizer: {momentum: 0.9}}"),
    "Adam": ("none", "{optimizer: {name: adam}}"),
    "clipping by norm": ("none", "{clip: {norm: 0.3}}"),
    "clipping by value": ("none", "{clip: {value: 0.01}}"),
    "dropout": ("dropout", "{}"),
    "batch normalisation": ("normalisation", "{}"),
}
LOCAL_DATA_METHODS = ("federated", "split-learning", "pipelearn")
"""Methods whose devices train on their own samples."""
MAX_ROUNDING_ERROR = 1e-5


@cache
def trained_weights(
    folder: Path, method: str, workers: int, feature: str
) -> dict[str, torch.Tensor] | None:
    """Return the final weights of a method; None if the method does not support the feature."""
    extra, training = FEATURES[feature]
    has_local_data = any(f"name: {name}" in method for name in LOCAL_DATA_METHODS)
    scenario = SCENARIO.format(
        workers=workers,
        extra=extra,
        split="iid" if has_local_data else "coordinator",
        method=method,
        training=training,
    )
    (folder / "own.py").write_text(MODEL_FILE)
    (folder / "scenario.yaml").write_text(scenario)
    (trial,) = trials(load(str(folder / "scenario.yaml"), []))
    try:
        prepared = prepare(trial)
    except InputError as error:
        if "does not support this" not in str(error):
            raise
        return None
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome.weights


def compare_with_undivided(
    folder: Path, method: str, workers: int, feature: str
) -> str:
    """Return the text of a cell of the table."""
    undivided = trained_weights(folder, "name: single", 1, feature)
    weights = trained_weights(folder, method, workers, feature)
    assert undivided is not None
    if weights is None:
        return "refused"
    assert weights.keys() == undivided.keys()
    max_difference = 0.0
    for name, tensor in undivided.items():
        difference = (weights[name].double() - tensor.double()).abs().max()
        max_difference = max(max_difference, float(difference))
    if max_difference == 0:
        return "equal"
    return "round-off" if max_difference <= MAX_ROUNDING_ERROR else "differs"


@pytest.mark.timeout(300)
def test_table_of_equality_is_reproduced(tmp_path):
    lines = [f"| | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    for feature in FEATURES:
        cells = [feature]
        for method, workers in METHODS.values():
            cells.append(compare_with_undivided(tmp_path, method, workers, feature))
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    page = (ROOT / "docs" / "from-torch.md").read_text()
    assert table in page, f"the table is now\n{table}"
