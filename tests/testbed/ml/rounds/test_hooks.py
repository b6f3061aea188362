"""Tests of methods that add hooks to `federated`: FedProx, FedAdam, SCAFFOLD, FedBuff and gossip learning.

Each method is an example in one file. Results are compared with the equations of its paper, computed in plain torch.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch

from testbed.ml.data import load as load_data
from testbed.ml.preparation import samples_of
from testbed.ml.rounds.client import train_whole
from testbed.ml.rounds.layers import LocalDataset
from testbed.ml.rounds.method import Hooks
from testbed.ml.rounds.server import Trained
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed_controller.api import load
from tests.helpers import ROOT
from tests.helpers.runs import fields_of
from tests.testbed.ml.outcomes import field_values

EXAMPLES = ROOT / "scenarios" / "examples"
EXAMPLES_WITH_HOOKS = ("fedprox", "fedadam", "scaffold", "fedbuff", "gossip")
"""Methods that hooks of `federated` make, each in a file of its own."""

Tensors = list[torch.Tensor]


def import_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def prepare_example(name: str, **changes) -> Prepared:
    """Prepare an example with changed keys: ``a__b`` is the key ``a.b``, and text in JSON is a list or mapping."""
    values = {}
    for key, value in changes.items():
        if str(value).startswith(("[", "{")):
            value = json.loads(value)
        values[key.replace("__", ".")] = value
    (trial,) = trials(load(EXAMPLES / f"{name}.yaml", values))
    return prepare(trial)


def simulate_prepared(prepared: Prepared) -> Outcome:
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome


# Several tests compare with the same undisturbed run. Changes are text rather than lists, since `cache` hashes them.
@cache
def run_example(name: str, **changes) -> Outcome:
    return simulate_prepared(prepare_example(name, **changes))


def kill(device: str, event: str, duration: str = "1s", **moment) -> str:
    """Return the key ``faults`` as JSON: stop a device for a while at an event of the server."""
    when = {"device": "server", "event": event, **moment}
    return json.dumps([{"kill": device, "when": when, "for": duration}])


def compute_metrics(name: str) -> dict:
    prepared = prepare_example(name)
    return metrics(
        run_example(name),
        prepared.experiment,
        prepared.plan,
        prepared.method.declared,
    )


def have_close_weights(
    outcome: Outcome, other: Outcome, tolerance: float = 0.0
) -> bool:
    assert outcome.weights is not None
    assert other.weights is not None
    pairs = [(tensor, other.weights[name]) for name, tensor in outcome.weights.items()]
    return all(torch.allclose(*pair, rtol=0, atol=tolerance) for pair in pairs)


def local_datasets(prepared: Prepared) -> dict[str, LocalDataset]:
    """Return the samples of each device, in batches of 16."""
    dataset = load_data(prepared.scenario.workload.data)
    datasets = {}
    for name in prepared.method.data_owners(prepared.problem):
        samples = samples_of(prepared, dataset, name)
        assert samples is not None
        datasets[name] = LocalDataset(samples, 16, 1, prepared.problem.seed)
    return datasets


def build_model(prepared: Prepared) -> torch.nn.Module:
    """Return the whole model with the initial weights of a run."""
    problem = prepared.problem
    return problem.model.build(0, len(problem.model.units), problem.seed)


def copies(tensors: Iterator[torch.Tensor]) -> Tensors:
    return [tensor.detach().clone() for tensor in tensors]


def mean_of(tensors: list[Tensors]) -> Tensors:
    """Return the mean of several lists of tensors, tensor by tensor."""
    return [sum(group) / len(group) for group in zip(*tensors, strict=True)]


@pytest.mark.parametrize("name", EXAMPLES_WITH_HOOKS)
def test_example_with_hooks_learns(name: str) -> None:
    # The accuracy that the scenarios of the examples expect.
    assert compute_metrics(name)["accuracy"] >= 0.85


def test_fedprox_with_mu_zero_equals_federated_averaging_exactly() -> None:
    without_term = run_example("fedprox", workload__steps=60, workload__method__mu=0.0)
    averaging = run_example(
        "fedprox",
        workload__steps=60,
        workload__method='{"name": "federated", "local_steps": 10}',
    )
    assert have_close_weights(without_term, averaging)
    with_term = run_example("fedprox", workload__steps=60, workload__method__mu=1.0)
    assert not have_close_weights(with_term, averaging, 1e-3)


def test_proximal_term_is_gradient_of_half_squared_distance() -> None:
    changes = {
        "workload__steps": 2,
        "workload__method__local_steps": 2,
        "workload__method__mu": 0.7,
    }
    prepared = prepare_example("fedprox", **changes)
    states = []
    counts = []
    for dataset in local_datasets(prepared).values():
        model = build_model(prepared)
        start = copies(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            ((images, labels),) = dataset.iteration(step)
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            for weight, initial in zip(model.parameters(), start, strict=True):
                # Half of mu = 0.7.
                loss = loss + 0.35 * ((weight - initial) ** 2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        states.append(model.state_dict())
        counts.append(2 * dataset.mini_batch)
    outcome = run_example("fedprox", **changes)
    assert outcome.weights is not None
    for name, weights in outcome.weights.items():
        expected = torch.zeros_like(weights)
        for state, count in zip(states, counts, strict=True):
            expected += state[name] * count / sum(counts)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


def test_fedadam_follows_update_of_its_paper() -> None:
    adam = import_example("fedadam").adam
    memory = {}
    state = {"w": torch.tensor([1.0, -2.0]), "seen": torch.tensor(3)}
    # Algorithm 2 of the paper with beta1 0.9, beta2 0.99, rate 0.03 and tau 1e-3; v begins with tau squared.
    m = torch.zeros(2)
    v = torch.full((2,), 1e-6)
    expected = state["w"].clone()
    for number in range(4):
        trained = {
            "w": state["w"] + torch.tensor([0.5, -0.1]) * (number + 1),
            "seen": torch.tensor(number),
        }
        change = trained["w"] - state["w"]
        m = 0.9 * m + 0.1 * change
        v = 0.99 * v + 0.01 * change**2
        expected = expected + 0.03 * m / (v.sqrt() + 1e-3)
        state = adam(state, [Trained("a", 5, trained, 0.0)], memory)
        torch.testing.assert_close(state["w"], expected)


def test_memory_of_fedadam_survives_restart_of_server() -> None:
    faults = kill("server", "step", batch=3)
    # The moments of Adam are kept with the model on the server's disk.
    undisturbed = run_example("fedadam", workload__steps=80)
    disturbed = run_example("fedadam", workload__steps=80, faults=faults)
    assert have_close_weights(disturbed, undisturbed)


SCAFFOLD = {
    "workload__steps": 15,
    "workload__method__local_steps": 5,
    "devices__device__count": 3,
}
"""Three rounds of five iterations on three devices."""
SCAFFOLD_RATE = 0.05


def train_locally(
    model: torch.nn.Module,
    start: Tensors,
    dataset: LocalDataset,
    steps: range,
    correction: Tensors,
) -> Tensors:
    """Return the weights after steps with corrected gradients, from ``start``."""
    for weight, initial in zip(model.parameters(), start, strict=True):
        weight.data = initial.clone()
    for step in steps:
        ((images, labels),) = dataset.iteration(step)
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        for weight, change in zip(model.parameters(), correction, strict=True):
            assert weight.grad is not None
            weight.data -= SCAFFOLD_RATE * (weight.grad + change)
    return copies(model.parameters())


def scaffold_weights(prepared: Prepared, rounds: int, local_steps: int) -> Tensors:
    """Return the weights by Algorithm 1 of SCAFFOLD, with option II and a global rate of 1, in the paper's symbols."""
    datasets = local_datasets(prepared)
    model = build_model(prepared)
    x = copies(model.parameters())
    c = [torch.zeros_like(tensor) for tensor in x]
    c_of = dict.fromkeys(datasets, c)
    for number in range(rounds):
        steps = range(number * local_steps, (number + 1) * local_steps)
        ends = []
        changes = []
        for name, dataset in datasets.items():
            c_i = c_of[name]
            correction = [total - own for total, own in zip(c, c_i, strict=True)]
            y = train_locally(model, x, dataset, steps, correction)
            new_c_i = []
            for own, change, begin, end in zip(c_i, correction, x, y, strict=True):
                # Option II of the paper: c_i - c + (x - y_i) / (K rate), where `change` is c - c_i.
                drift = (begin - end) / (local_steps * SCAFFOLD_RATE)
                new_c_i.append(own - (change + own) + drift)
            ends.append(y)
            changes.append([new - old for new, old in zip(new_c_i, c_i, strict=True)])
            c_of[name] = new_c_i
        x = mean_of(ends)
        c = [total + change for total, change in zip(c, mean_of(changes), strict=True)]
    return x


def test_scaffold_follows_algorithm_1_of_its_paper() -> None:
    outcome = run_example("scaffold", **SCAFFOLD)
    expected = scaffold_weights(
        prepare_example("scaffold", **SCAFFOLD), rounds=3, local_steps=5
    )
    assert outcome.weights is not None
    for weights, tensor in zip(outcome.weights.values(), expected, strict=True):
        torch.testing.assert_close(weights, tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("device", ["device2", "server"])
def test_memory_of_device_or_server_survives_restart(device: str) -> None:
    faults = kill(device, "evaluate")
    disturbed = run_example("scaffold", **SCAFFOLD, faults=faults)
    # The fault and its repair.
    assert len(disturbed.events.of("fault")) == 2
    assert not disturbed.events.of("missed")
    assert have_close_weights(disturbed, run_example("scaffold", **SCAFFOLD))


def test_extra_tensors_are_sent_in_timing_only_run_and_are_not_weights() -> None:
    full = run_example("scaffold", **SCAFFOLD)
    # Without values there is no accuracy for the example to expect.
    timed = run_example("scaffold", **SCAFFOLD, workload__numerics="none", expect="{}")
    assert field_values(timed, "send", "bytes") == field_values(full, "send", "bytes")
    assert full.weights is not None
    model = prepare_example("scaffold").problem.model.build(0, 2, 1)
    assert set(full.weights) == set(model.state_dict())


def test_local_round_has_device_name_device_count_and_scheduled_rate() -> None:
    calls = []
    prepared = prepare_example(
        "scaffold",
        **SCAFFOLD,
        workload__training__schedule='{"name": "step", "step_size": 5, "gamma": 0.5}',
    )

    async def train(local):
        calls.append((local.device, local.devices, local.rate))
        return await train_whole(local)

    class Recording(type(prepared.method)):
        def hooks(self, options):
            return Hooks(train_local=train)

    simulate_prepared(replace(prepared, method=Recording()))
    assert calls[:3] == [
        ("device1", 3, 0.05),
        ("device2", 3, 0.05),
        ("device3", 3, 0.05),
    ]
    # The schedule halves the rate after each round of five iterations.
    assert [rate for _, _, rate in calls[3::3]] == [0.025, 0.0125]


def test_first_version_of_fedbuff_with_full_buffer_equals_federated_averaging() -> None:
    # Equal shares and speeds: all four devices are in the buffer, and none is stale.
    equal_devices = {
        "workload__steps": 10,
        "workload__data__split": "iid",
        "devices__slow__speed": "20mflops",
    }
    buffered = run_example(
        "fedbuff",
        workload__method__buffer=4,
        workload__method__staleness=0.0,
        **equal_devices,
    )
    averaging = run_example(
        "fedbuff",
        workload__method='{"name": "federated", "local_steps": 10}',
        **equal_devices,
    )
    assert have_close_weights(buffered, averaging, 1e-5)


def test_fedbuff_does_not_wait_for_slow_device() -> None:
    participants = field_values(run_example("fedbuff"), "round", "samples")
    with_slow = sum("slow" in samples for samples in participants)
    assert 0 < with_slow < len(participants) / 2


@pytest.mark.parametrize("device", ["server", "slow"])
def test_fedbuff_continues_after_restart(device: str) -> None:
    faults = kill(device, "step", duration="500ms", batch=2)
    outcome = run_example("fedbuff", workload__steps=100, faults=faults)
    assert set(field_values(outcome, "step", "step")) == set(range(10))


def test_fedbuff_begins_restarted_device_whose_hello_arrives_after_merge() -> None:
    outcome = run_example(
        "fedbuff",
        workload__steps=1000,
        network__links='[{"between": ["server", "slow"], "delay": "800ms"}]',
        faults='[{"kill": "slow", "at": "1s", "for": "100ms"}]',
    )
    later_participants = set()
    for event in outcome.events.of("round"):
        if event.time > 2.0:
            later_participants |= set(event.fields["samples"])
    assert "slow" in later_participants


def test_gossip_scores_each_device_and_reports_distance_from_mean() -> None:
    scores = fields_of(run_example("gossip"), "consensus")
    for score, step in zip(scores, range(5, 65, 5), strict=True):
        assert score["step"] == step
        assert len(score["accuracies"]) == 5
    values = compute_metrics("gossip")
    last = scores[-1]
    assert values["least_device_accuracy"] == min(last["accuracies"].values())
    assert values["consensus_distance"] == last["distance"]
    assert last["distance"] > 0


def test_gossip_continues_without_killed_device() -> None:
    outcome = run_example(
        "gossip", workload__steps=100, faults='[{"kill": "device2", "at": "1s"}]'
    )
    assert field_values(outcome, "missed", "devices")[-1] == ["device2"]
