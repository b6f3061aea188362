"""Preparation of a run: data sets, images, initial weights and scenarios for pretraining."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data import catalog
from testbed.ml.preparation import data_folder, load_data, pretraining_of
from tests.testbed.preparation_scenario import (
    VALID,
    VALID_HEAD,
    error_lines,
    prepare_text,
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    # Error messages then begin with the name of the file, without its folder.
    monkeypatch.chdir(tmp_path)
    return Path("small.yaml")


def test_too_small_last_batch_is_refused_when_samples_are_read(file):
    Path("net.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    first = [nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6)]\n"
        "    return nn.Sequential(*first, nn.ReLU(), nn.Linear(6, classes))\n"
    )
    values = np.zeros((21, 8), np.float32)
    classes = np.arange(21) % 2
    np.savez("own.npz", x_train=values, y_train=classes, x_test=values, y_test=classes)
    text = (
        "name: own\ndevices: {a: {}}\n"
        "workload: {model: {file: net.py, name: net}, data: {name: own, path: own.npz}, method: {name: single}, "
        "epochs: 1, batch_size: BATCH, drop_last: false}\n"
    )
    # 21 samples are seven batches of 3, or five batches of 4 and a last one of 1, which cannot be normalised.
    dataset = load_data(prepare_text(file, text.replace("BATCH", "3")))
    assert dataset.train_labels.size == 21
    prepared = prepare_text(file, text.replace("BATCH", "4"))
    with pytest.raises(InputError, match="last batch of 21 samples has 1, too few"):
        load_data(prepared)


def test_data_folder_is_relative_to_scenario_or_default_of_fetch(file):
    assert data_folder(prepare_text(file).scenario) == Path("data/digits")
    Path("sub").mkdir()
    other = Path("sub/small.yaml")
    text = VALID.replace("name: digits", "name: digits, folder: ../images")
    assert data_folder(prepare_text(other, text).scenario) == Path("sub/../images")


def test_local_data_folder_precedes_system_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "SYSTEM_DATA_FOLDER", tmp_path / "system")
    # Without any data, the place is that of data to fetch.
    assert catalog.data_place("mnist") == Path("data/mnist")
    (tmp_path / "system/mnist").mkdir(parents=True)
    assert catalog.data_place("mnist") == tmp_path / "system/mnist"
    Path("data/mnist").mkdir(parents=True)
    assert catalog.data_place("mnist") == Path("data/mnist")


def test_images_of_wrong_size_are_refused_before_run(file):
    # The IDX format: type and number of axes, then one image of 32 rows and 32 columns.
    header = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 32, 0, 0, 0, 32])
    for part in ("train", "t10k"):
        Path(f"{part}-images-idx3-ubyte").write_bytes(header + bytes(32 * 32))
    text = VALID.replace("name: digits", "name: mnist, folder: .")
    assert error_lines(file, text)[0] == (
        "small.yaml:13: workload.data.folder: train-images-idx3-ubyte: has images of 32x32 pixels, not of 28x28"
    )


INFERENCE = (
    VALID_HEAD
    + """\
workload:
  task: infer
  model: {name: yolov2}
  data: {name: image-64x64, path: one.png}
  method: {name: single}
  requests: 1
"""
)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("", "", 13, "workload.data.path: one.png not found: give the path"),
        (
            ", path: one.png",
            "",
            13,
            "workload.data: image-64x64 needs the file of an image: name it with `path`",
        ),
        (
            "image-64x64",
            "photos-64x64",
            13,
            "workload.data.path: photos-64x64 is not read from a single file",
        ),
        (
            "image-64x64",
            "photos-64",
            13,
            "workload.data.name: 'photos-64' is not photos-HEIGHTxWIDTH",
        ),
        (
            "task: infer",
            "task: train",
            13,
            "workload.data.name: image-64x64 has no labels for training",
        ),
        (
            "{name: yolov2}\n  data: {name: image-64x64, path: one.png}",
            "{name: yolov2, weights: none.weights}\n  data: {name: photos-64x64}",
            12,
            "workload.model.weights: none.weights not found",
        ),
        (
            "{name: yolov2}\n  data: {name: image-64x64, path: one.png}",
            "{name: yolov2, weights: small.weights}\n  data: {name: photos-64x64}",
            12,
            "workload.model.weights: small.weights: is not a Darknet weights file",
        ),
    ],
)
def test_missing_or_invalid_image_or_weights_are_refused_before_run(
    file, old, new, line, message
):
    Path("small.weights").write_text("not weights")
    text = INFERENCE.replace(old, new)
    if "task: train" in text:
        # Training has steps, not requests.
        text = text.replace("requests: 1", "steps: 1")
    beginning = f"small.yaml:{line}: {message}"
    lines = error_lines(file, text)
    assert any(error_line.startswith(beginning) for error_line in lines)


WITH_PRETRAINING = VALID.replace("{name: mlp}", "{name: mlp, weights: first.yaml}")
"""A scenario whose initial weights come from another scenario."""


def test_pretraining_is_prepared_for_weights_from_scenario(file):
    Path("first.yaml").write_text(VALID.replace("name: small", "name: first"))
    pretraining = pretraining_of(prepare_text(file, WITH_PRETRAINING))
    assert pretraining is not None
    assert pretraining.scenario.name == "first"


def test_run_without_weights_has_no_pretraining(file):
    assert pretraining_of(prepare_text(file)) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{name: mlp}",
            "{name: mlp, weights: small.yaml}",
            "takes its own initial weights from a scenario",
        ),
        ("{name: mlp}", "{name: mlp, hidden: [7, 7, 7]}", "trains another mlp"),
        ("{name: mlp}", "{name: cnn}", "trains cnn, not mlp"),
        ("time_limit", "repetitions: 2\ntime_limit", "has 2 runs"),
        ("epochs: 2", "epochs: zwei", "first.yaml:16: workload.epochs"),
    ],
)
def test_unsuitable_pretraining_scenario_is_refused(file, old, new, message):
    Path("first.yaml").write_text(VALID.replace(old, new))
    (line,) = error_lines(file, WITH_PRETRAINING)
    assert line.startswith("small.yaml:12: workload.model.weights: ")
    assert message in line
