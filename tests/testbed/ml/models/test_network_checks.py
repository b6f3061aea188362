"""Checks of users' networks before a run: number types, normalisation of single samples, and random numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_controller.api import load, simulate

OWN = """
import torch
from torch import nn


def plain():
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))


def normed():
    return nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


def double():
    return plain().double()


def half():
    return plain().half()


def brain():
    return plain().bfloat16()


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 12).double(), nn.Linear(12, 4)

    def forward(self, x):
        return self.last(self.first(x.double()).float().relu())


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.first(x).relu()
        return self.last(x + 0.5 * torch.randn_like(x) + 0.1 * torch.rand_like(x))


def load():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(60, 16, generator=g)
    return (x[:40], x[:40, :4].argmax(1)), (x[40:], x[40:, :4].argmax(1))
"""
SCENARIO = """
name: own
seed: 1
devices: {a: {speed: 1gflops, count: 2}}
network: {topology: mesh, link: {rate: 50mbit, delay: 1ms}}
workload:
  model: {file: own.py, name: plain}
  data: {file: own.py, name: load}
  method: {name: single}
  batch_size: 8
  steps: 3
"""


def write_scenario(folder: Path, scenario: str = SCENARIO) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(OWN)
    file = folder / "own.yaml"
    file.write_text(scenario)
    return file


@pytest.mark.parametrize(
    ("network", "number_type"),
    [("double", "float64"), ("half", "float16"), ("brain", "bfloat16")],
)
def test_weights_of_other_type_than_samples_are_rejected(
    tmp_path: Path, network: str, number_type: str
) -> None:
    scenario = load(write_scenario(tmp_path), {"workload.model.name": network})
    message = rf"multiplies .*{number_type}.*samples are float32"
    with pytest.raises(InputError, match=message):
        prepare(trials(scenario)[0])


def test_layer_of_other_type_is_accepted_if_network_converts(tmp_path: Path) -> None:
    scenario = load(write_scenario(tmp_path), {"workload.model.name": "Inside"})
    outcome = simulate(scenario, out=tmp_path / "run").run.outcome
    assert outcome.status == "finished", outcome.error


NORMALISED = SCENARIO.replace("name: plain", "name: normed")


@pytest.mark.parametrize(
    ("method", "batch"),
    # Each has one sample in a forward pass.
    [("{name: single}", 1), ("{name: pipeline, micro_batches: 4}", 4)],
    ids=["single", "pipeline"],
)
def test_batch_normalisation_of_one_sample_is_rejected(
    tmp_path: Path, method: str, batch: int
) -> None:
    file = write_scenario(tmp_path, NORMALISED.replace("{name: single}", method))
    scenario = load(file, {"workload.batch_size": batch})
    with pytest.raises(InputError, match="normalises over samples alone"):
        prepare(trials(scenario)[0])


def test_batch_normalisation_of_two_samples_is_accepted(tmp_path: Path) -> None:
    scenario = load(write_scenario(tmp_path, NORMALISED), {"workload.batch_size": 2})
    prepare(trials(scenario)[0])


def test_noise_is_independent_of_partition_and_micro_batches(tmp_path: Path) -> None:
    def losses_with(method: dict[str, object]) -> list[float]:
        folder = tmp_path / str(method["name"])
        changes = {"workload.model.name": "Noise", "workload.method": method}
        result = simulate(load(write_scenario(folder), changes), out=folder / "run")
        losses = [row["loss"] for row in result.rows("steps")]
        return [*losses, result.metrics["test_loss"]]

    single = losses_with({"name": "single"})
    pipeline = losses_with({"name": "pipeline", "micro_batches": 4})
    assert pipeline == pytest.approx(single, abs=1e-6)
