"""What may be learned: classes, numbers, several labels at once, tokens; by own data, a loss and metrics by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchmetrics

from testbed.common.errors import InputError
from testbed.ml.data import catalog
from testbed.ml.data.batches import batch
from testbed.ml.data.dataset import pack, unpack
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from tests.helpers.runs import fields_of

NETWORKS = """
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
  data: {{path: own.npz}}
  method: {{name: {method}}}
  steps: 8
  batch_size: 16
  training: {training}
expect: {expect}
"""


def drawn(task):
    generator = np.random.default_rng(4)
    samples = generator.normal(size=(96, 6)).astype(np.float32)
    weights = generator.normal(size=(6, 3)).astype(np.float32)
    if task == "numbers":
        return samples, (samples @ weights)[:, 0]
    if task == "several numbers":
        return samples, samples @ weights
    if task == "several labels":
        return samples, (samples @ weights > 0).astype(np.float32)
    tokens = generator.integers(0, 9, size=(96, 12))
    return tokens[:, :-1], tokens[:, 1:]


LOSSES = {
    "numbers": (
        "dense",
        "{loss: {name: mse}, metrics: {mean-absolute-error: {}, worst: {name: largest_error, file: own.py}}}",
        lambda outputs, labels: torch.nn.functional.mse_loss(
            outputs.squeeze(-1), labels
        ),
        {
            "mean-absolute-error": lambda outputs, labels: (
                (outputs.squeeze(-1) - labels).abs().mean()
            )
        },
    ),
    "several numbers": (
        "dense",
        "{loss: {name: half_the_square, file: own.py, scale: 0.5}, optimizer: {name: adam}}",
        lambda outputs, labels: 0.5 * ((outputs - labels) ** 2).mean(),
        {},
    ),
    "several labels": (
        "dense",
        "{loss: {name: bce-with-logits}, metrics: {f1: {average: macro}, AUROC: {average: macro}}}",
        torch.nn.functional.binary_cross_entropy_with_logits,
        {
            "f1": lambda outputs, labels: torchmetrics.functional.f1_score(
                outputs, labels.long(), task="multilabel", num_labels=3, average="macro"
            )
        },
    ),
    "tokens": (
        "language",
        "{metrics: {perplexity: {}}}",
        lambda outputs, labels: torch.nn.functional.cross_entropy(
            outputs.flatten(0, 1), labels.flatten()
        ),
        {
            "perplexity": lambda outputs, labels: torch.exp(
                torch.nn.functional.cross_entropy(
                    outputs.flatten(0, 1), labels.flatten()
                )
            )
        },
    ),
}


def prepared_in(
    folder, task, method="pipeline, micro_batches: 2", training=None, expect="{}"
):
    network, given, _, _ = LOSSES[task]
    (folder / "own.py").write_text(NETWORKS)
    samples, labels = drawn(task)
    np.savez(
        folder / "own.npz",
        x_train=samples[:64],
        y_train=labels[:64],
        x_test=samples[64:],
        y_test=labels[64:],
    )
    keys = {
        "network": network,
        "method": method,
        "training": training or given,
        "expect": expect,
    }
    (folder / "scenario.yaml").write_text(SCENARIO.format(**keys))
    return prepare(trials(load(str(folder / "scenario.yaml"), []))[0])


def data_of(prepared, folder):
    return catalog.load(prepared.scenario.workload.data, folder / "own.npz")


@pytest.mark.parametrize("task", LOSSES)
def test_every_task_is_learned_as_in_plain_torch_and_measured_by_torchmetrics(
    tmp_path, task
):
    prepared = prepared_in(tmp_path, task)
    data = unpack(pack(data_of(prepared, tmp_path)))  # as it reaches a device
    outcome = simulate(prepared, data)
    assert outcome.status == "finished", outcome.error
    _, _, criterion, measured = LOSSES[task]
    problem = prepared.problem
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    made = (
        problem.training._make_optimizer
        if not problem.training.part.optimizer.is_plain
        else None
    )
    optimizer = (
        made([*model.parameters()])
        if made
        else torch.optim.SGD(model.parameters(), lr=0.05)
    )
    losses = []
    for step in range(8):
        chosen = batch(64, 16, problem.seed, step)
        loss = criterion(
            model(torch.from_numpy(data.train_images[chosen])),
            torch.from_numpy(data.train_labels[chosen]),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert [step["loss"] for step in fields_of(outcome, "step")] == pytest.approx(
        losses, abs=1e-5
    )
    with torch.no_grad():
        outputs, labels = (
            model(torch.from_numpy(data.test_images)),
            torch.from_numpy(data.test_labels),
        )
    found = fields_of(outcome, "evaluate")[-1]
    assert found["loss"] == pytest.approx(float(criterion(outputs, labels)), abs=1e-4)
    for name, compute in measured.items():
        assert found["metrics"][name] == pytest.approx(
            float(compute(outputs, labels)), rel=1e-4
        )
    assert ("accuracy" in found) == (task == "tokens")


def test_a_metric_is_a_figure_that_a_scenario_may_expect(tmp_path):
    prepared = prepared_in(
        tmp_path,
        "numbers",
        expect="{metrics.mean-absolute-error: '< 100', metrics.worst: '> 0'}",
    )
    outcome = simulate(prepared, data_of(prepared, tmp_path))
    figures = metrics(outcome, prepared.experiment, prepared.plan)
    assert set(figures["metrics"]) == {"mean-absolute-error", "worst"}
    assert 0 < figures["metrics"]["mean-absolute-error"] < figures["metrics"]["worst"]
    assert "accuracy" not in figures


@pytest.mark.parametrize(
    ("task", "training", "words"),
    [
        ("numbers", "{}", "use a loss such as mse"),
        (
            "numbers",
            "{loss: {name: mse}, metrics: {f2: {}}}",
            "torchmetrics has no 'f2'",
        ),
        ("numbers", "{loss: {name: none, file: own.py}}", "defines no function 'none'"),
        (
            "numbers",
            "{loss: {name: mse}, metrics: {f1: {averages: macro}}}",
            "Unexpected keyword arguments: .averages",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_the_run(tmp_path, task, training, words):
    with pytest.raises(InputError, match=words):
        prepared_in(tmp_path, task, training=training)


def test_federated_devices_learn_numbers(tmp_path):
    prepared_in(tmp_path, "numbers")
    text = (
        (tmp_path / "scenario.yaml")
        .read_text()
        .replace("path: own.npz", "path: own.npz, split: iid")
    )
    (tmp_path / "scenario.yaml").write_text(
        text.replace("name: pipeline, micro_batches: 2", "name: federated")
    )
    prepared = prepare(trials(load(str(tmp_path / "scenario.yaml"), []))[0])
    outcome = simulate(prepared, data_of(prepared, tmp_path))
    assert outcome.status == "finished", outcome.error
    first, *_, last = fields_of(outcome, "evaluate")
    assert last["loss"] < first["loss"]
