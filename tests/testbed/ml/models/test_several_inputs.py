"""Networks with several inputs: packing into rows, cuts, and data sets."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import load as load_data_set
from testbed.ml.fields import Field, entries, entry, pack
from testbed.ml.preparation import load_data
from testbed.ml.workload import DataPart
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT, deployments
from tests.helpers.own_inputs import Masked

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
TOKENS = 7
"""Length of the token sequences of `own_inputs.tokens`."""


def prepare_scenario(
    folder: Path, network: str, data: str, method: str = "pipeline, micro_batches: 1"
) -> Prepared:
    shutil.copy(ROOT / "tests/helpers/own_inputs.py", folder)
    text = SCENARIO.replace("NETWORK", network)
    text = text.replace("DATA", data)
    text = text.replace("METHOD", method)
    (folder / "inputs.yaml").write_text(text)
    return prepare(trials(load(folder / "inputs.yaml"))[0])


def test_packed_inputs_are_restored_with_shape_and_type() -> None:
    inputs = {
        "ids": np.arange(6).reshape(3, 2),
        "ages": np.ones((3, 1, 2), np.float32),
        "flags": np.array([True, False, True]),
    }
    rows, fields = pack(inputs)
    assert fields == (
        Field("ids", (2,), "int64"),
        Field("ages", (1, 2), "float32"),
        Field("flags", (), "bool"),
    )
    # Two ids, two ages and one flag.
    assert rows.shape == (3, 5)
    for name, position in entries(fields).items():
        restored = entry(torch.from_numpy(rows), *position).numpy()
        assert np.array_equal(restored, inputs[name])
        assert restored.dtype == inputs[name].dtype


def test_integers_beyond_float32_precision_are_rejected() -> None:
    # Rows of mixed inputs are float32, whose mantissa has 24 bits.
    ids = np.arange(6).reshape(3, 2) + 2**24
    ages = np.ones((3, 1, 2), np.float32)
    with pytest.raises(InputError, match="inexact in float32"):
        pack({"ids": ids, "ages": ages})


@pytest.mark.parametrize(
    ("network", "data", "units"),
    [("Masked", "tokens", 3), ("Whole", "tokens", 3), ("Towers", "pairs", 5)],
)
def test_stages_compose_to_whole_network_at_every_cut(
    tmp_path: Path, network: str, data: str, units: int
) -> None:
    prepared = prepare_scenario(tmp_path, network, data)
    model = prepared.problem.model
    count = len(model.units)
    assert count >= units
    assert model.integers == (data == "tokens")
    for body in deployments.deployment_bodies(prepared).values():
        _, problem, _ = deployments.read_deployment(body)
        assert problem.model == model
    samples = torch.from_numpy(load_data(prepared).train_images[:4])
    expected = model.build(0, count, seed=1)(samples)
    for cut in range(1, count):
        values = samples
        for first, last in itertools.pairwise([0, cut, count]):
            values = model.build(first, last, seed=1)(values)
        assert torch.allclose(values, expected, atol=1e-6)


def test_mask_input_reaches_network_as_booleans(tmp_path: Path) -> None:
    prepared = prepare_scenario(tmp_path, "Masked", "tokens")
    model = prepared.problem.model
    module = model.build(0, len(model.units), seed=1)
    rows = torch.from_numpy(load_data(prepared).train_images[:9])
    network = Masked(3)
    # The built model prefixes each name with the index of its unit.
    state = {}
    for name, value in module.state_dict().items():
        state[name.partition(".")[2]] = value
    network.load_state_dict(state)
    ids, mask = rows[:, :TOKENS], rows[:, TOKENS:]
    expected = network(ids, mask)["logits"]
    assert torch.allclose(module(rows), expected, atol=1e-6)


def simulated_losses(prepared: Prepared) -> list[float]:
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    return [event.fields["loss"] for event in outcome.events.of("step")]


@pytest.mark.parametrize(
    ("network", "data"), [("Masked", "tokens"), ("Towers", "pairs")]
)
def test_pipeline_has_losses_of_single_device(
    tmp_path: Path, network: str, data: str
) -> None:
    single = simulated_losses(prepare_scenario(tmp_path, network, data, "single"))
    # With one micro-batch a pipeline sums gradients in the order of a single device.
    method = "pipeline, micro_batches: 1, partition: even"
    pipeline = simulated_losses(prepare_scenario(tmp_path, network, data, method))
    assert pipeline == pytest.approx(single, rel=1e-5)
    assert single[-1] < single[0]


def test_inputs_unknown_to_forward_are_named_in_error(tmp_path: Path) -> None:
    with pytest.raises(
        Exception,
        match="forward has the parameters first, second, but the data have the inputs input_ids, attention_mask",
    ):
        prepare_scenario(tmp_path, "Towers", "tokens")


def test_arrays_of_a_file_become_inputs(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(
        path,
        train_ids=np.arange(40).reshape(10, 4),
        train_mask=np.ones((10, 4), bool),
        train_labels=np.arange(10) % 2,
    )
    data = load_data_set(DataPart(path=str(path)))
    assert data.fields == (Field("ids", (4,), "int64"), Field("mask", (4,), "bool"))


def test_column_groups_of_a_table_become_inputs(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = ["age,height,city,label"]
    lines += [f"{row},1.{row},c{row % 3},{row % 2}" for row in range(10)]
    path.write_text("\n".join(lines) + "\n")
    part = DataPart(
        path=str(path),
        label="label",
        columns={"body": ["age", "height"], "place": ["city"]},
    )
    # Texts such as cities become integer codes.
    assert load_data_set(part).fields == (
        Field("body", (2,), "float32"),
        Field("place", (1,), "int64"),
    )


def test_mappings_of_different_lengths_are_padded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def load():\n"
        "    rows = [{'input_ids': [1] * n, 'attention_mask': [1] * n, 'label': n % 2} for n in (2, 5, 3, 4)]\n"
        "    return rows, rows\n"
    )
    data = load_data_set(DataPart(file=str(path), name="load"))
    # The longest sample has five tokens; the first has two.
    assert [field.shape for field in data.fields] == [(5,), (5,)]
    padded = [1, 1, 0, 0, 0]
    assert data.train_images[0].tolist() == padded + padded
