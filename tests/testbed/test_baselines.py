"""Two baselines of federated learning, as docs/from-torch.md has their settings."""

from __future__ import annotations

import json

import numpy as np

from testbed.ml.data import load as load_set
from testbed.ml.preparation import load_data, shares_of
from testbed.ml.workload import DataPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT
from tests.helpers.runs import fields_of

EXAMPLES = ROOT / "scenarios" / "examples"


def test_fedavg_on_cifar_has_the_settings_of_its_paper() -> None:
    prepared = prepare(trials(load(EXAMPLES / "fedavg-cifar.yaml"))[0])
    assert {len(share) for share in shares_of(prepared).values()} == {500}
    assert len(shares_of(prepared)) == 100


def test_three_phones_a_round_learn_from_writers_of_their_own() -> None:
    prepared = prepare(trials(load(EXAMPLES / "leaf.yaml", ["workload.epochs=3"]))[0])
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    assert [len(each["samples"]) for each in fields_of(outcome, "round")] == [3, 3, 3]


def test_the_files_of_leaf_are_read(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part, users in (("train", {"a": 3, "b": 2}), ("test", {"a": 1, "b": 1})):
        folder = tmp_path / "femnist" / part
        folder.mkdir(parents=True)
        data = {
            user: {"x": [[0.5] * 784] * count, "y": [1] * count}
            for user, count in users.items()
        }
        (folder / "all.json").write_text(
            json.dumps({"users": list(users), "user_data": data})
        )
    part = DataPart(
        file=str(EXAMPLES / "leaf.py"), name="load", split={"column": "writer"}
    )
    found = load_set(part)
    assert found.train_images.shape == (5, 1, 28, 28)
    assert np.array_equal(found.groups, [0, 0, 0, 1, 1])
