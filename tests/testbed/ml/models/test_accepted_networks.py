"""Networks that a run cannot compute with are refused before it, and noise is the same in however many parts."""

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


def written(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(OWN)
    (folder / "own.yaml").write_text(SCENARIO)
    return folder / "own.yaml"


@pytest.mark.parametrize(
    ("name", "type_"),
    [("double", "float64"), ("half", "float16"), ("brain", "bfloat16")],
)
def test_weights_of_another_type_than_the_samples_are_refused(
    tmp_path: Path, name: str, type_: str
) -> None:
    with pytest.raises(InputError, match=rf"multiplies .*{type_}.*samples are float32"):
        prepare(trials(load(written(tmp_path), {"workload.model.name": name}))[0])


def test_a_layer_of_another_type_is_taken_where_the_network_converts(
    tmp_path: Path,
) -> None:
    result = simulate(
        load(written(tmp_path), {"workload.model.name": "Inside"}), out=tmp_path / "run"
    )
    assert result.run.outcome.status == "finished", result.run.outcome.error


@pytest.mark.parametrize(
    ("method", "batch", "fits"),
    [
        ("{name: single}", 1, False),
        ("{name: pipeline, micro_batches: 4}", 4, False),
        ("{name: single}", 2, True),
    ],
)
def test_a_normalisation_needs_more_than_one_sample_at_once(
    tmp_path: Path, method: str, batch: int, fits: bool
) -> None:
    file = written(tmp_path)
    file.write_text(
        SCENARIO.replace("{name: single}", method).replace(
            "name: plain", "name: normed"
        )
    )
    scenario = load(file, {"workload.batch_size": batch})
    if fits:
        prepare(trials(scenario)[0])
        return
    with pytest.raises(InputError, match="normalises over samples alone"):
        prepare(trials(scenario)[0])


def test_noise_is_the_same_in_however_many_parts(tmp_path: Path) -> None:
    found = []
    for number, method in enumerate(
        ({"name": "single"}, {"name": "pipeline", "micro_batches": 4})
    ):
        changes = {"workload.model.name": "Noise", "workload.method": method}
        result = simulate(
            load(written(tmp_path / str(number)), changes),
            out=tmp_path / f"{number}" / "run",
        )
        found.append(
            [
                *(each["loss"] for each in result.rows("steps")),
                result.metrics["test_loss"],
            ]
        )
    assert found[0] == pytest.approx(found[1], abs=1e-6)
