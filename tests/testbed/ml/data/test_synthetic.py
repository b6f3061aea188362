"""Synthetic images: names, reproducible samples, separable classes, and images without memory."""

from __future__ import annotations

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data.synthetic import make, parse, train_labels


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("synthetic", (1, 8, 8), 10),
        ("synthetic-3x32x16", (3, 32, 16), 10),
        ("synthetic-3x5x7-4", (3, 5, 7), 4),
    ],
)
def test_name_contains_shape_and_classes(
    name: str, shape: tuple[int, ...], classes: int
) -> None:
    assert parse(name) == (shape, classes)
    data = make(name, 20, 10)
    assert data.shape == shape
    assert data.classes == classes
    assert len(data.train_labels) == 20
    assert len(data.test_labels) == 10
    assert 0 <= data.train_images.min() <= data.train_images.max() <= 1
    assert data.train_images.dtype == np.float32


@pytest.mark.parametrize(
    "name",
    [
        "synthetic-0x8x8",
        "synthetic-1x8x8-1",
        "synthetic-1x8",
        "synthetic-1x8x8-10-1",
        "x",
    ],
)
def test_malformed_name_is_rejected(name: str) -> None:
    with pytest.raises(InputError):
        parse(name)


def test_default_shape_and_classes_have_short_name() -> None:
    assert make("synthetic", 2, 2).name == "synthetic-1x8x8"
    assert make("synthetic-1x8x8-10", 2, 2).name == "synthetic-1x8x8"
    assert make("synthetic-1x8x8-4", 2, 2).name == "synthetic-1x8x8-4"


def test_smaller_data_set_is_prefix_of_larger_one() -> None:
    small = make("synthetic-1x8x8", 30, 5)
    large = make("synthetic-1x8x8", 300, 50)
    assert np.array_equal(small.train_images, large.train_images[:30])
    assert np.array_equal(small.test_images, large.test_images[:5])
    assert np.array_equal(small.train_labels, large.train_labels[:30])
    assert np.array_equal(train_labels("synthetic-1x8x8", 30), small.train_labels)


def test_classes_are_balanced_and_separable_by_their_means() -> None:
    data = make("synthetic-1x8x8", 1000, 500)
    assert np.bincount(data.train_labels).tolist() == [100] * 10
    means = []
    for label in range(10):
        means.append(data.train_images[data.train_labels == label].mean(0))
    offsets = data.test_images[:, None] - np.stack(means)[None]
    nearest = (offsets**2).sum((2, 3, 4)).argmin(1)
    assert (nearest == data.test_labels).mean() > 0.95
    # Test images have the classes of training images, but another noise.
    assert not np.array_equal(data.train_images[:10], data.test_images[:10])


def test_blank_images_have_labels_and_take_no_memory() -> None:
    data = make("synthetic-3x32x32", 10_000, 10, blank=True)
    assert data.train_images.shape == (10_000, 3, 32, 32)
    # With a stride of 0, all samples are the same bytes.
    assert data.train_images.strides[0] == 0
    labels = train_labels("synthetic-3x32x32", 10_000)
    assert np.array_equal(data.train_labels, labels)
