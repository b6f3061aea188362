"""Augmentation: random numbers by seed and epoch, copies for devices, and torchvision's transforms."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from testbed.common.errors import InputError
from testbed.ml.data.augment import Augmentation, make_augmentation
from testbed.ml.data.dataset import Dataset, Images, pack, unpack
from testbed.ml.preparation import load_data
from testbed.ml.workload import AugmentPart, DataPart, LearningPart
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario

PICTURES = np.random.default_rng(1).random((20, 1, 8, 8)).astype(np.float32)
LABELS = np.arange(20) % 4


def make_dataset() -> Dataset:
    return Dataset("small", 4, PICTURES, LABELS, PICTURES[:4], LABELS[:4])


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
    return replace(dataset, augmentation=Augmentation(add_noise, 1, workload, places))


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
    share = dataset.subset(indices, tests=False)
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
    share = dataset.subset(np.arange(3), tests=False)
    assert len(unpack(pack(share)).train_images) == 7 * 3


def test_device_without_training_samples_has_no_augmented_copies() -> None:
    dataset = augmented(make_dataset(), steps=7)
    unpacked = unpack(pack(dataset.subset(np.arange(0), tests=True)))
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
    augmentation = make_augmentation(workload, seed, PICTURES.shape[1:], len(PICTURES))
    dataset = replace(make_dataset(), augmentation=augmentation)
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
