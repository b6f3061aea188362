"""Data sets of others, augmentation, arrays that stay in files, and features that differ from device to device."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data import large, load
from testbed.ml.data.augment import Drawing, drawing
from testbed.ml.data.dataset import Dataset, Images, pack, unpack
from testbed.ml.preparation import load_data, samples_by_class, samples_of, shares_of
from testbed.ml.workload import AugmentPart, DataPart, LearningPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario

PICTURES = np.random.default_rng(1).random((20, 1, 8, 8)).astype(np.float32)
LABELS = np.arange(20) % 4


def small() -> Dataset:
    return Dataset("small", 4, PICTURES, LABELS, PICTURES[:4], LABELS[:4])


def noisy(picture: torch.Tensor) -> torch.Tensor:
    """Change a picture as a transform does: by torch's generator, and by Python's."""
    return picture + torch.rand(picture.shape) * random.random()


def drawn(dataset: Dataset, batch_size: int = 8, **length: int) -> Dataset:
    """Let samples be drawn anew in each epoch, without torchvision."""
    part = LearningPart(
        model={"name": "mlp"},
        method={"name": "single"},
        batch_size=batch_size,
        **length,
    )
    return replace(
        dataset, drawing=Drawing(noisy, 1, part, np.arange(len(dataset.train_labels)))
    )


def test_samples_are_drawn_anew_in_each_epoch_whoever_owns_them() -> None:
    whole, chosen = drawn(small(), epochs=5), np.array([3, 7])
    before = torch.random.get_rng_state(), random.getstate()
    epochs = [whole.batch(chosen, epoch) for epoch in range(5)]
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert len({each.tobytes() for each in epochs}) == 5
    part = whole.part(chosen, tests=False)
    sent = unpack(pack(part))
    assert len(sent.train_labels) == 2
    for epoch in range(7):
        expected = epochs[epoch % 5]
        assert np.array_equal(part.batch(np.array([0, 1]), epoch), expected)
        assert np.array_equal(sent.batch(np.array([1]), epoch), expected[1:])
        for each in (part, sent):
            some = each.batch(np.array([0, 1]), epoch, slice(2, 5))
            assert np.array_equal(some, expected.reshape(2, -1)[:, 2:5])


def test_augmented_copies_follow_from_the_steps_of_a_device() -> None:
    whole = drawn(small(), steps=7)
    assert len(unpack(pack(whole)).train_images) == 4 * 20  # two batches of 8 an epoch
    assert (
        len(unpack(pack(whole.part(np.arange(3), tests=False))).train_images) == 7 * 3
    )
    none = unpack(pack(whole.part(np.arange(0), tests=True)))
    assert (len(none.train_images), len(none.test_images)) == (0, 4)


def test_drawn_samples_are_the_same_wherever_a_model_is_cut_and_as_containers_have_them() -> (
    None
):
    def losses(
        method: str, change: Callable[[Dataset], Dataset], **options: int
    ) -> list[float]:
        prepared = prepare(
            trials(
                make_scenario(
                    workload={"steps": 18}, method={"name": method, **options}
                )
            )[0]
        )
        dataset = change(load_data(prepared))
        return [
            fields["loss"] for fields in fields_of(simulate(prepared, dataset), "step")
        ]

    def anew(dataset: Dataset) -> Dataset:
        return drawn(dataset, steps=18, batch_size=16)

    single = losses("single", anew)
    assert len(single) == 18
    assert losses("single", lambda dataset: unpack(pack(anew(dataset)))) == single
    assert losses("pipeline", anew, micro_batches=1) == pytest.approx(single, rel=1e-5)
    assert losses("single", lambda dataset: dataset) != pytest.approx(single, rel=1e-3)


def test_transforms_of_torchvision_are_drawn_by_the_seed() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision: the extra `vision`")

    def pictures(seed: int, epoch: int, *transforms: dict[str, object]) -> Images:
        part = DataPart(augment=AugmentPart(transforms=transforms, copies=2))
        work = LearningPart(
            model={"name": "mlp"}, method={"name": "single"}, epochs=9, data=part
        )
        found = replace(
            small(), drawing=drawing(work, seed, PICTURES.shape[1:], len(PICTURES))
        )
        return found.batch(np.arange(20), epoch)

    flips = (
        {"name": "RandomHorizontalFlip"},
        {"name": "RandomCrop", "size": 8, "padding": 1},
    )
    found = pictures(1, 0, *flips)
    assert found.shape == PICTURES.shape
    assert np.array_equal(found, pictures(1, 0, *flips))
    assert not np.array_equal(found, pictures(2, 0, *flips))
    assert not np.array_equal(found, pictures(1, 1, *flips))
    assert np.array_equal(found, pictures(1, 2, *flips))
    with pytest.raises(InputError, match="unknown torchvision transform"):
        pictures(1, 0, {"name": "Nonsense"})
    with pytest.raises(InputError, match="change their shape"):
        pictures(1, 0, {"name": "CenterCrop", "size": 5})


def test_arrays_stay_in_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_ = (PICTURES * 255).astype(np.uint8)
    for part, count in (("train", 20), ("test", 4)):
        np.save(tmp_path / f"{part}_images.npy", bytes_[:count])
        np.save(tmp_path / f"{part}_labels.npy", LABELS[:count])
    found = load(DataPart(path=str(tmp_path)))
    assert isinstance(found.train_images, np.memmap)
    assert np.allclose(found.batch(np.array([2]), 0), bytes_[[2]] / 255)
    assert np.allclose(
        found.batch(np.array([2]), 0, slice(3, 9)),
        bytes_[[2]].reshape(1, -1)[:, 3:9] / 255,
    )
    assert np.allclose(unpack(pack(found)).tests([1]), bytes_[[1]] / 255)
    (tmp_path / "test_images.npy").unlink()
    (tmp_path / "test_labels.npy").unlink()
    monkeypatch.setattr(large, "LARGE", 0)
    shared = load(DataPart(path=str(tmp_path)))
    assert isinstance(shared.train_images, np.memmap)
    assert (
        0
        < len(shared.test_images)
        < 20
        == len(shared.train_images) + len(shared.test_images)
    )


def test_features_shift_from_device_to_device() -> None:
    written = make_scenario(
        4,
        workload={"data": {"name": "digits", "train": 400, "split": {"noise": 0.5}}},
        method={"name": "federated"},
    )
    prepared = prepare(trials(written)[0])
    assert (
        sum(sum(each.values()) for each in samples_by_class(prepared).values()) == 400
    )
    dataset = load_data(prepared)
    clean = {
        name: dataset.train_images[share] for name, share in shares_of(prepared).items()
    }
    found = [
        float((samples_of(prepared, dataset, name).train_images - each).std() ** 2)
        for name, each in clean.items()
    ]
    assert found == pytest.approx(
        [0.5 * (place + 1) / len(found) for place in range(len(found))], rel=0.1
    )


def test_data_sets_of_hugging_face_are_read_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    rows = {
        "input_ids": [[1, 2], [3, 4, 5], [6]],
        "attention_mask": [[1, 1], [1, 1, 1], [1]],
        "label": [0, 1, 0],
    }
    part = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "set")
    found = load(DataPart(path=str(tmp_path / "set")))
    assert [each.name for each in found.fields] == ["input_ids", "attention_mask"]
    assert found.train_images.tolist()[0] == [1, 2, 0, 1, 1, 0]
    assert found.train_labels.tolist() == [0, 1, 0]
    one = load(
        DataPart(path=str(tmp_path / "set"), columns=["input_ids"], label="label")
    )
    assert one.shape == (3,)
    with pytest.raises(InputError, match="has no column nothing"):
        load(DataPart(path=str(tmp_path / "set"), columns=["nothing"]))
