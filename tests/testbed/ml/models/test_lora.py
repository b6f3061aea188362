"""Training with LoRA adapters: only adapters are trained and sent, and all other weights stay frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from testbed.common.errors import InputError
from testbed.ml.models import weights
from testbed.ml.models.lora import AdaptedLinear, Lora, adapt
from testbed.prepare import Prepared
from tests.helpers.partly_frozen import build_whole_model, prepare_with, run_simulated

NETWORK = """
from torch import nn


def build(shape, classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(),
        nn.Linear(96, classes),
    )
"""
SCENARIO = """
name: adapters
seed: 3
time_limit: 1000s
devices:
  server: {speed: 50mflops, memory: 1GiB, processors: 4}
  device: {speed: 20mflops, memory: 1GiB, count: 3}
network: {link: {rate: 5mbit, delay: 2ms}}
workload:
  model: {file: net.py, name: build}
  data: {name: digits, train: 96, test: 40}
  method: {name: federated}
  training: {optimizer: {learning_rate: 0.1}, lora: {rank: 4, alpha: 8}}
  batch_size: 16
  steps: 8
"""
# For each layer, 4 bytes for each value of two matrices of rank 4: (rank, inputs) and (outputs, rank).
ADAPTER_BYTES = 4 * 4 * ((64 + 96) + 2 * (96 + 96) + (96 + 10))
ROUND_METHODS = ("federated", "split-learning")
PIPELINES = ("pipeline", "gpipe", "pipedream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    (path / "net.py").write_text(NETWORK)
    (path / "adapters.yaml").write_text(SCENARIO)
    return path


def prepare_method(folder: Path, method: str, **changes: object) -> Prepared:
    options: dict[str, object] = {"name": method}
    if method == "split-learning":
        options["split_point"] = 3
    return prepare_with(
        folder / "adapters.yaml", options, changes, in_rounds=method in ROUND_METHODS
    )


def test_adapted_network_has_outputs_of_original_before_training() -> None:
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    values = torch.randn(5, 8)
    before = network(values)
    adapt(network, Lora(2, 4.0))
    torch.testing.assert_close(network(values), before)
    trained = []
    for name, weight in network.named_parameters():
        if weight.requires_grad:
            trained.append(name)
    assert trained == ["0.lora_down", "0.lora_up", "2.lora_down", "2.lora_up"]


def test_adapter_adds_scaled_product_of_its_matrices() -> None:
    network = nn.Sequential(nn.Linear(8, 8))
    rank, alpha = 2, 6.0
    adapt(network, Lora(rank, alpha))
    layer = network[0]
    assert isinstance(layer, AdaptedLinear)
    with torch.no_grad():
        # Initially zero, so that the adapter changes nothing.
        layer.lora_up.normal_()
    values = torch.randn(5, 8)
    merged = layer.weight + alpha / rank * layer.lora_up @ layer.lora_down
    expected = nn.functional.linear(values, merged, layer.bias)
    torch.testing.assert_close(layer(values), expected)


@pytest.mark.parametrize("method", [*ROUND_METHODS, *PIPELINES])
def test_training_changes_adapters_only(folder: Path, method: str) -> None:
    prepared = prepare_method(folder, method)
    initial = build_whole_model(prepared).state_dict()
    trained = run_simulated(prepared).weights
    assert trained is not None
    assert trained.keys() == initial.keys()
    for name, tensor in initial.items():
        is_changed = not torch.equal(trained[name], tensor)
        assert is_changed == ("lora" in name), name


def test_round_messages_contain_adapters_only(folder: Path) -> None:
    outcome = run_simulated(prepare_method(folder, "federated"))
    sizes = []
    for event in outcome.events.of("send"):
        if event.fields["message"] in ("begin", "update"):
            sizes.append(event.fields["bytes"])
    # Headers of messages and tensors take less than a quarter more.
    assert ADAPTER_BYTES < sum(sizes) / len(sizes) < 1.25 * ADAPTER_BYTES


def test_weights_file_without_adapters_is_accepted(folder: Path) -> None:
    torch.manual_seed(5)
    # The layers of NETWORK.
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )
    path = folder / "base.safetensors"
    save_file(network.state_dict(), path)
    prepared = prepare_method(
        folder, "federated", workload__model__weights="base.safetensors"
    )
    state = weights.read(path, prepared.problem.model)
    base = load_file(path)
    for name, tensor in state.items():
        own_name = weights.plain_name(name)
        if own_name in base:
            assert torch.equal(tensor, base[own_name])
        # One matrix of each adapter is drawn, the other is zero.
        if name.endswith("lora_down"):
            assert tensor.abs().sum() > 0
        if name.endswith("lora_up"):
            assert tensor.abs().sum() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"workload__training__lora": {"modules": ["q_proj"]}},
            "no linear layer has one of these names; .* 1, 3, 5, 7",
        ),
        ({"workload__training__lora": {"rank": 64}}, "a rank of 64 does not reduce 1"),
        (
            {"workload__model": {"name": "mlp"}},
            "'mlp' is built from layer descriptions, but adapters need",
        ),
    ],
    ids=["unknown-modules", "rank-too-large", "built-in-model"],
)
def test_impossible_adapters_are_rejected(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare_method(folder, "federated", **changes)
