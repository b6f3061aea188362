"""Connectionist temporal classification: labels shorter than outputs, and training in a pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from testbed.ml.preparation import load_data
from testbed.ml.training.config import count_decoded
from testbed.prepare import Prepared, prepare
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
BLANK = 0
PADDING = -100
"""Label after the end of a shorter sequence."""


def write_sequences(file: Path) -> None:
    """Write sequences of nine columns: a digit from 1 to 4, a gap and another digit, of three columns each."""
    digits = np.random.default_rng(3).integers(1, 5, (96, 2))
    # Without a gap, CTC would read two equal digits as one.
    with_gap = np.insert(digits, 1, BLANK, axis=1)
    columns = np.repeat(np.eye(5)[with_gap], 3, axis=1)
    labels = np.pad(digits, ((0, 0), (0, 1)), constant_values=PADDING)
    np.savez(file, x_train=columns.astype(np.float32), y_train=labels)


def prepare_method(folder: Path, method: str) -> Prepared:
    write_sequences(folder / "own.npz")
    (folder / "own.py").write_text(NETWORK)
    file = folder / "sequences.yaml"
    file.write_text(SCENARIO.replace("METHOD", method))
    return prepare(trials(load(file))[0])


@pytest.mark.parametrize(
    ("first_label", "correct"), [([1, 1, 2], 2), ([1, 2, PADDING], 1)]
)
def test_decoded_sequence_is_correct_only_as_a_whole(
    first_label: list[int], correct: int
) -> None:
    # Decoded as 1, 1, 2 and 3, 3: repeated classes count twice if a blank is between them.
    classes = torch.tensor([[1, 1, BLANK, 1, 2], [3, BLANK, BLANK, BLANK, 3]])
    outputs = torch.eye(4)[classes]
    labels = torch.tensor([first_label, [3, 3, PADDING]])
    assert count_decoded(BLANK, outputs, labels) == correct


def test_pipeline_with_ctc_has_losses_of_single_device(tmp_path: Path) -> None:
    def losses_with(method: str) -> list[float]:
        prepared = prepare_method(tmp_path, method)
        outcome = simulate(prepared, load_data(prepared))
        assert outcome.status == "finished", outcome.error
        # Columns determine the digits, so that training reads nearly all sequences.
        assert fields_of(outcome, "evaluate")[-1]["accuracy"] > 0.9
        return [fields["loss"] for fields in fields_of(outcome, "step")]

    single = losses_with("name: single")
    pipeline = losses_with("name: pipeline, micro_batches: 4, partition: even")
    assert pipeline == pytest.approx(single, rel=1e-4)
