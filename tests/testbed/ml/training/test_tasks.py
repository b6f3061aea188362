"""Training tasks: classes, numbers, several labels and tokens, with named losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torchmetrics
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.ml.data import catalog
from testbed.ml.data.batches import batch
from testbed.ml.data.dataset import Dataset, pack, unpack
from testbed.ml.method import PlanningProblem
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from tests.helpers.runs import fields_of

SOURCE = """
import torch
from torch import nn

def dense(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes))

def language(shape, classes):
    return nn.Sequential(nn.Embedding(classes, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))

def half_the_square(outputs, labels, scale):
    return scale * ((outputs - labels) ** 2).mean()

def largest_error(outputs, labels):
    return (outputs.squeeze(-1) - labels).abs().max()
"""
SCENARIO = """
name: task
seed: 2
devices: {{a: {{speed: 1gflops, count: 2}}}}
network: {{topology: mesh, link: {{rate: 50mbit, delay: 2ms}}}}
workload:
  task: train
  model: {{name: {network}, file: own.py}}
  data: {{path: own.npz{split}}}
  method: {{name: {method}}}
  steps: 8
  batch_size: 16
  training: {training}
expect: {expect}
"""
STEPS = 8
BATCH_SIZE = 16
TRAIN_SAMPLES = 64

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes outputs and labels."""


def draw_samples(task: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw samples and labels of a task; numbers and several labels are linear functions of the samples."""
    generator = np.random.default_rng(4)
    samples = generator.normal(size=(96, 6)).astype(np.float32)
    weights = generator.normal(size=(6, 3)).astype(np.float32)
    match task:
        case "number":
            return samples, (samples @ weights)[:, 0]
        case "numbers":
            return samples, samples @ weights
        case "labels":
            return samples, (samples @ weights > 0).astype(np.float32)
        case _:
            # The label of a token is the next token.
            tokens = generator.integers(0, 9, size=(96, 12))
            return tokens[:, :-1], tokens[:, 1:]


def mean_squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(outputs.squeeze(-1), labels)


def mean_absolute_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(-1) - labels).abs().mean()


def half_squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.5 * ((outputs - labels) ** 2).mean()


def macro_f1(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torchmetrics.functional.f1_score(
        outputs, labels.long(), task="multilabel", num_labels=3, average="macro"
    )


def token_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def perplexity(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.exp(token_cross_entropy(outputs, labels))


@dataclass(frozen=True)
class Task:
    """A training task in keys of a scenario, with loss and metrics in plain torch."""

    network: str
    training: str
    """The value of ``workload.training``."""
    loss: Compute
    metrics: Mapping[str, Compute] = field(default_factory=dict)


TASKS = {
    "number": Task(
        "dense",
        "{loss: {name: mse}, metrics: {mean-absolute-error: {}, worst: {name: largest_error, file: own.py}}}",
        mean_squared_error,
        {"mean-absolute-error": mean_absolute_error},
    ),
    "numbers": Task(
        "dense",
        "{loss: {name: half_the_square, file: own.py, scale: 0.5}, optimizer: {name: adam}}",
        half_squared_error,
    ),
    "labels": Task(
        "dense",
        "{loss: {name: bce-with-logits}, metrics: {f1: {average: macro}, AUROC: {average: macro}}}",
        functional.binary_cross_entropy_with_logits,
        {"f1": macro_f1},
    ),
    "tokens": Task(
        "language",
        "{metrics: {perplexity: {}}}",
        token_cross_entropy,
        {"perplexity": perplexity},
    ),
}


def prepare_task(
    folder: Path,
    name: str,
    method: str = "pipeline, micro_batches: 2",
    training: str | None = None,
    expect: str = "{}",
    split: str = "",
) -> Prepared:
    task = TASKS[name]
    (folder / "own.py").write_text(SOURCE)
    samples, labels = draw_samples(name)
    np.savez(
        folder / "own.npz",
        x_train=samples[:TRAIN_SAMPLES],
        y_train=labels[:TRAIN_SAMPLES],
        x_test=samples[TRAIN_SAMPLES:],
        y_test=labels[TRAIN_SAMPLES:],
    )
    text = SCENARIO.format(
        network=task.network,
        method=method,
        training=training or task.training,
        expect=expect,
        split=split,
    )
    file = folder / "scenario.yaml"
    file.write_text(text)
    return prepare(trials(load(file))[0])


def load_task_data(prepared: Prepared, folder: Path) -> Dataset:
    return catalog.load(prepared.scenario.workload.data, folder / "own.npz")


def train_with_torch(
    problem: PlanningProblem, data: Dataset, loss_function: Compute
) -> tuple[torch.nn.Module, list[float]]:
    """Train the undivided model with torch alone and return the model and the loss of each step."""
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    parameters = list(model.parameters())
    if problem.training.part.optimizer.is_plain:
        # The default of the scenario.
        optimizer = torch.optim.SGD(parameters, lr=0.05)
    else:
        optimizer = problem.training._make_optimizer(parameters)
    losses = []
    for step in range(STEPS):
        indices = batch(TRAIN_SAMPLES, BATCH_SIZE, problem.seed, step)
        samples = torch.from_numpy(data.train_images[indices])
        labels = torch.from_numpy(data.train_labels[indices])
        loss = loss_function(model(samples), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


@pytest.mark.parametrize("name", TASKS)
def test_task_has_losses_and_metrics_of_plain_torch(tmp_path: Path, name: str) -> None:
    task = TASKS[name]
    prepared = prepare_task(tmp_path, name)
    # Packed and unpacked, as data reach a device.
    data = unpack(pack(load_task_data(prepared, tmp_path)))
    outcome = simulate(prepared, data)
    assert outcome.status == "finished", outcome.error
    model, losses = train_with_torch(prepared.problem, data, task.loss)
    actual = [fields["loss"] for fields in fields_of(outcome, "step")]
    assert actual == pytest.approx(losses, abs=1e-5)
    with torch.no_grad():
        outputs = model(torch.from_numpy(data.test_images))
    labels = torch.from_numpy(data.test_labels)
    evaluation = fields_of(outcome, "evaluate")[-1]
    test_loss = float(task.loss(outputs, labels))
    assert evaluation["loss"] == pytest.approx(test_loss, abs=1e-4)
    for metric, compute in task.metrics.items():
        expected = float(compute(outputs, labels))
        assert evaluation["metrics"][metric] == pytest.approx(expected, rel=1e-4)
    # Only classes can be counted; tokens are classes.
    assert ("accuracy" in evaluation) == (name == "tokens")


def test_metrics_of_task_can_be_expected_by_scenario(tmp_path: Path) -> None:
    prepared = prepare_task(
        tmp_path,
        "number",
        expect="{metrics.mean-absolute-error: '< 100', metrics.worst: '> 0'}",
    )
    outcome = simulate(prepared, load_task_data(prepared, tmp_path))
    values = metrics(outcome, prepared.experiment, prepared.plan)
    errors = values["metrics"]
    assert set(errors) == {"mean-absolute-error", "worst"}
    assert 0 < errors["mean-absolute-error"] < errors["worst"]
    assert "accuracy" not in values


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("{}", "use a loss such as mse"),
        ("{loss: {name: mse}, metrics: {f2: {}}}", "torchmetrics has no 'f2'"),
        ("{loss: {name: none, file: own.py}}", "defines no function 'none'"),
        (
            "{loss: {name: mse}, metrics: {f1: {averages: macro}}}",
            "Unexpected keyword arguments: .averages",
        ),
    ],
    ids=["cross-entropy", "unknown-metric", "unknown-loss", "unknown-metric-option"],
)
def test_unsuitable_loss_or_metric_is_rejected_before_run(
    tmp_path: Path, training: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare_task(tmp_path, "number", training=training)


def test_federated_learning_trains_on_numbers(tmp_path: Path) -> None:
    prepared = prepare_task(
        tmp_path, "number", method="federated", split=", split: iid"
    )
    outcome = simulate(prepared, load_task_data(prepared, tmp_path))
    assert outcome.status == "finished", outcome.error
    first, *_, last = fields_of(outcome, "evaluate")
    assert last["loss"] < first["loss"]
