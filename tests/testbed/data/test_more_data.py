"""Data sets of others, augmentation, arrays that stay in files, and features that differ from device to device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from controller.running.inputs import load_data
from testbed.common.errors import InputError
from testbed.data import large, load
from testbed.data.dataset import Dataset, pack, unpack
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.workload import AugmentPart, DataPart
from tests.helpers.runs import scenario

PICTURES = np.random.default_rng(1).random((20, 1, 8, 8)).astype(np.float32)
LABELS = np.arange(20) % 4


def small() -> Dataset:
    return Dataset("small", 4, PICTURES, LABELS, PICTURES[:4], LABELS[:4])


def test_epochs_see_one_copy_after_the_other() -> None:
    copies = Dataset(
        "small", 4, np.concatenate([PICTURES, PICTURES + 1, PICTURES + 2]), LABELS, PICTURES[:4], LABELS[:4]
    )
    chosen = np.array([3, 7])
    for epoch in range(5):
        assert np.array_equal(copies.batch(chosen, epoch), PICTURES[chosen] + epoch % 3)
    part = unpack(pack(copies.part(chosen, tests=False)))
    assert np.array_equal(part.batch(np.array([1]), 2), PICTURES[[7]] + 2)
    assert len(part.train_labels) == 2


def test_augmentation_is_drawn_by_the_seed() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision: the extra `vision`")
    from testbed.data.augment import augmented

    flips = AugmentPart(transforms=({"name": "RandomHorizontalFlip"}, {"name": "RandomCrop", "size": 8, "padding": 1}))
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    found = augmented(small(), flips, 1)
    assert found.train_images.shape == (80, 1, 8, 8)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(found.train_images, augmented(small(), flips, 1).train_images)
    assert not np.array_equal(found.train_images, augmented(small(), flips, 2).train_images)
    assert not np.array_equal(found.train_images[:20], found.train_images[20:40])
    with pytest.raises(InputError, match="no such transform"):
        augmented(small(), AugmentPart(transforms=({"name": "Nonsense"},)), 1)


def test_arrays_stay_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_ = (PICTURES * 255).astype(np.uint8)
    for part, count in (("train", 20), ("test", 4)):
        np.save(tmp_path / f"{part}_images.npy", bytes_[:count])
        np.save(tmp_path / f"{part}_labels.npy", LABELS[:count])
    found = load(DataPart(path=str(tmp_path)))
    assert isinstance(found.train_images, np.memmap)
    assert np.allclose(found.batch(np.array([2]), 0), bytes_[[2]] / 255)
    assert np.allclose(unpack(pack(found)).tests([1]), bytes_[[1]] / 255)
    (tmp_path / "test_images.npy").unlink()
    (tmp_path / "test_labels.npy").unlink()
    monkeypatch.setattr(large, "LARGE", 0)
    shared = load(DataPart(path=str(tmp_path)))
    assert isinstance(shared.train_images, np.memmap)
    assert 0 < len(shared.test_images) < 20 == len(shared.train_images) + len(shared.test_images)


def test_features_shift_from_device_to_device() -> None:
    written = scenario(
        4, workload={"data": {"name": "digits", "train": 400, "split": {"noise": 0.5}}}, method={"name": "federated"}
    )
    prepared = prepare(trials(written)[0])
    assert sum(sum(each.values()) for each in prepared.owned().values()) == 400
    dataset = load_data(prepared)
    clean = {name: dataset.train_images[share] for name, share in prepared.shares.items()}
    found = [float((prepared.share(dataset, name).train_images - each).std() ** 2) for name, each in clean.items()]
    assert found == pytest.approx([0.5 * (place + 1) / len(found) for place in range(len(found))], rel=0.1)


def test_data_sets_of_hugging_face_are_read_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    rows = {"input_ids": [[1, 2], [3, 4, 5], [6]], "attention_mask": [[1, 1], [1, 1, 1], [1]], "label": [0, 1, 0]}
    part = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "set")
    found = load(DataPart(path=str(tmp_path / "set")))
    assert [each.name for each in found.fields] == ["input_ids", "attention_mask"]
    assert found.train_images.tolist()[0] == [1, 2, 0, 1, 1, 0]
    assert found.train_labels.tolist() == [0, 1, 0]
    one = load(DataPart(path=str(tmp_path / "set"), columns=["input_ids"], label="label"))
    assert one.shape == (3,)
    with pytest.raises(InputError, match="has no column nothing"):
        load(DataPart(path=str(tmp_path / "set"), columns=["nothing"]))
