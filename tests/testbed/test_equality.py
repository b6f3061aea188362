"""What splitting a training changes in its result: every cell of the table in docs/from-torch.md, by running it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT

NETWORKS = """
from torch import nn

def network(shape, classes, extra="none"):
    def block(entering, leaving):
        extras = {"none": [], "normalisation": [nn.BatchNorm1d(leaving)], "dropout": [nn.Dropout(0.2)]}
        return nn.Sequential(nn.Linear(entering, leaving), *extras[extra], nn.Tanh())
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
FEATURES = {
    "plain SGD": ("none", "{}"),
    "momentum": ("none", "{optimizer: {momentum: 0.9}}"),
    "Adam": ("none", "{optimizer: {name: adam}}"),
    "clipping by norm": ("none", "{clip: {norm: 0.3}}"),
    "clipping by value": ("none", "{clip: {value: 0.01}}"),
    "dropout": ("dropout", "{}"),
    "batch normalisation": ("normalisation", "{}"),
}
DEVICES = ("federated", "split-learning", "pipelearn")


@cache
def trained(folder: Any, method: str, workers: int, feature: str) -> Any:
    """Return the weights that a method leaves; None where it refuses."""
    extra, training = FEATURES[feature]
    split = (
        "iid" if any(f"name: {each}" in method for each in DEVICES) else "coordinator"
    )
    keys = {
        "workers": workers,
        "extra": extra,
        "split": split,
        "method": method,
        "training": training,
    }
    (folder / "own.py").write_text(NETWORKS)
    (folder / "scenario.yaml").write_text(SCENARIO.format(**keys))
    try:
        prepared = prepare(trials(load(str(folder / "scenario.yaml"), []))[0])
    except InputError as error:
        if "does not support this" not in str(error):
            raise
        return None
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome.weights


def compared(folder: Any, method: str, workers: int, feature: str) -> str:
    expected, found = (
        trained(folder, "name: single", 1, feature),
        trained(folder, method, workers, feature),
    )
    if found is None:
        return "refused"
    assert found.keys() == expected.keys()
    furthest = max(
        float((found[name].double() - expected[name].double()).abs().max())
        for name in expected
    )
    return "equal" if furthest == 0 else "round-off" if furthest <= 1e-5 else "differs"


@pytest.mark.timeout(300)
def test_the_table_of_what_is_equal_is_what_is_measured(tmp_path):
    lines = [f"| | {' | '.join(METHODS)} |", "|---" * (len(METHODS) + 1) + "|"]
    for feature in FEATURES:
        cells = [
            compared(tmp_path, method, workers, feature)
            for method, workers in METHODS.values()
        ]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert table in (ROOT / "docs" / "from-torch.md").read_text(), (
        f"the table is now\n{table}"
    )
