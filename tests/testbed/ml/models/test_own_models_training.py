"""Training of users' networks by several methods, and their deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT
from tests.helpers.deployments import deployment_bodies, read_deployment

NETWORKS = (ROOT / "tests" / "helpers" / "own_networks.py").read_text()
SCENARIO = """\
name: mine
devices: {source: {profile: laptop}, worker: {profile: laptop, count: 2}}
network: {link: {rate: 100mbit, delay: 1ms}}
workload:
  model: {file: net.py, name: NETWORK}
  data: {name: digits, train: 64, test: 20}
  method: METHOD
  steps: 4
  batch_size: 16
"""


def prepare_method(
    folder: Path,
    method: str,
    network: str = "Transformer",
    source: str = NETWORKS,
    scenario: str = SCENARIO,
) -> Prepared:
    (folder / "net.py").write_text(source)
    file = folder / "mine.yaml"
    file.write_text(scenario.replace("NETWORK", network).replace("METHOD", method))
    return prepare(trials(load(file))[0])


def simulated_losses(prepared: Prepared) -> list[float]:
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return [event.fields["loss"] for event in outcome.events.of("step")]


def test_pipeline_has_losses_of_single_device(tmp_path: Path) -> None:
    single = prepare_method(tmp_path, "{name: single}", "UNet")
    pipeline = prepare_method(
        tmp_path, "{name: pipeline, micro_batches: 1, stages: 3}", "UNet"
    )
    expected = pytest.approx(simulated_losses(single), rel=1e-5)
    assert simulated_losses(pipeline) == expected


def test_weight_with_two_names_is_trained_by_each_method(tmp_path: Path) -> None:
    source = (
        "from torch import nn\n"
        "def build():\n    first, second = nn.Linear(64, 64), nn.Linear(64, 64)\n    second.weight = first.weight\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(64, 10))\n"
    )

    def losses_with(method: str) -> list[float]:
        return simulated_losses(prepare_method(tmp_path, method, "build", source))

    single = losses_with("{name: single}")
    pipeline = losses_with("{name: pipeline, stages: 2, micro_batches: 1}")
    assert pipeline == pytest.approx(single, rel=1e-5)
    # Later steps of an asynchronous pipeline have stale weights.
    pipedream = losses_with("{name: pipedream}")
    assert pipedream[0] == pytest.approx(single[0])


def test_dropout_is_independent_of_partition(tmp_path: Path) -> None:
    def losses_of_stages(stages: int) -> list[float]:
        method = f"{{name: pipeline, micro_batches: 2, stages: {stages}}}"
        network = "Transformer, dropout: 0.3"
        return simulated_losses(prepare_method(tmp_path, method, network))

    assert losses_of_stages(3) == pytest.approx(losses_of_stages(2), rel=1e-5)


def test_pipedream_trains_user_network(tmp_path: Path) -> None:
    prepared = prepare_method(tmp_path, "{name: pipedream}", "ResNet")
    assert len(simulated_losses(prepared)) == 4


def test_federated_learning_accepts_user_network(tmp_path: Path) -> None:
    scenario = SCENARIO.replace("test: 20}", "test: 20, split: iid}")
    prepared = prepare_method(
        tmp_path, "{name: federated}", "ResNet", scenario=scenario
    )
    assert prepared.plan.devices


def test_more_stages_than_units_are_rejected_with_reason(
    tmp_path: Path,
) -> None:
    # A normalisation at the beginning and the end holds all layers in one unit.
    source = (
        "from torch import nn\nclass Tied(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.one, self.two, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)\n"
        "    def forward(self, x):\n        x = self.two(self.one(self.norm(x.flatten(1))))\n"
        "        return self.norm(x)[:, :10]\n"
    )
    message = (
        r"3 stages, but the model has 1 unit: .*net\.py:\d: no unit can begin here"
    )
    with pytest.raises(InputError, match=message):
        prepare_method(tmp_path, "{name: pipeline, stages: 3}", "Tied", source)


def test_deployment_contains_source_of_network(tmp_path: Path) -> None:
    prepared = prepare_method(tmp_path, "{name: pipeline}")
    bodies = deployment_bodies(prepared)
    # Devices do not have the user's file.
    (tmp_path / "net.py").unlink()
    for body in bodies.values():
        _, problem, _ = read_deployment(body)
        assert problem.model == prepared.problem.model
