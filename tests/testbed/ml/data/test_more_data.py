"""Augmentation, arrays in files, feature noise by device, and data sets of Hugging Face."""

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


def make_dataset() -> Dataset:
    return Dataset("small", 4, PICTURES, LABELS, PICTURES[:4], LABELS[:4])


# --------------------------------------------------------------------------------------------------------- augmentation


def add_noise(picture: torch.Tensor) -> torch.Tensor:
    """Change a picture by numbers of torch's and of Python's generator, as transforms of torchvision do."""
    return picture + torch.rand(picture.shape) * random.random()


def augmented(dataset: Dataset, batch_size: int = 8, **length: int) -> Dataset:
    """Return a data set with the augmentation `add_noise`, without torchvision."""
    workload = LearningPart(
        model={"name": "mlp"},
        method={"name": "single"},
        batch_size=batch_size,
        **length,
    )
    places = np.arange(len(dataset.train_labels))
    return replace(dataset, drawing=Drawing(add_noise, 1, workload, places))


def test_augmentation_differs_between_epochs() -> None:
    dataset = augmented(make_dataset(), epochs=5)
    batches = [dataset.batch(np.array([3, 7]), epoch) for epoch in range(5)]
    assert len({images.tobytes() for images in batches}) == 5


def test_augmentation_keeps_state_of_global_generators() -> None:
    dataset = augmented(make_dataset(), epochs=5)
    torch_state = torch.random.get_rng_state()
    python_state = random.getstate()
    dataset.batch(np.array([3, 7]), 0)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_augmentation_is_independent_of_owner() -> None:
    dataset = augmented(make_dataset(), epochs=5)
    indices = np.array([3, 7])
    share = dataset.part(indices, tests=False)
    # In containers, a device has the augmented copies instead of the transform.
    unpacked = unpack(pack(share))
    assert len(unpacked.train_labels) == 2
    # Epochs 5 and 6 repeat the copies of epochs 0 and 1.
    for epoch in range(7):
        expected = dataset.batch(indices, epoch % 5)
        assert np.array_equal(share.batch(np.array([0, 1]), epoch), expected)
        assert np.array_equal(unpacked.batch(np.array([1]), epoch), expected[1:])
        for owner in (share, unpacked):
            values = owner.batch(np.array([0, 1]), epoch, slice(2, 5))
            assert np.array_equal(values, expected.reshape(2, -1)[:, 2:5])


def test_number_of_augmented_copies_follows_from_steps() -> None:
    dataset = augmented(make_dataset(), steps=7)
    # With two batches of 8 in an epoch of 20 samples, 7 steps begin 4 epochs.
    assert len(unpack(pack(dataset)).train_images) == 4 * 20
    # A device with three samples has one batch in an epoch.
    share = dataset.part(np.arange(3), tests=False)
    assert len(unpack(pack(share)).train_images) == 7 * 3


def test_device_without_training_samples_has_no_augmented_copies() -> None:
    dataset = augmented(make_dataset(), steps=7)
    unpacked = unpack(pack(dataset.part(np.arange(0), tests=True)))
    assert len(unpacked.train_images) == 0
    assert len(unpacked.test_images) == 4


def test_augmented_losses_are_independent_of_partition_and_packing() -> None:
    steps = 18

    def losses_with(
        method: str, change: Callable[[Dataset], Dataset], **options: int
    ) -> list[float]:
        (trial,) = trials(
            make_scenario(workload={"steps": steps}, method={"name": method, **options})
        )
        prepared = prepare(trial)
        run = simulate(prepared, change(load_data(prepared)))
        return [fields["loss"] for fields in fields_of(run, "step")]

    def augment(dataset: Dataset) -> Dataset:
        return augmented(dataset, steps=steps, batch_size=16)

    def augment_and_pack(dataset: Dataset) -> Dataset:
        return unpack(pack(augment(dataset)))

    def keep(dataset: Dataset) -> Dataset:
        return dataset

    single = losses_with("single", augment)
    assert len(single) == steps
    # Devices in containers receive packed data.
    assert losses_with("single", augment_and_pack) == single
    pipeline = losses_with("pipeline", augment, micro_batches=1)
    assert pipeline == pytest.approx(single, rel=1e-5)
    assert losses_with("single", keep) != pytest.approx(single, rel=1e-3)


def apply_transforms(seed: int, epoch: int, *transforms: dict[str, object]) -> Images:
    """Return all pictures in an epoch, augmented by transforms of torchvision with two copies."""
    data = DataPart(augment=AugmentPart(transforms=transforms, copies=2))
    workload = LearningPart(
        model={"name": "mlp"}, method={"name": "single"}, epochs=9, data=data
    )
    augmentation = drawing(workload, seed, PICTURES.shape[1:], len(PICTURES))
    dataset = replace(make_dataset(), drawing=augmentation)
    return dataset.batch(np.arange(20), epoch)


def test_torchvision_transforms_follow_from_seed_and_epoch() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision: the extra `vision`")
    transforms = (
        {"name": "RandomHorizontalFlip"},
        {"name": "RandomCrop", "size": 8, "padding": 1},
    )
    images = apply_transforms(1, 0, *transforms)
    assert images.shape == PICTURES.shape
    assert np.array_equal(images, apply_transforms(1, 0, *transforms))
    assert not np.array_equal(images, apply_transforms(2, 0, *transforms))
    assert not np.array_equal(images, apply_transforms(1, 1, *transforms))
    # The third epoch repeats the first of two copies.
    assert np.array_equal(images, apply_transforms(1, 2, *transforms))


def test_unsuitable_torchvision_transform_is_rejected() -> None:
    pytest.importorskip("torchvision", reason="needs torchvision: the extra `vision`")
    with pytest.raises(InputError, match="unknown torchvision transform"):
        apply_transforms(1, 0, {"name": "Nonsense"})
    with pytest.raises(InputError, match="change their shape"):
        apply_transforms(1, 0, {"name": "CenterCrop", "size": 5})


# ------------------------------------------------------------------------------------------------------ arrays in files


def write_arrays(folder: Path) -> np.ndarray:
    """Write 20 training and 4 test samples as .npy files and return the bytes of all images."""
    images = (PICTURES * 255).astype(np.uint8)
    for part, count in (("train", 20), ("test", 4)):
        np.save(folder / f"{part}_images.npy", images[:count])
        np.save(folder / f"{part}_labels.npy", LABELS[:count])
    return images


def test_arrays_of_folder_are_memory_mapped(tmp_path: Path) -> None:
    images = write_arrays(tmp_path)
    data = load(DataPart(path=str(tmp_path)))
    assert isinstance(data.train_images, np.memmap)
    # Bytes become floats from 0 to 1 in each batch, not in the whole array.
    sample = images[[2]] / 255
    assert np.allclose(data.batch(np.array([2]), 0), sample)
    values = data.batch(np.array([2]), 0, slice(3, 9))
    assert np.allclose(values, sample.reshape(1, -1)[:, 3:9])
    assert np.allclose(unpack(pack(data)).tests([1]), images[[1]] / 255)


def test_held_out_samples_of_large_arrays_are_memory_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path)
    (tmp_path / "test_images.npy").unlink()
    (tmp_path / "test_labels.npy").unlink()
    # Any array counts as large.
    monkeypatch.setattr(large, "LARGE", 0)
    data = load(DataPart(path=str(tmp_path)))
    assert isinstance(data.train_images, np.memmap)
    assert 0 < len(data.test_images) < 20
    assert len(data.train_images) + len(data.test_images) == 20


# -------------------------------------------------------------------------------------------------------- feature noise


def test_feature_noise_grows_from_device_to_device() -> None:
    variance, samples = 0.5, 400
    data = {"name": "digits", "train": samples, "split": {"noise": variance}}
    (trial,) = trials(
        make_scenario(4, workload={"data": data}, method={"name": "federated"})
    )
    prepared = prepare(trial)
    total = 0
    for counts in samples_by_class(prepared).values():
        total += sum(counts.values())
    assert total == samples
    dataset = load_data(prepared)
    shares = shares_of(prepared)
    measured = []
    for name, share in shares.items():
        noisy = samples_of(prepared, dataset, name).train_images
        noise = noisy - dataset.train_images[share]
        measured.append(float(noise.std() ** 2))
    # Device i of n has noise of the variance i/n of the given one.
    count = len(shares)
    expected = [variance * number / count for number in range(1, count + 1)]
    assert measured == pytest.approx(expected, rel=0.1)


# --------------------------------------------------------------------------------------------------------- Hugging Face


def test_hugging_face_data_set_is_read_from_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra `datasets`")
    path = str(tmp_path / "set")
    rows = {
        "input_ids": [[1, 2], [3, 4, 5], [6]],
        "attention_mask": [[1, 1], [1, 1, 1], [1]],
        "label": [0, 1, 0],
    }
    part = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=part, test=part).save_to_disk(path)
    data = load(DataPart(path=path))
    assert [field.name for field in data.fields] == ["input_ids", "attention_mask"]
    # Both inputs are padded to the three values of the longest sample.
    assert data.train_images.tolist()[0] == [1, 2, 0, 1, 1, 0]
    assert data.train_labels.tolist() == [0, 1, 0]
    one_input = load(DataPart(path=path, columns=["input_ids"], label="label"))
    assert one_input.shape == (3,)
    with pytest.raises(InputError, match="has no column nothing"):
        load(DataPart(path=path, columns=["nothing"]))
