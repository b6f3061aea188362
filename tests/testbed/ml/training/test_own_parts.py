"""An optimizer, a schedule, a loss and a metric of the user's own: found in their file, and sent to the devices."""

from __future__ import annotations

import pytest
import torch

from testbed import deployment
from testbed.common.errors import InputError
from testbed.deployment import deployments
from testbed.ml.data import load as load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers.runs import fields_of

OWN = """
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


def prepared_in(folder, **changed):
    (folder / "own.py").write_text(OWN)
    text = SCENARIO
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "scenario.yaml").write_text(text)
    return prepare(trials(load(str(folder / "scenario.yaml"), []))[0])


def test_devices_receive_the_text_of_all_user_files(tmp_path):
    prepared = prepared_in(tmp_path)
    addresses = {device.name: "10.0.0.1" for device in prepared.problem.devices}
    body = deployments(prepared, "run", "token", addresses, None).of("a2")
    _, problem = deployment.read(body).problem()
    optimizer, weight = problem.training.optimizer(), torch.nn.Parameter(torch.ones(3))
    optimizer.step(
        {"0.w": weight}, {"0.w": torch.ones(3)}, problem.training.settings(4)
    )
    assert weight.tolist() == pytest.approx([0.99] * 3)
    assert optimizer.state()["count:0.w"].item() == 1
    assert problem.training.state_values == pytest.approx(1, abs=0.01)
    assert set(problem.training.metrics()) == {"certainty"}


def test_optimizer_state_outlives_a_stage(tmp_path):
    fault = (
        "faults: [{kill: a2, when: {device: a2, begins: backward, batch: 7}, for: 1s}]"
    )
    runs = [prepared_in(tmp_path), prepared_in(tmp_path, **{"faults: []": fault})]
    plain, killed = (
        simulate(each, load_data(each.scenario.workload.data)) for each in runs
    )
    assert plain.status == killed.status == "finished", killed.error
    assert fields_of(killed, "recovery")
    assert all(
        torch.equal(killed.weights[name], plain.weights[name]) for name in plain.weights
    )
    assert (
        fields_of(plain, "evaluate")[-1]["metrics"]
        == fields_of(killed, "evaluate")[-1]["metrics"]
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("SignDescent", "Sign", "own.py defines no function 'Sign'"),
        ("decay: 0.9", "decays: 0.9", "unexpected keyword argument 'decays'"),
        ("name: halves", "name: missing", "defines no function 'missing'"),
    ],
)
def test_what_is_wrong_with_them_is_said_with_the_key(tmp_path, old, new, words):
    with pytest.raises(InputError, match=words) as raised:
        prepared_in(tmp_path, **{old: new})
    assert "workload.training." in str(raised.value)
