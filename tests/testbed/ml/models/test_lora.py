"""Adapters alone are trained, sent, averaged and kept; their network begins as the one without adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from testbed.common.errors import InputError
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
ADAPTERS = 4 * 4 * ((64 + 96) + 2 * (96 + 96) + (96 + 10))
"""Bytes of all adapters."""
ROUNDS = ("federated", "split-learning")
PIPELINES = ("pipeline", "gpipe", "pipedream")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lora")
    (made / "net.py").write_text(NETWORK)
    (made / "adapters.yaml").write_text(SCENARIO)
    return made


def ready(folder: Path, method: str, **changes: object) -> Prepared:
    options = {
        "name": method,
        **({"split_point": 3} if method == "split-learning" else {}),
    }
    return prepare_with(
        folder / "adapters.yaml", options, changes, in_rounds=method in ROUNDS
    )


def test_adapted_network_begins_as_the_network() -> None:
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    values = torch.randn(5, 8)
    before = network(values)
    adapt(network, Lora(2, 4.0))
    torch.testing.assert_close(network(values), before)
    assert [name for name, weight in network.named_parameters() if weight.requires_grad] == [
        "0.lora_down", "0.lora_up", "2.lora_down", "2.lora_up",
    ]  # fmt: skip


def test_adapter_adds_the_product_of_its_matrices() -> None:
    network = nn.Sequential(nn.Linear(8, 8))
    adapt(network, Lora(2, 6.0))
    layer = network[0]
    assert isinstance(layer, AdaptedLinear)
    with torch.no_grad():
        layer.lora_up.normal_()
    values = torch.randn(5, 8)
    merged = layer.weight + 3.0 * layer.lora_up @ layer.lora_down
    torch.testing.assert_close(
        layer(values), nn.functional.linear(values, merged, layer.bias)
    )


@pytest.mark.parametrize("method", [*ROUNDS, *PIPELINES])
def test_only_adapters_change(folder: Path, method: str) -> None:
    prepared = ready(folder, method)
    begin = build_whole_model(prepared).state_dict()
    left = run_simulated(prepared).weights
    assert left is not None
    assert left.keys() == begin.keys()
    for name, tensor in begin.items():
        assert torch.equal(left[name], tensor) == ("lora" not in name), name


def test_messages_of_a_round_hold_the_adapters_alone(folder: Path) -> None:
    outcome = run_simulated(ready(folder, "federated"))
    messages = [
        event.fields
        for event in outcome.events.of("send")
        if event.fields["message"] in ("begin", "update")
    ]
    mean = sum(fields["bytes"] for fields in messages) / len(messages)
    assert ADAPTERS < mean < 1.25 * ADAPTERS


def test_weights_of_the_network_without_adapters_are_a_beginning(folder: Path) -> None:
    torch.manual_seed(5)
    layers = [nn.Flatten(), nn.Linear(64, 96)]
    layers += [
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    ]
    network = nn.Sequential(*layers)
    save_file(network.state_dict(), folder / "base.safetensors")
    from testbed.ml.models import weights

    prepared = ready(folder, "federated", workload__model__weights="base.safetensors")
    state = weights.read(folder / "base.safetensors", prepared.problem.model)
    base = load_file(folder / "base.safetensors")
    for name, tensor in state.items():
        plain = name.partition(".")[2]
        if plain in base:
            assert torch.equal(tensor, base[plain])
    assert all(
        tensor.abs().sum() > 0
        for name, tensor in state.items()
        if name.endswith("lora_down")
    )
    assert all(
        tensor.abs().sum() == 0
        for name, tensor in state.items()
        if name.endswith("lora_up")
    )


@pytest.mark.parametrize(
    ("changes", "text"),
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
)
def test_impossible_adapters_are_rejected(
    folder: Path, changes: dict[str, object], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        ready(folder, "federated", **changes)
