"""Networks with weights that are not trained: they count where they lie and stay there."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from testbed.prepare import Prepared
from testbed.trace.outcome import Outcome
from tests.helpers.partly_frozen import build_whole_model, prepare_with, run_simulated

WIDTH = 96
FROZEN = 4 * (WIDTH * WIDTH + WIDTH) + 4 * 10
"""Bytes of the layer and the bias that are not trained."""
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
OPTIONS |= {
    key: {"split_point": 3}
    for key in ("split-learning", "split-federated", "pipelearn")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("frozen")
    (made / "net.py").write_text(NETWORK)
    (made / "frozen.yaml").write_text(SCENARIO)
    return made


def ready(folder: Path, method: str, **changes) -> Prepared:
    options = {"name": method, **OPTIONS.get(method, {})}
    return prepare_with(
        folder / "frozen.yaml", options, changes, in_rounds=method in ROUNDS
    )


@cache
def run_of(folder: Path, method: str, exchange: str) -> Outcome:
    return run_simulated(ready(folder, method, workload__training__exchange=exchange))


def sent(outcome: Outcome) -> int:
    return sum(event.fields["bytes"] for event in outcome.events.of("send"))


def carrying(outcome: Outcome, *kinds: str) -> int:
    return sum(event.fields["message"] in kinds for event in outcome.events.of("send"))


def frozen_of(prepared: Prepared) -> set[str]:
    found = {
        name
        for name, weight in build_whole_model(prepared).named_parameters()
        if not weight.requires_grad
    }
    assert len(found) == 3
    return found


def test_messages_of_a_round_are_smaller_by_the_bytes_of_the_frozen_weights(
    folder: Path,
) -> None:
    trained, everything = (
        run_of(folder, "federated", exchange) for exchange in ("trained", "all")
    )
    messages = carrying(everything, "begin", "update")
    assert messages == carrying(trained, "begin", "update") == 2 * 3 * 4
    # Headers of packets and of tensors that are absent are counted, too.
    assert sent(everything) - sent(trained) == pytest.approx(
        messages * FROZEN, rel=0.08
    )
    assert trained.events[-1].time < everything.events[-1].time


@pytest.mark.parametrize("method", [*ROUNDS, *PIPELINES])
def test_frozen_weights_neither_travel_nor_change_and_are_among_those_that_a_run_leaves(
    folder: Path, method: str
) -> None:
    outcome = run_of(folder, method, "trained")
    begin = build_whole_model(ready(folder, method)).state_dict()
    assert outcome.weights is not None
    assert outcome.weights.keys() == begin.keys()
    still = {
        name
        for name, tensor in begin.items()
        if torch.equal(outcome.weights[name], tensor)
    }
    assert still == frozen_of(ready(folder, method))
    assert sent(outcome) < sent(run_of(folder, method, "all"))


@pytest.mark.parametrize("method", ["single", *ROUNDS, *PIPELINES])
def test_keeping_frozen_weights_changes_no_results(folder: Path, method: str) -> None:
    trained, everything = (
        run_of(folder, method, exchange) for exchange in ("trained", "all")
    )
    losses = [
        [event.fields["loss"] for event in each.events.of("step")]
        for each in (trained, everything)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert trained.weights is not None
    assert everything.weights is not None
    for name, tensor in everything.weights.items():
        torch.testing.assert_close(trained.weights[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["federated", "pipelearn", "pipeline", "ftpipehd"])
def test_a_device_that_restarts_has_them_again(folder: Path, method: str) -> None:
    victim, moment = "device2", {"device": "device2", "begins": "backward", "batch": 5}
    plain = {"workload.training.optimizer": {"learning_rate": 0.1}}
    calm = run_simulated(ready(folder, method, **plain))
    struck = run_simulated(
        ready(
            folder,
            method,
            faults=[{"kill": victim, "when": moment, "for": "1s"}],
            **plain,
        )
    )
    assert calm.weights is not None
    assert struck.weights is not None
    assert carrying(struck, "ping") == 0
    for name, tensor in calm.weights.items():
        assert struck.weights[name].isfinite().all()
        if method == "pipeline" or name in frozen_of(ready(folder, method)):
            assert torch.equal(struck.weights[name], tensor), name


@pytest.mark.parametrize(
    "method", ["federated", "split-federated", "pipeline", "ftpipehd"]
)
def test_weights_from_a_file_reach_all_devices_whether_they_are_trained_or_not(
    folder: Path, method: str
) -> None:
    other = run_simulated(ready(folder, "single", seed=11, workload__steps=2))
    assert other.weights is not None
    save_file(other.weights, folder / "given.safetensors")
    found = {}
    for exchange in ("trained", "all"):
        keys = {
            "workload.model.weights": "given.safetensors",
            "workload.training.exchange": exchange,
        }
        prepared = ready(folder, method, **keys)
        found[exchange] = outcome = run_simulated(prepared, other.weights)
        assert outcome.weights is not None
        for name in frozen_of(prepared):
            torch.testing.assert_close(
                outcome.weights[name], other.weights[name], rtol=0, atol=1e-6
            )
    losses = [
        [event.fields["loss"] for event in each.events.of("step")]
        for each in found.values()
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    if method in ROUNDS:
        assert sent(found["trained"]) < sent(found["all"])


def test_a_plan_counts_them_where_they_lie_and_not_where_they_do_not_travel(
    folder: Path,
) -> None:
    trained, everything = (
        ready(folder, "federated", workload__training__exchange=each)
        for each in ("trained", "all")
    )
    model = trained.problem.model
    assert 4 * model.frozen == FROZEN
    assert model.frozen + model.parameters == sum(
        weight.numel() for weight in build_whole_model(trained).parameters()
    )
    assert all(assignment.memory >= FROZEN for assignment in trained.plan.assignments)
    for prepared, exchange in ((trained, "trained"), (everything, "all")):
        first = next(
            iter(run_of(folder, "federated", exchange).events.of("round"))
        ).fields
        assert prepared.plan.step_time == pytest.approx(first["duration"], rel=0.1)
