"""A loss that ignores labels or weighs classes is the same in however many micro-batches a batch passes."""

from pathlib import Path

import pytest
import torch

from testbed.ml.data.batches import cut_batch
from testbed.ml.layers.feed import Score
from testbed.ml.training.config import TrainingConfig
from testbed_controller.api import load, simulate
from tests.helpers.training import training_config

LOSSES = {
    "default": (training_config(), -100, {}),
    "another label": (
        training_config(loss={"name": "cross-entropy", "ignore_index": 0}),
        0,
        {"ignore_index": 0},
    ),
    "weighted": (
        training_config(
            loss={"name": "cross-entropy", "weight": [1.0, 2.0, 0.5, 1.0, 3.0, 1.0]}
        ),
        -100,
        {"weight": torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])},
    ),
    "summed": (
        training_config(loss={"name": "cross-entropy", "reduction": "sum"}),
        -100,
        {"reduction": "sum"},
    ),
}


def in_parts(
    training: TrainingConfig, outputs: torch.Tensor, labels: torch.Tensor, parts: int
):
    """Return loss and gradient of outputs that pass in parts, as the stages of a pipeline compute them."""
    outputs = outputs.clone().requires_grad_()
    loss = 0.0
    for part in cut_batch(len(labels), parts):
        found = training.loss(outputs[part], labels[part], training.weight(labels))
        found.backward()
        loss += float(found.detach())
    return loss, outputs.grad


def data(ignored: int):
    generator = torch.Generator().manual_seed(3)
    outputs = torch.rand((12, 8, 6), generator=generator)
    labels = torch.randint(1, 6, (12, 8), generator=generator)
    for row in range(12):
        labels[row, row % 8 :] = ignored
    labels[:3] = ignored  # of four parts the first has no counted label
    return outputs, labels


@pytest.mark.parametrize("parts", [1, 4, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_to_loss_and_gradient_of_plain_torch(
    name: str, parts: int
) -> None:
    training, ignored, options = LOSSES[name]
    outputs, labels = data(ignored)
    loss, gradient = in_parts(training, outputs, labels, parts)
    outputs.requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        outputs.movedim(-1, 1), labels, **options
    )
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(gradient, outputs.grad, rtol=0, atol=1e-6)


def test_single_labels_are_weighted_in_the_same_way() -> None:
    outputs, labels = torch.rand((6, 5)), torch.tensor([1, -100, 2, -100, -100, 3])
    loss, _ = in_parts(training_config(), outputs, labels, 3)
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(outputs, labels)), rel=1e-6
    )


def test_the_test_loss_is_the_mean_of_counted_labels() -> None:
    outputs = torch.rand((12, 8, 6))
    _, labels = data(-100)
    score = Score()
    for part in cut_batch(12, 4):
        score.add(outputs[part], labels[part].numpy())
    expected = torch.nn.functional.cross_entropy(outputs.movedim(-1, 1), labels)
    assert score.loss == pytest.approx(float(expected), rel=1e-6)


def test_test_data_without_counted_labels_have_no_loss() -> None:
    score = Score()
    score.add(torch.rand((2, 8, 6)), torch.full((2, 8), -100).numpy())
    assert "loss" not in score.fields()


OWN = """
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


def losses(
    folder: Path, method: dict[str, object], split: str | None = None
) -> list[float]:
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "ignored.yaml").write_text(SCENARIO)
    changes = {"workload.method": method} | (
        {"workload.data.split": split} if split else {}
    )
    result = simulate(load(folder / "ignored.yaml", changes), out=folder / "run")
    assert result.metrics.get("diverged") is None
    return [each["loss"] for each in result.rows("steps")]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_with_micro_batches_trains_as_one_device_does(
    tmp_path: Path, schedule: str
) -> None:
    several = losses(
        tmp_path / "several",
        {"name": "pipeline", "schedule": schedule, "micro_batches": 16},
    )
    assert several == pytest.approx(
        losses(tmp_path / "one", {"name": "single"}), abs=1e-6
    )


def test_mini_batches_of_split_learning_are_weighed_likewise(tmp_path: Path) -> None:
    several = losses(
        tmp_path / "several",
        {"name": "pipelearn", "parallel_batches": 4, "local_steps": 1},
        "iid",
    )
    one = losses(
        tmp_path / "one",
        {"name": "pipelearn", "parallel_batches": 1, "local_steps": 1},
        "iid",
    )
    assert several == pytest.approx(one, abs=1e-6)
