"""Examples of federated learning with the settings of published experiments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from testbed.ml.data import load as load_dataset
from testbed.ml.preparation import load_data, shares_of
from testbed.ml.workload import DataPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT
from tests.helpers.runs import fields_of

EXAMPLES = ROOT / "scenarios" / "examples"


def test_fedavg_example_has_hundred_equal_shares() -> None:
    (trial,) = trials(load(EXAMPLES / "fedavg-cifar.yaml"))
    shares = shares_of(prepare(trial))
    # The paper divides the 50,000 training images of CIFAR-10 among 100 clients.
    assert len(shares) == 100
    assert {len(share) for share in shares.values()} == {500}


def test_three_devices_of_leaf_example_train_in_each_round() -> None:
    (trial,) = trials(load(EXAMPLES / "leaf.yaml", ["workload.epochs=3"]))
    prepared = prepare(trial)
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    rounds = fields_of(outcome, "round")
    # The samples of a round are listed by device.
    assert [len(fields["samples"]) for fields in rounds] == [3, 3, 3]


def write_leaf_file(folder: Path, samples: dict[str, int]) -> None:
    """Write gray images, all of class 1, in the format of LEAF, with a number of samples for each user."""
    user_data = {}
    for user, count in samples.items():
        user_data[user] = {"x": [[0.5] * 784] * count, "y": [1] * count}
    folder.mkdir(parents=True)
    tree = {"users": list(samples), "user_data": user_data}
    (folder / "all.json").write_text(json.dumps(tree))


def test_leaf_files_are_read_with_users_as_groups(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_leaf_file(tmp_path / "femnist" / "train", {"a": 3, "b": 2})
    write_leaf_file(tmp_path / "femnist" / "test", {"a": 1, "b": 1})
    part = DataPart(
        file=str(EXAMPLES / "leaf.py"), name="load", split={"column": "writer"}
    )
    dataset = load_dataset(part)
    assert dataset.train_images.shape == (5, 1, 28, 28)
    assert np.array_equal(dataset.groups, [0, 0, 0, 1, 1])
