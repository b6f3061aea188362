"""Training of a network whose embedding and head share weights, compared with plain torch."""

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


STEPS = 8


def simulate_tied(folder: Path, changes: dict[str, Any]) -> Result:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(OWN)
    (folder / "tied.yaml").write_text(SCENARIO)
    result = simulate(load(folder / "tied.yaml", changes), out=folder / "run")
    assert result.run.outcome.status == "finished", result.run.outcome.error
    return result


def train_in_torch(clip: float | None = None) -> tuple[torch.nn.Module, list[float]]:
    """Train the undivided network on the same batches; return the network and the loss of each step."""
    # The scenario reads the same source as a file.
    names: dict[str, Any] = {}
    exec(compile(OWN, "own.py", "exec"), names)
    (samples, labels), _ = names["load"]()
    network = names["Tied"]()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        indices = torch.from_numpy(batch(64, 16, 1, step))
        # cross_entropy expects the classes in the second dimension, before the places of a sequence.
        logits = network(samples[indices]).movedim(-1, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[indices])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return network, losses


def load_tied_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run after a check of the tied tensors for equality."""
    weights = load_file(folder / "run" / "weights.safetensors")
    assert torch.equal(weights["embed.weight"], weights["head.weight"])
    return weights


METHODS: list[dict[str, Any]] = [
    {"name": "pipeline", "micro_batches": 4},
    {"name": "pipeline", "stages": 2, "recompute": True},
    {"name": "gpipe"},
    {"name": "model-parallelism"},
    {"name": "single"},
]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("method", METHODS, ids=lambda options: options["name"])
def test_stages_train_tied_weights_as_plain_torch(
    tmp_path: Path, method: dict, clip: float | None
) -> None:
    changes: dict[str, Any] = {"workload.method": method}
    if clip is not None:
        changes["workload.training.clip"] = {"norm": clip}
    result = simulate_tied(tmp_path, changes)
    network, expected = train_in_torch(clip)
    losses = [row["loss"] for row in result.rows("steps")]
    assert losses == pytest.approx(expected, abs=1e-6)
    weights = load_tied_weights(tmp_path)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "duration", [{"for": "1s"}, {}], ids=["restarted", "permanent"]
)
def test_recovery_keeps_tied_weights_equal(tmp_path: Path, duration: dict) -> None:
    # The last device holds the head, and with it a copy of the embedding's weights.
    when = {"device": "a3", "begins": "backward", "batch": 5}
    method = {
        "name": "pipeline",
        "checkpoint_every": 2,
        "stall_timeout": "500ms",
        "rejoin_timeout": "3s",
    }
    faults = [{"kill": "a3", "when": when, **duration}]
    result = simulate_tied(tmp_path, {"workload.method": method, "faults": faults})
    _, expected = train_in_torch()
    # Steps after the checkpoint are repeated; the last loss of each counts.
    losses = {row["step"]: row["loss"] for row in result.rows("steps")}
    in_order = [losses[step] for step in range(STEPS)]
    assert in_order == pytest.approx(expected, abs=1e-6)
    load_tied_weights(tmp_path)


def test_moving_averages_of_tied_weights_are_equal(tmp_path: Path) -> None:
    changes = {"workload.method": {"name": "single"}, "workload.training.ema": 0.9}
    simulate_tied(tmp_path, changes)
    load_tied_weights(tmp_path)


def test_plan_includes_exchange_of_tied_gradients(tmp_path: Path) -> None:
    rate = 1e5
    slow = {
        "network.link.rate": "100kbit",
        "workload.method": {"name": "pipeline", "stages": 2},
    }
    metrics = simulate_tied(tmp_path, slow).metrics
    # A gradient of 30 x 16 values of 4 bytes in each direction.
    exchange = 2 * 30 * 16 * 4 * 8 / rate
    assert metrics["predicted_step_time"] > exchange
    assert metrics["step_time"] == pytest.approx(
        metrics["predicted_step_time"], rel=0.15
    )


def test_timing_only_run_sends_equal_bytes(tmp_path: Path) -> None:
    full = simulate_tied(tmp_path / "full", {})
    timing_only = simulate_tied(tmp_path / "none", {"workload.numerics": "none"})
    assert timing_only.metrics["bytes_sent"] == full.metrics["bytes_sent"]


@pytest.mark.parametrize(
    "method", ["pipedream", "respipe", "ftpipehd", "split-learning"]
)
def test_method_without_support_for_tied_weights_names_weights_and_alternatives(
    tmp_path: Path, method: str
) -> None:
    changes: dict[str, Any] = {"workload.method": {"name": method}}
    if method == "split-learning":
        changes["workload.data.split"] = "iid"
    with pytest.raises(
        InputError,
        match=r"(?s)embed.weight and head.weight.*use pipeline, gpipe or model-parallelism",
    ):
        simulate_tied(tmp_path, changes)
