"""Methods of one file on the hooks of training in rounds, each held against what its paper says, computed here."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch

from testbed.ml.data import load as load_data
from testbed.ml.preparation import samples_of
from testbed.ml.rounds.client import train_whole
from testbed.ml.rounds.method import Hooks
from testbed.ml.rounds.server import Trained
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed_controller.api import load
from tests.helpers import ROOT

EXAMPLES = ROOT / "scenarios" / "examples"
HOOKED = ("fedprox", "fedadam", "scaffold", "fedbuff", "gossip")
"""Methods that hooks of `federated` make, each in a file of its own."""


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def ready(name: str, **changes) -> Prepared:
    values = {
        key: json.loads(each) if str(each).startswith(("[", "{")) else each
        for key, each in changes.items()
    }
    given = {key.replace("__", "."): value for key, value in values.items()}
    (trial,) = trials(load(EXAMPLES / f"{name}.yaml", given))
    return prepare(trial)


@cache
def run(name: str, **changes) -> Outcome:
    prepared = ready(name, **changes)
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome


def same(one: Outcome, other: Outcome, tolerance: float = 0.0) -> bool:
    assert one.weights is not None
    assert other.weights is not None
    return all(
        torch.allclose(tensor, other.weights[name], rtol=0, atol=tolerance)
        for name, tensor in one.weights.items()
    )


@pytest.mark.parametrize("name", HOOKED)
def test_example_with_hooks_learns(name: str) -> None:
    outcome, prepared = run(name), ready(name)
    figures = metrics(
        outcome, prepared.experiment, prepared.plan, prepared.method.declared
    )
    assert figures["accuracy"] >= 0.85


def test_fedprox_without_its_term_is_federated_averaging_to_the_bit() -> None:
    plain = run("fedprox", workload__steps=60, workload__method__mu=0.0)
    averaged = run(
        "fedprox",
        workload__steps=60,
        workload__method='{"name": "federated", "local_steps": 10}',
    )
    assert same(plain, averaged)
    assert not same(
        run("fedprox", workload__steps=60, workload__method__mu=1.0), averaged, 1e-3
    )


def test_the_proximal_term_is_the_gradient_of_half_the_squared_distance() -> None:
    outcome = run(
        "fedprox",
        workload__steps=2,
        workload__method__local_steps=2,
        workload__method__mu=0.7,
    )
    prepared = ready(
        "fedprox",
        workload__steps=2,
        workload__method__local_steps=2,
        workload__method__mu=0.7,
    )
    problem, data = prepared.problem, load_data(prepared.scenario.workload.data)
    from testbed.ml.rounds.layers import LocalDataset

    states, counts = [], []
    for name in prepared.method.data_owners(problem):
        model = problem.model.build(0, len(problem.model.units), problem.seed)
        start = [each.detach().clone() for each in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = samples_of(prepared, data, name)
        assert own is not None
        share = LocalDataset(own, 16, 1, problem.seed)
        for step in range(2):
            ((images, labels),) = share.iteration(step)
            distance = sum(
                ((now - then) ** 2).sum()
                for now, then in zip(model.parameters(), start, strict=True)
            )
            optimizer.zero_grad()
            (
                torch.nn.functional.cross_entropy(model(images), labels)
                + 0.35 * distance
            ).backward()
            optimizer.step()
        states.append(model.state_dict())
        counts.append(2 * share.mini_batch)
    assert outcome.weights is not None
    for name, found in outcome.weights.items():
        expected = sum(
            state[name] * count / sum(counts)
            for state, count in zip(states, counts, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_fedadam_takes_the_steps_of_its_paper() -> None:
    adam, memory = module("fedadam").adam, {}
    state = {"w": torch.tensor([1.0, -2.0]), "seen": torch.tensor(3)}
    m, v, expected = torch.zeros(2), torch.full((2,), 1e-6), state["w"].clone()
    for number in range(4):
        sent = {
            "w": state["w"] + torch.tensor([0.5, -0.1]) * (number + 1),
            "seen": torch.tensor(number),
        }
        change = sent["w"] - state["w"]
        m, v = 0.9 * m + 0.1 * change, 0.99 * v + 0.01 * change**2
        expected = expected + 0.03 * m / (v.sqrt() + 1e-3)
        state = adam(state, [Trained("a", 5, sent, 0.0)], memory)
        torch.testing.assert_close(state["w"], expected)


def test_what_fedadam_keeps_outlives_a_restart_of_the_server() -> None:
    fault = '[{"kill": "server", "when": {"device": "server", "event": "step", "batch": 3}, "for": "1s"}]'
    undisturbed = run("fedadam", workload__steps=80)
    assert same(run("fedadam", workload__steps=80, faults=fault), undisturbed)


SCAFFOLD = {
    "workload__steps": 15,
    "workload__method__local_steps": 5,
    "devices__device__count": 3,
}


def test_scaffold_computes_what_its_paper_says() -> None:
    """Algorithm 1 with option II and a global rate of 1, in plain torch."""
    from testbed.ml.rounds.layers import LocalDataset

    outcome, prepared = run("scaffold", **SCAFFOLD), ready("scaffold", **SCAFFOLD)
    problem, data, rate = (
        prepared.problem,
        load_data(prepared.scenario.workload.data),
        0.05,
    )
    names = prepared.method.data_owners(problem)
    model = problem.model.build(0, len(problem.model.units), problem.seed)
    x = [each.detach().clone() for each in model.parameters()]
    c = [torch.zeros_like(each) for each in x]
    own = {name: [torch.zeros_like(each) for each in x] for name in names}
    for number in range(3):
        ends, changes = [], []
        for name in names:
            samples = samples_of(prepared, data, name)
            assert samples is not None
            share = LocalDataset(samples, 16, 1, problem.seed)
            for weight, begin in zip(model.parameters(), x, strict=True):
                weight.data = begin.clone()
            for step in range(number * 5, number * 5 + 5):
                ((images, labels),) = share.iteration(step)
                model.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                for weight, all_, one in zip(
                    model.parameters(), c, own[name], strict=True
                ):
                    assert weight.grad is not None
                    weight.data -= rate * (weight.grad - one + all_)
            y = [each.detach().clone() for each in model.parameters()]
            after = [
                one - all_ + (a - b) / (5 * rate)
                for one, all_, a, b in zip(own[name], c, x, y, strict=True)
            ]
            changes.append(
                [new - old for new, old in zip(after, own[name], strict=True)]
            )
            own[name] = after
            ends.append(y)
        x = [sum(each) / len(names) for each in zip(*ends, strict=True)]
        c = [
            old + sum(each) / len(names) for old, *each in zip(c, *changes, strict=True)
        ]
    assert outcome.weights is not None
    for found, expected in zip(outcome.weights.values(), x, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("victim", ["device2", "server"])
def test_what_devices_and_server_keep_between_rounds_outlives_their_restart(
    victim: str,
) -> None:
    fault = f'[{{"kill": "{victim}", "when": {{"device": "server", "event": "evaluate"}}, "for": "1s"}}]'
    struck = run("scaffold", **SCAFFOLD, faults=fault)
    assert len(struck.events.of("fault")) == 2
    assert not [event for event in struck.events if event.event == "missed"]
    assert same(struck, run("scaffold", **SCAFFOLD))


def test_extra_tensors_have_their_size_without_numbers_and_are_no_weights() -> None:
    full, timed = (
        run("scaffold", **SCAFFOLD),
        run("scaffold", **SCAFFOLD, workload__numerics="none", expect="{}"),
    )
    sizes = [
        [event.fields["bytes"] for event in each.events.of("send")]
        for each in (full, timed)
    ]
    assert sizes[0] == sizes[1]
    assert full.weights is not None
    assert set(full.weights) == set(
        ready("scaffold").problem.model.build(0, 2, 1).state_dict()
    )


def test_a_device_knows_its_name_the_number_of_devices_and_the_learning_rate_of_the_schedule() -> (
    None
):
    known = []
    prepared = ready(
        "scaffold",
        **SCAFFOLD,
        workload__training__schedule='{"name": "step", "step_size": 5, "gamma": 0.5}',
    )

    async def train(local):
        known.append((local.device, local.devices, local.rate))
        return await train_whole(local)

    method = type(
        "Knows",
        (type(prepared.method),),
        {"hooks": lambda self, options: Hooks(train_local=train)},
    )()
    outcome = simulate(
        replace(prepared, method=method), load_data(prepared.scenario.workload.data)
    )
    assert outcome.status == "finished", outcome.error
    assert known[:3] == [(f"device{number}", 3, 0.05) for number in (1, 2, 3)]
    assert [rate for _, _, rate in known[3::3]] == [0.025, 0.0125]


def test_the_first_version_of_fedbuff_with_a_buffer_of_all_devices_is_that_of_federated_averaging() -> (
    None
):
    everyone = {
        "workload__steps": 10,
        "workload__data__split": "iid",
        "devices__slow__speed": "20mflops",
    }
    buffered = run(
        "fedbuff",
        workload__method__buffer=4,
        workload__method__staleness=0.0,
        **everyone,
    )
    averaged = run(
        "fedbuff",
        workload__method='{"name": "federated", "local_steps": 10}',
        **everyone,
    )
    assert same(buffered, averaged, 1e-5)


def test_fedbuff_does_not_wait_for_the_slow_device() -> None:
    rounds = [event for event in run("fedbuff").events if event.event == "round"]
    part = [set(event.fields["samples"]) for event in rounds]
    assert 0 < sum("slow" in names for names in part) < len(part) / 2


@pytest.mark.parametrize("victim", ["server", "slow"])
def test_fedbuff_goes_on_after_a_restart(victim: str) -> None:
    fault = f'[{{"kill": "{victim}", "when": {{"device": "server", "event": "step", "batch": 2}}, "for": "500ms"}}]'
    outcome = run("fedbuff", workload__steps=100, faults=fault)
    assert {
        event.fields["step"] for event in outcome.events if event.event == "step"
    } == set(range(10))


def test_fedbuff_begins_a_restarted_device_whose_hello_arrives_after_a_merge() -> None:
    outcome = run(
        "fedbuff",
        workload__steps=1000,
        network__links='[{"between": ["server", "slow"], "delay": "800ms"}]',
        faults='[{"kill": "slow", "at": "1s", "for": "100ms"}]',
    )
    later_rounds = [
        event for event in outcome.events if event.event == "round" and event.time > 2.0
    ]
    assert any("slow" in event.fields["samples"] for event in later_rounds)


def test_gossip_scores_every_device_and_says_how_far_they_are_from_their_mean() -> None:
    events = [
        event.fields for event in run("gossip").events if event.event == "consensus"
    ]
    assert [each["step"] for each in events] == list(range(5, 65, 5))
    assert all(len(each["accuracies"]) == 5 for each in events)
    prepared = ready("gossip")
    figures = metrics(
        run("gossip"), prepared.experiment, prepared.plan, prepared.method.declared
    )
    assert figures["least_device_accuracy"] == min(events[-1]["accuracies"].values())
    assert figures["consensus_distance"] == events[-1]["distance"] > 0


def test_gossip_goes_on_without_a_device_that_is_gone() -> None:
    outcome = run(
        "gossip", workload__steps=100, faults='[{"kill": "device2", "at": "1s"}]'
    )
    missed = [
        event.fields["devices"] for event in outcome.events if event.event == "missed"
    ]
    assert missed[-1] == ["device2"]
