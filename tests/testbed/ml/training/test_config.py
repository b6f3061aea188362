"""Labels that are shorter than outputs: CTC by name, whole and in a pipeline."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testbed.ml.preparation import load_data
from testbed.ml.training.config import count_decoded
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers.runs import fields_of

SCENARIO = """
name: sequences
seed: 2
devices: {a: {speed: 1gflops, count: 2}}
network: {topology: mesh, link: {rate: 50mbit, delay: 2ms}}
workload:
  model: {name: reader, file: own.py}
  data: {path: own.npz}
  method: {METHOD}
  steps: 60
  batch_size: 16
  training: {loss: {name: ctc}, optimizer: {name: adam, learning_rate: 0.02}}
"""
NETWORK = """
from torch import nn

def reader(shape, classes):
    return nn.Sequential(nn.Linear(shape[1], 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, classes))
"""


def written(folder, method):
    """Pictures of two digits of 1 to 4, each three columns wide, with a gap between them; 0 is the blank."""
    draws = np.random.default_rng(3)
    labels = draws.integers(1, 5, (96, 2))
    shown = np.repeat(np.eye(5)[np.insert(labels, 1, 0, axis=1)], 3, axis=1)
    np.savez(
        folder / "own.npz",
        x_train=shown.astype(np.float32),
        y_train=np.pad(labels, ((0, 0), (0, 1)), constant_values=-100),
    )
    (folder / "own.py").write_text(NETWORK)
    (folder / "sequences.yaml").write_text(SCENARIO.replace("METHOD", method))
    return prepare(trials(load(folder / "sequences.yaml"))[0])


def test_what_is_read_is_compared_as_a_whole():
    outputs = torch.eye(4)[torch.tensor([[1, 1, 0, 1, 2], [3, 0, 0, 0, 3]])]
    assert count_decoded(0, outputs, torch.tensor([[1, 1, 2], [3, 3, -100]])) == 2
    assert count_decoded(0, outputs, torch.tensor([[1, 2, -100], [3, 3, -100]])) == 1


def test_temporal_loss_trains_alike_in_a_pipeline(tmp_path):
    losses = []
    for method in ("name: single", "name: pipeline, micro_batches: 4, partition: even"):
        prepared = written(tmp_path, method)
        outcome = simulate(prepared, load_data(prepared))
        assert outcome.status == "finished", outcome.error
        losses.append([each["loss"] for each in fields_of(outcome, "step")])
        assert fields_of(outcome, "evaluate")[-1]["accuracy"] > 0.9
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
