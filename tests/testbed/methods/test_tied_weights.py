"""An embedding that is the head as well, over stages: as the whole network in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from testbed.common.errors import InputError
from testbed.ml.data.batches import batch
from testbed_controller.api import Result, load, simulate

OWN = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(30, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.first(self.embed(x))))))


def load():
    x = torch.randint(0, 30, (80, 6), generator=torch.Generator().manual_seed(1))
    return (x[:64], (x[:64] * 7 + 3) % 30), (x[64:], (x[64:] * 7 + 3) % 30)
"""
SCENARIO = """
name: tied
seed: 1
devices: {a: {speed: 1gflops, count: 3}}
network: {topology: mesh, link: {rate: 50mbit, delay: 2ms}}
workload:
  model: {file: own.py, name: Tied}
  data: {file: own.py, name: load}
  method: {name: pipeline}
  training: {optimizer: {name: adamw, learning_rate: 0.01}}
  batch_size: 16
  steps: 8
"""


def run(folder: Path, changes: dict[str, Any]) -> Result:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(OWN)
    (folder / "tied.yaml").write_text(SCENARIO)
    result = simulate(load(folder / "tied.yaml", changes), out=folder / "run")
    assert result.run.outcome.status == "finished", result.run.outcome.error
    return result


def plain(clip: float | None = None) -> tuple[torch.nn.Module, list[float]]:
    names: dict[str, Any] = {}
    exec(compile(OWN, "own.py", "exec"), names)
    (samples, labels), _ = names["load"]()
    network = names["Tied"]()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    losses = []
    for step in range(8):
        chosen = torch.from_numpy(batch(64, 16, 1, step))
        loss = torch.nn.functional.cross_entropy(
            network(samples[chosen]).movedim(-1, 1), labels[chosen]
        )
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return network, losses


METHODS: list[dict[str, Any]] = [
    {"name": "pipeline", "micro_batches": 4},
    {"name": "pipeline", "stages": 2, "recompute": True},
    {"name": "gpipe"},
    {"name": "model-parallelism"},
    {"name": "single"},
]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("method", METHODS, ids=lambda each: each["name"])
def test_stages_train_tied_weights_as_plain_torch_does(
    tmp_path: Path, method: dict, clip: float | None
) -> None:
    changes = {"workload.method": method} | (
        {} if clip is None else {"workload.training.clip": {"norm": clip}}
    )
    result = run(tmp_path, changes)
    network, losses = plain(clip)
    assert [each["loss"] for each in result.rows("steps")] == pytest.approx(
        losses, abs=1e-6
    )
    left = load_file(tmp_path / "run" / "weights.safetensors")
    assert torch.equal(left["embed.weight"], left["head.weight"])
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(left[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize("returns", ["1s", None])
def test_recovery_keeps_the_copies_equal(tmp_path: Path, returns: str | None) -> None:
    kill = {"kill": "a3", "when": {"device": "a3", "begins": "backward", "batch": 5}}
    kill |= {} if returns is None else {"for": returns}
    method = {
        "name": "pipeline",
        "checkpoint_every": 2,
        "stall_timeout": "500ms",
        "rejoin_timeout": "3s",
    }
    result = run(tmp_path, {"workload.method": method, "faults": [kill]})
    _, losses = plain()
    last = {each["step"]: each["loss"] for each in result.rows("steps")}
    assert [last[step] for step in range(8)] == pytest.approx(losses, abs=1e-6)
    left = load_file(tmp_path / "run" / "weights.safetensors")
    assert torch.equal(left["embed.weight"], left["head.weight"])


def test_moving_averages_of_tied_weights_are_equal(tmp_path: Path) -> None:
    run(tmp_path, {"workload.method": {"name": "single"}, "workload.training.ema": 0.9})
    left = load_file(tmp_path / "run" / "weights.safetensors")
    assert torch.equal(left["embed.weight"], left["head.weight"])


def test_the_plan_counts_what_tied_gradients_take(tmp_path: Path) -> None:
    slow = {
        "network.link.rate": "100kbit",
        "workload.method": {"name": "pipeline", "stages": 2},
    }
    result = run(tmp_path, slow)
    assert result.metrics["predicted_step_time"] > 2 * 30 * 16 * 4 * 8 / 1e5
    assert result.metrics["step_time"] == pytest.approx(
        result.metrics["predicted_step_time"], rel=0.15
    )


def test_timing_only_sends_as_much(tmp_path: Path) -> None:
    numbers = run(tmp_path / "full", {})
    shapes = run(tmp_path / "none", {"workload.numerics": "none"})
    assert shapes.metrics["bytes_sent"] == numbers.metrics["bytes_sent"]


@pytest.mark.parametrize(
    "method", ["pipedream", "respipe", "ftpipehd", "split-learning"]
)
def test_methods_that_cannot_add_up_name_weights_and_remedy(
    tmp_path: Path, method: str
) -> None:
    own = {"workload.data.split": "iid"} if method == "split-learning" else {}
    with pytest.raises(
        InputError,
        match=r"(?s)embed.weight and head.weight.*use pipeline, gpipe or model-parallelism",
    ):
        run(tmp_path, {"workload.method": {"name": method}, **own})
