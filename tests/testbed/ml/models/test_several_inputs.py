"""Networks of several inputs: named, in order or as a dictionary; cut like others, and the same in parts as whole."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.fields import Field, entries, entry, pack
from testbed.ml.preparation import load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT, deployed

SCENARIO = """\
name: inputs
seed: 1
devices: {source: {profile: laptop}, worker: {profile: laptop, count: 2}}
network: {link: {rate: 100mbit, delay: 1ms}}
workload:
  model: {file: own_inputs.py, name: NETWORK}
  data: {file: own_inputs.py, name: DATA}
  method: {name: METHOD}
  training: {optimizer: {learning_rate: 0.1}}
  batch_size: 20
  steps: 12
time_limit: 100s
"""


def prepared(
    folder: Path, network: str, data: str, method: str = "pipeline, micro_batches: 1"
) -> Prepared:
    shutil.copy(ROOT / "tests/helpers/own_inputs.py", folder)
    text = (
        SCENARIO.replace("NETWORK", network)
        .replace("DATA", data)
        .replace("METHOD", method)
    )
    (folder / "inputs.yaml").write_text(text)
    return prepare(trials(load(folder / "inputs.yaml"))[0])


def test_inputs_are_parts_of_a_row() -> None:
    ids, ages = np.arange(6).reshape(3, 2), np.ones((3, 1, 2), np.float32)
    flags = np.array([True, False, True])
    rows, fields = pack({"ids": ids, "ages": ages, "flags": flags})
    assert fields == (
        Field("ids", (2,), "int64"),
        Field("ages", (1, 2), "float32"),
        Field("flags", (), "bool"),
    )
    assert rows.shape == (3, 5)
    found = {
        name: entry(torch.from_numpy(rows), *part).numpy()
        for name, part in entries(fields).items()
    }
    for name, given in (("ids", ids), ("ages", ages), ("flags", flags)):
        assert np.array_equal(found[name], given)
        assert found[name].dtype == given.dtype
    with pytest.raises(InputError, match="inexact in float32"):
        pack({"ids": ids + 2**24, "ages": ages})


@pytest.mark.parametrize(
    ("network", "data", "units"),
    [("Masked", "tokens", 3), ("Whole", "tokens", 3), ("Towers", "pairs", 5)],
)
def test_parts_compose_to_the_whole(
    tmp_path: Path, network: str, data: str, units: int
) -> None:
    found = prepared(tmp_path, network, data)
    model = found.problem.model
    assert len(model.units) >= units
    assert model.integers == (data == "tokens")
    for body in deployed.deployment_bodies(found).values():
        assert deployed.read_deployment(body)[1].model == model
    samples = torch.from_numpy(load_data(found).train_images[:4])
    whole = model.build(0, len(model.units), 1)(samples)
    for cut in range(1, len(model.units)):
        values = samples
        for first, last in itertools.pairwise([0, cut, len(model.units)]):
            values = model.build(first, last, 1)(values)
        assert torch.allclose(values, whole, atol=1e-6)


def test_a_mask_input_reaches_the_network_as_booleans(tmp_path: Path) -> None:
    from tests.helpers.own_inputs import Masked

    found = prepared(tmp_path, "Masked", "tokens")
    module = found.problem.model.build(0, len(found.problem.model.units), 1)
    rows = torch.from_numpy(load_data(found).train_images[:9])
    own = Masked(3)
    own.load_state_dict(
        {name.partition(".")[2]: value for name, value in module.state_dict().items()}
    )
    assert torch.allclose(
        module(rows), own(rows[:, :7], rows[:, 7:])["logits"], atol=1e-6
    )


@pytest.mark.parametrize(
    ("network", "data"), [("Masked", "tokens"), ("Towers", "pairs")]
)
def test_a_pipeline_learns_what_a_single_device_does(
    tmp_path: Path, network: str, data: str
) -> None:
    losses = []
    for method in ("single", "pipeline, micro_batches: 1, partition: even"):
        found = prepared(tmp_path, network, data, method)
        outcome = simulate(found, load_data(found))
        assert outcome.status == "finished", outcome.error
        losses.append(
            [event.fields["loss"] for event in outcome.events if event.event == "step"]
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_inputs_unknown_to_forward_are_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(
        Exception,
        match="forward takes first, second, and the data have input_ids, attention_mask",
    ):
        prepared(tmp_path, "Towers", "tokens")


def test_arrays_and_tables_have_several_inputs(tmp_path: Path) -> None:
    from testbed.ml.data import load as load_set
    from testbed.ml.workload import DataPart

    ids, mask = np.arange(40).reshape(10, 4), np.ones((10, 4), bool)
    np.savez(
        tmp_path / "mine.npz",
        train_ids=ids,
        train_mask=mask,
        train_labels=np.arange(10) % 2,
    )
    found = load_set(DataPart(path=str(tmp_path / "mine.npz")))
    assert found.fields == (Field("ids", (4,), "int64"), Field("mask", (4,), "bool"))
    (tmp_path / "t.csv").write_text(
        "age,height,city,label\n"
        + "".join(f"{n},1.{n},c{n % 3},{n % 2}\n" for n in range(10))
    )
    part = DataPart(
        path=str(tmp_path / "t.csv"),
        label="label",
        columns={"body": ["age", "height"], "place": ["city"]},
    )
    assert load_set(part).fields == (
        Field("body", (2,), "float32"),
        Field("place", (1,), "int64"),
    )


def test_samples_of_a_data_set_may_be_mappings_of_unlike_lengths(
    tmp_path: Path,
) -> None:
    from testbed.ml.data import load as load_set
    from testbed.ml.workload import DataPart

    (tmp_path / "mine.py").write_text(
        "def load():\n"
        "    rows = [{'input_ids': [1] * n, 'attention_mask': [1] * n, 'label': n % 2} for n in (2, 5, 3, 4)]\n"
        "    return rows, rows\n"
    )
    found = load_set(DataPart(file=str(tmp_path / "mine.py"), name="load"))
    assert [each.shape for each in found.fields] == [(5,), (5,)]
    assert found.train_images[0].tolist() == [1, 1, 0, 0, 0] * 2
