"""Data belong to devices: each is given its own samples and no others, whichever runtime runs it."""

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
def write(tmp_path):
    (tmp_path / "owners.py").write_bytes(Path(owners.__file__).read_bytes())

    def write(split, method="owners", seed=3):
        file = tmp_path / "owners.yaml"
        named = (
            f"{{file: owners.py, name: {method}}}"
            if method == "owners"
            else f"{{name: {method}}}"
        )
        file.write_text(
            SCENARIO.format(
                split=f", split: {split}" if split else "", method=named, seed=seed
            )
        )
        return file

    return write


def prepared(file):
    return prepare(trials(load_scenario(file))[0])


@pytest.mark.parametrize(
    "split", ["iid", "{sizes: [10, 20, 30]}", "{dirichlet: 0.5}", "{shards: 2}"]
)
def test_each_device_is_given_its_own_samples_and_the_lead_the_test_samples(
    write, split
):
    ready = prepared(write(split))
    dataset = load(ready.scenario.workload.data)
    outcome = simulate(ready, dataset)
    assert outcome.status == "finished", outcome.error
    given = {
        event.device: event.fields
        for event in outcome.events
        if event.event == "owned_data"
    }
    assert given["server"]["labels"] == []
    assert given["server"]["tests"] == 40
    assert list(shares_of(ready)) == ["board1", "board2", "board3"]
    for name, share in shares_of(ready).items():
        assert given[name]["labels"] == dataset.train_labels[share].tolist()
        assert given[name]["pixels"] == pytest.approx(
            dataset.train_images[share].sum(dtype=np.float64)
        )
        assert given[name]["tests"] == 0
        assert given[name]["samples"] == {
            other: len(indices) for other, indices in shares_of(ready).items()
        }


def test_the_seed_decides_who_owns_what(write):
    one, again, other = (
        shares_of(prepared(write("iid", seed=seed)))["board1"].tolist()
        for seed in (3, 3, 4)
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("split", "method", "said"),
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
def test_a_split_that_cannot_be_is_one_line_that_names_the_key(
    write, split, method, said
):
    file = write(split, method)
    with pytest.raises(InputError) as caught:
        prepared(file)
    assert str(caught.value).startswith(f"{file}:10: workload.data.{said}")
    assert "\n" not in str(caught.value)
    assert CliRunner().invoke(command_line, ["validate", str(file)]).exit_code == 2


def test_more_devices_than_samples(write):
    file = write("iid")
    file.write_text(file.read_text().replace("train: 300", "train: 2"))
    with pytest.raises(
        InputError,
        match=r"workload\.data\.split: 2 samples are too few for 3 devices: use more samples",
    ):
        prepared(file)


def test_the_plan_shows_samples_and_classes_of_each_device(write, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(command_line, ["plan", str(write("{shards: 2}"))])
    assert result.exit_code == 0, result.output
    rows = [
        line.split()
        for line in result.output.splitlines()
        if line.startswith(" board") and ":" in line
    ]
    assert [(row[0], row[2]) for row in rows] == [
        ("board1", "2"),
        ("board2", "2"),
        ("board3", "2"),
    ]
    counts = [sum(int(word.rstrip(",")) for word in row[4::2]) for row in rows]
    assert counts == [int(row[1]) for row in rows]
    assert (
        f"{sum(counts)} of 300 training samples; the coordinator has the test samples"
        in result.output
    )
