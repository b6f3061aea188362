"""Optimizers, schedules, losses and metrics in users' files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testbed import deployment
from testbed.common.errors import InputError
from testbed.deployment import deployments
from testbed.ml.data import load as load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from tests.helpers.runs import fields_of

SOURCE = """
import torch

class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(weight))
                mean.mul_(group["decay"]).add_(weight.grad)
                weight.sub_(group["lr"] * mean.sign() / state["count"])

def halves(step):
    return 0.5 ** (step // 4)

def squared(outputs, labels, weight=1.0):
    return weight * ((outputs.softmax(1) - torch.nn.functional.one_hot(labels, 10)) ** 2).mean()

def certainty(outputs, labels):
    return outputs.softmax(1).amax(1).mean()
"""
SCENARIO = """
name: own
seed: 2
devices: {a: {speed: 100mflops, count: 3}}
network: {topology: mesh, link: {rate: 50mbit, delay: 2ms}}
workload:
  task: train
  model: {name: mlp, hidden: [12, 10, 8]}
  data: {name: digits, train: 96, test: 40}
  method: {name: pipeline, micro_batches: 1, checkpoint_every: 3}
  batch_size: 16
  steps: 12
  training:
    optimizer: {name: SignDescent, file: own.py, learning_rate: 0.02, decay: 0.9}
    schedule: {name: halves, file: own.py}
    loss: {name: squared, file: own.py, weight: 2}
    metrics: {certainty: {file: own.py}}
faults: []
"""


def prepare_scenario(folder: Path, scenario: str = SCENARIO) -> Prepared:
    (folder / "own.py").write_text(SOURCE)
    file = folder / "scenario.yaml"
    file.write_text(scenario)
    return prepare(trials(load(file))[0])


def test_deployment_contains_source_of_user_files(tmp_path: Path) -> None:
    prepared = prepare_scenario(tmp_path)
    addresses = {device.name: "10.0.0.1" for device in prepared.problem.devices}
    body = deployments(prepared, "run", "token", addresses, None).of("a2")
    _, problem = deployment.read(body).problem()
    training = problem.training
    optimizer = training.optimizer()
    weight = torch.nn.Parameter(torch.ones(3))
    # At step 4 the schedule has halved the rate of 0.02.
    optimizer.step({"0.w": weight}, {"0.w": torch.ones(3)}, training.settings(4))
    assert weight.tolist() == pytest.approx([0.99] * 3)
    assert optimizer.state()["count:0.w"].item() == 1
    # The mean is one value for each weight; the counter is negligible.
    assert training.state_values == pytest.approx(1, abs=0.01)
    assert set(training.metrics()) == {"certainty"}


def run_to_end(prepared: Prepared) -> Outcome:
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return outcome


def test_optimizer_state_survives_restart_of_stage(tmp_path: Path) -> None:
    fault = (
        "faults: [{kill: a2, when: {device: a2, begins: backward, batch: 7}, for: 1s}]"
    )
    undisturbed = run_to_end(prepare_scenario(tmp_path))
    with_fault = SCENARIO.replace("faults: []", fault)
    disturbed = run_to_end(prepare_scenario(tmp_path, with_fault))
    assert fields_of(disturbed, "recovery")
    for name, tensor in undisturbed.weights.items():
        assert torch.equal(disturbed.weights[name], tensor), name
    expected = fields_of(undisturbed, "evaluate")[-1]["metrics"]
    assert fields_of(disturbed, "evaluate")[-1]["metrics"] == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("SignDescent", "Sign", "own.py defines no function 'Sign'"),
        ("decay: 0.9", "decays: 0.9", "unexpected keyword argument 'decays'"),
        ("name: halves", "name: missing", "defines no function 'missing'"),
    ],
    ids=["unknown-optimizer", "unknown-option", "unknown-schedule"],
)
def test_unknown_name_or_option_is_rejected_with_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in SCENARIO
    with pytest.raises(InputError, match=message) as caught:
        prepare_scenario(tmp_path, SCENARIO.replace(old, new))
    assert "workload.training." in str(caught.value)
