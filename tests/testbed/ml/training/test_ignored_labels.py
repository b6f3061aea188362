"""Losses that ignore labels or weight classes: micro-batches have the loss of the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testbed.ml.data.batches import cut_batch
from testbed.ml.layers.feed import Score
from testbed.ml.training.config import TrainingConfig
from testbed_controller.api import load, simulate
from tests.helpers.training import training_config

IGNORED = -100
"""The label that torch's cross-entropy ignores by default."""
WEIGHTS = [1.0, 2.0, 0.5, 1.0, 3.0, 1.0]
LOSSES = {
    "default": (training_config(), IGNORED, {}),
    "ignore-index": (
        training_config(loss={"name": "cross-entropy", "ignore_index": 0}),
        0,
        {"ignore_index": 0},
    ),
    "weighted": (
        training_config(loss={"name": "cross-entropy", "weight": WEIGHTS}),
        IGNORED,
        {"weight": torch.tensor(WEIGHTS)},
    ),
    "summed": (
        training_config(loss={"name": "cross-entropy", "reduction": "sum"}),
        IGNORED,
        {"reduction": "sum"},
    ),
}
"""By name: the configuration, the ignored label, and the options of torch's function."""


def micro_batch_loss(
    training: TrainingConfig, outputs: torch.Tensor, labels: torch.Tensor, parts: int
) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of a batch in micro-batches, computed like the last stage of a pipeline."""
    outputs = outputs.clone().requires_grad_()
    # The weight of the whole batch: micro-batches have different numbers of counted labels.
    weight = training.weight(labels)
    total = 0.0
    for rows in cut_batch(len(labels), parts):
        loss = training.loss(outputs[rows], labels[rows], weight)
        loss.backward()
        total += float(loss.detach())
    return total, outputs.grad


def draw_batch(ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw outputs and labels of 12 sequences of 8 tokens with different numbers of ignored labels."""
    generator = torch.Generator().manual_seed(3)
    outputs = torch.rand((12, 8, 6), generator=generator)
    labels = torch.randint(1, 6, (12, 8), generator=generator)
    for row in range(12):
        labels[row, row % 8 :] = ignored
    # The first of four micro-batches has no counted label.
    labels[:3] = ignored
    return outputs, labels


@pytest.mark.parametrize("parts", [1, 4, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_have_loss_and_gradient_of_torch(name: str, parts: int) -> None:
    training, ignored, options = LOSSES[name]
    outputs, labels = draw_batch(ignored)
    loss, gradient = micro_batch_loss(training, outputs, labels, parts)
    outputs.requires_grad_()
    # torch expects the classes on the second axis.
    expected = torch.nn.functional.cross_entropy(
        outputs.movedim(-1, 1), labels, **options
    )
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, outputs.grad, rtol=0, atol=1e-6)


def test_micro_batches_of_single_labels_have_loss_of_torch() -> None:
    outputs = torch.rand((6, 5))
    labels = torch.tensor([1, IGNORED, 2, IGNORED, IGNORED, 3])
    loss, _ = micro_batch_loss(training_config(), outputs, labels, 3)
    expected = float(torch.nn.functional.cross_entropy(outputs, labels))
    assert loss == pytest.approx(expected, rel=1e-6)


def test_test_loss_is_mean_over_counted_labels() -> None:
    outputs = torch.rand((12, 8, 6))
    _, labels = draw_batch(IGNORED)
    score = Score()
    for rows in cut_batch(12, 4):
        score.add(outputs[rows], labels[rows].numpy())
    expected = torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), labels)
    assert score.loss == pytest.approx(float(expected), rel=1e-6)


def test_test_data_without_counted_labels_have_no_loss() -> None:
    score = Score()
    score.add(torch.rand((2, 8, 6)), torch.full((2, 8), IGNORED).numpy())
    assert "loss" not in score.fields()


SOURCE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 40))

def load():
    x = torch.randint(0, 40, (40, 12), generator=torch.Generator().manual_seed(6))
    y = (x * 7 + 3) % 40
    y[:, 3:] = -100
    y[::2] = -100
    return (x[:32], y[:32]), (x[32:], y[32:])
"""
SCENARIO = """
name: ignored
seed: 1
devices: {a: {speed: 1gflops, count: 2}}
network: {topology: mesh, link: {rate: 50mbit, delay: 2ms}}
workload:
  model: {file: own.py, name: build}
  data: {file: own.py, name: load}
  method: {name: single}
  batch_size: 16
  steps: 3
"""


def simulated_losses(
    folder: Path, method: dict[str, object], split: str | None = None
) -> list[float]:
    folder.mkdir()
    (folder / "own.py").write_text(SOURCE)
    (folder / "ignored.yaml").write_text(SCENARIO)
    changes: dict[str, object] = {"workload.method": method}
    if split:
        changes["workload.data.split"] = split
    result = simulate(load(folder / "ignored.yaml", changes), out=folder / "run")
    # A mean over no label would be not a number.
    assert result.metrics.get("diverged") is None
    return [row["loss"] for row in result.rows("steps")]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_with_ignored_labels_has_losses_of_single_device(
    tmp_path: Path, schedule: str
) -> None:
    # Micro-batches of one sample, half of which have ignored labels only.
    method = {"name": "pipeline", "schedule": schedule, "micro_batches": 16}
    pipeline = simulated_losses(tmp_path / "pipeline", method)
    single = simulated_losses(tmp_path / "single", {"name": "single"})
    assert pipeline == pytest.approx(single, abs=1e-6)


def test_pipelearn_with_ignored_labels_has_losses_of_whole_batches(
    tmp_path: Path,
) -> None:
    def losses_with(parallel_batches: int) -> list[float]:
        method = {
            "name": "pipelearn",
            "parallel_batches": parallel_batches,
            "local_steps": 1,
        }
        return simulated_losses(tmp_path / str(parallel_batches), method, split="iid")

    assert losses_with(4) == pytest.approx(losses_with(1), abs=1e-6)
