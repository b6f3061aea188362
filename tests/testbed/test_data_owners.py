"""The distribution of training samples among devices that own data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.ml.preparation import shares_of
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from testbed_controller.cli.main import testbed as command_line
from tests.helpers import owners
from tests.helpers.runs import events_of

SCENARIO = """\
name: owners
seed: {seed}
devices:
  server: {{profile: laptop}}
  board: {{profile: raspberry-pi-4b, count: 3}}
network:
  link: {{rate: 50mbit, delay: 5ms}}
workload:
  model: {{name: mlp}}
  data: {{name: digits, train: 300, test: 40{split}}}
  method: {method}
  batch_size: 10
  steps: 1
"""


@pytest.fixture
def write_scenario(tmp_path):
    """Return a function to write a scenario of three devices with data; the function returns the file."""
    # The method "owners" records the samples of each device.
    (tmp_path / "owners.py").write_bytes(Path(owners.__file__).read_bytes())

    def write(split, method="owners", seed=3):
        file = tmp_path / "owners.yaml"
        method_file = "file: owners.py, " if method == "owners" else ""
        text = SCENARIO.format(
            split=f", split: {split}" if split else "",
            method=f"{{{method_file}name: {method}}}",
            seed=seed,
        )
        file.write_text(text)
        return file

    return write


def prepare_scenario(file):
    (trial,) = trials(load_scenario(file))
    return prepare(trial)


@pytest.mark.parametrize(
    "split", ["iid", "{sizes: [10, 20, 30]}", "{dirichlet: 0.5}", "{shards: 2}"]
)
def test_owners_get_training_samples_and_coordinator_test_samples(
    write_scenario, split
):
    prepared = prepare_scenario(write_scenario(split))
    dataset = load(prepared.scenario.workload.data)
    outcome = simulate(prepared, dataset)
    assert outcome.status == "finished", outcome.error
    reports = dict(events_of(outcome, "owned_data"))
    assert reports["server"]["labels"] == []
    assert reports["server"]["tests"] == 40
    shares = shares_of(prepared)
    share_sizes = {name: len(share) for name, share in shares.items()}
    assert list(shares) == ["board1", "board2", "board3"]
    for name, share in shares.items():
        report = reports[name]
        assert report["labels"] == dataset.train_labels[share].tolist()
        pixels = dataset.train_images[share].sum(dtype=np.float64)
        assert report["pixels"] == pytest.approx(pixels)
        assert report["tests"] == 0
        assert report["samples"] == share_sizes


def test_seed_determines_shares_of_devices(write_scenario):
    shares = []
    for seed in (3, 3, 4):
        prepared = prepare_scenario(write_scenario("iid", seed=seed))
        shares.append(shares_of(prepared)["board1"].tolist())
    assert shares[0] == shares[1]
    assert shares[0] != shares[2]


@pytest.mark.parametrize(
    ("split", "method", "message"),
    [
        (
            "{sizes: [10, 20]}",
            "owners",
            "split.sizes: names 2 sizes, but 3 devices own data: board1, board2, board3",
        ),
        (
            "{sizes: [100, 100, 101]}",
            "owners",
            "split.sizes: add up to 301 samples, but there are 300: use smaller",
        ),
        ("{sizes: [100, 100, 0]}", "owners", "split.sizes.2: '0' must be at least 1"),
        (
            "{sizes: [100, 200], shards: 2}",
            "owners",
            "split: takes exactly one of 'sizes', 'dirichlet', 'shards', 'quantity', 'noise' and 'column'",
        ),
        (
            "{shards: 11}",
            "owners",
            "split.shards: there are 10 classes, not 11: use fewer",
        ),
        ("{dirichlet: 0}", "owners", "split.dirichlet: '0' must be more than 0"),
        (
            "{dirichlets: 1}",
            "owners",
            "split.dirichlets: unknown key 'dirichlets': did you mean 'dirichlet'?",
        ),
        ("idd", "owners", "split: invalid value 'idd': did you mean 'iid'?"),
        (
            "",
            "owners",
            "split: the devices of 'owners' train on their own samples: use iid, or keys such as",
        ),
        (
            "iid",
            "pipeline",
            "split: distributes training samples among devices, but 'pipeline' keeps all samples on its",
        ),
    ],
)
def test_invalid_split_is_refused_in_one_line_with_key(
    write_scenario, split, method, message
):
    file = write_scenario(split, method)
    with pytest.raises(InputError) as error:
        prepare_scenario(file)
    assert str(error.value).startswith(f"{file}:10: workload.data.{message}")
    assert "\n" not in str(error.value)
    # Exit code 2 is that of an invalid scenario.
    assert CliRunner().invoke(command_line, ["validate", str(file)]).exit_code == 2


def test_fewer_samples_than_devices_are_refused(write_scenario):
    file = write_scenario("iid")
    file.write_text(file.read_text().replace("train: 300", "train: 2"))
    with pytest.raises(
        InputError,
        match=r"workload\.data\.split: 2 samples are too few for 3 devices: use more samples",
    ):
        prepare_scenario(file)


def test_plan_prints_samples_and_classes_of_each_device(write_scenario, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = write_scenario("{shards: 2}")
    result = CliRunner().invoke(command_line, ["plan", str(file)])
    assert result.exit_code == 0, result.output
    names, total = [], 0
    for line in result.output.splitlines():
        if not line.startswith(" board") or ":" not in line:
            continue
        # A row has the name, the samples, the classes, and a "CLASS: COUNT," for each class.
        name, samples, classes, *counts_by_class = line.split()
        names.append(name)
        assert classes == "2"
        counts = [int(word.rstrip(",")) for word in counts_by_class[1::2]]
        assert sum(counts) == int(samples)
        total += sum(counts)
    assert names == ["board1", "board2", "board3"]
    summary = f"{total} of 300 training samples; the coordinator has the test samples"
    assert summary in result.output
