"""Networks with frozen weights, which are neither sent nor changed but count in plans."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from testbed.prepare import Prepared
from testbed.trace.outcome import Outcome
from tests.helpers.partly_frozen import build_whole_model, prepare_with, run_simulated
from tests.testbed.methods.outcomes import losses_of

WIDTH = 96
FROZEN_BYTES = 4 * (WIDTH * WIDTH + WIDTH) + 4 * 10
"""Bytes of the frozen layer (weights and biases) and of the frozen bias of the last layer."""
NETWORK = f"""
from torch import nn


def build(shape, classes):
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, {WIDTH}), nn.BatchNorm1d({WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH}),
        nn.ReLU(), nn.Linear({WIDTH}, 16), nn.ReLU(), nn.Linear(16, classes),
    )
    net[4].requires_grad_(False)
    net[8].bias.requires_grad_(False)
    return net
"""
SCENARIO = """
name: frozen
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
  training: {optimizer: {learning_rate: 0.1, momentum: 0.9, weight_decay: 0.01}}
  batch_size: 16
  steps: 8
"""
ROUNDS = ("federated", "split-learning", "split-federated", "pipelearn")
PIPELINES = ("pipeline", "gpipe", "pipedream", "ftpipehd")
OPTIONS = {
    "pipeline": {"checkpoint_every": 2},
    "gpipe": {"checkpoint_every": 2},
    "ftpipehd": {"chain_replication_interval": 2},
}
for split_method in ("split-learning", "split-federated", "pipelearn"):
    OPTIONS[split_method] = {"split_point": 3}
EXCHANGES = ("trained", "all")
"""Values of `exchange`: send the trained weights only, or frozen ones as well."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "net.py").write_text(NETWORK)
    (folder / "frozen.yaml").write_text(SCENARIO)
    return folder


def prepare_method(folder: Path, method: str, **changes) -> Prepared:
    options = {"name": method, **OPTIONS.get(method, {})}
    return prepare_with(
        folder / "frozen.yaml", options, changes, in_rounds=method in ROUNDS
    )


@cache
def simulate_method(folder: Path, method: str, exchange: str) -> Outcome:
    prepared = prepare_method(folder, method, workload__training__exchange=exchange)
    return run_simulated(prepared)


def bytes_sent(outcome: Outcome) -> int:
    return sum(event.fields["bytes"] for event in outcome.events.of("send"))


def count_messages(outcome: Outcome, *kinds: str) -> int:
    return sum(event.fields["message"] in kinds for event in outcome.events.of("send"))


def frozen_names(prepared: Prepared) -> set[str]:
    names = {
        name
        for name, weight in build_whole_model(prepared).named_parameters()
        if not weight.requires_grad
    }
    # Weight and bias of one layer, and the bias of the last layer.
    assert len(names) == 3
    return names


def test_messages_of_rounds_are_smaller_by_frozen_weights(folder: Path) -> None:
    trained = simulate_method(folder, "federated", "trained")
    everything = simulate_method(folder, "federated", "all")
    messages = count_messages(everything, "begin", "update")
    # Four rounds of two steps with three devices, and two messages for each.
    assert messages == count_messages(trained, "begin", "update") == 2 * 3 * 4
    # The difference includes headers of packets and of the absent tensors.
    difference = bytes_sent(everything) - bytes_sent(trained)
    assert difference == pytest.approx(messages * FROZEN_BYTES, rel=0.08)
    assert trained.events[-1].time < everything.events[-1].time


@pytest.mark.parametrize("method", [*ROUNDS, *PIPELINES])
def test_frozen_weights_are_unchanged_and_included_in_final_weights(
    folder: Path, method: str
) -> None:
    outcome = simulate_method(folder, method, "trained")
    prepared = prepare_method(folder, method)
    initial = build_whole_model(prepared).state_dict()
    assert outcome.weights is not None
    assert outcome.weights.keys() == initial.keys()
    unchanged = {
        name
        for name, tensor in initial.items()
        if torch.equal(outcome.weights[name], tensor)
    }
    assert unchanged == frozen_names(prepared)
    assert bytes_sent(outcome) < bytes_sent(simulate_method(folder, method, "all"))


@pytest.mark.parametrize("method", ["single", *ROUNDS, *PIPELINES])
def test_not_sending_frozen_weights_does_not_change_results(
    folder: Path, method: str
) -> None:
    trained = simulate_method(folder, method, "trained")
    everything = simulate_method(folder, method, "all")
    assert losses_of(trained) == pytest.approx(losses_of(everything), rel=1e-4)
    assert trained.weights is not None
    assert everything.weights is not None
    for name, tensor in everything.weights.items():
        torch.testing.assert_close(trained.weights[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["federated", "pipelearn", "pipeline", "ftpipehd"])
def test_restarted_device_has_frozen_weights_again(folder: Path, method: str) -> None:
    victim, moment = "device2", {"device": "device2", "begins": "backward", "batch": 5}
    plain = {"workload.training.optimizer": {"learning_rate": 0.1}}
    undisturbed = run_simulated(prepare_method(folder, method, **plain))
    fault = {"kill": victim, "when": moment, "for": "1s"}
    disturbed = run_simulated(prepare_method(folder, method, faults=[fault], **plain))
    assert undisturbed.weights is not None
    assert disturbed.weights is not None
    assert count_messages(disturbed, "ping") == 0
    frozen = frozen_names(prepare_method(folder, method))
    for name, tensor in undisturbed.weights.items():
        assert disturbed.weights[name].isfinite().all()
        # Only the synchronous pipeline repeats all lost work.
        if method == "pipeline" or name in frozen:
            assert torch.equal(disturbed.weights[name], tensor), name


@pytest.mark.parametrize(
    "method", ["federated", "split-federated", "pipeline", "ftpipehd"]
)
def test_initial_weights_reach_all_devices_whether_trained_or_frozen(
    folder: Path, method: str
) -> None:
    other = run_simulated(prepare_method(folder, "single", seed=11, workload__steps=2))
    assert other.weights is not None
    save_file(other.weights, folder / "given.safetensors")
    outcomes = {}
    for exchange in EXCHANGES:
        keys = {
            "workload.model.weights": "given.safetensors",
            "workload.training.exchange": exchange,
        }
        prepared = prepare_method(folder, method, **keys)
        outcomes[exchange] = outcome = run_simulated(prepared, other.weights)
        assert outcome.weights is not None
        for name in frozen_names(prepared):
            torch.testing.assert_close(
                outcome.weights[name], other.weights[name], rtol=0, atol=1e-6
            )
    trained, everything = outcomes["trained"], outcomes["all"]
    assert losses_of(trained) == pytest.approx(losses_of(everything), rel=1e-4)
    if method in ROUNDS:
        assert bytes_sent(trained) < bytes_sent(everything)


def test_plan_counts_memory_of_frozen_weights(folder: Path) -> None:
    prepared = prepare_method(folder, "federated")
    model = prepared.problem.model
    # The model counts values of 4 bytes.
    assert 4 * model.frozen_parameters == FROZEN_BYTES
    all_values = sum(
        weight.numel() for weight in build_whole_model(prepared).parameters()
    )
    assert model.frozen_parameters + model.parameters == all_values
    for assignment in prepared.plan.assignments:
        assert assignment.memory >= FROZEN_BYTES


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_plan_counts_transmission_of_frozen_weights_only_if_sent(
    folder: Path, exchange: str
) -> None:
    prepared = prepare_method(
        folder, "federated", workload__training__exchange=exchange
    )
    first_round, *_ = simulate_method(folder, "federated", exchange).events.of("round")
    duration = first_round.fields["duration"]
    assert prepared.plan.step_time == pytest.approx(duration, rel=0.1)
