"""Made-up images: what their names say, and that each part of a set is what it is whatever else is asked for."""

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
    found = make(name, 20, 10)
    assert (found.shape, found.classes) == (shape, classes)
    assert (len(found.train_labels), len(found.test_labels)) == (20, 10)
    assert 0 <= found.train_images.min() <= found.train_images.max() <= 1
    assert found.train_images.dtype == np.float32


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
def test_malformed_names_are_rejected(name: str) -> None:
    with pytest.raises(InputError):
        parse(name)


def test_one_set_has_one_name() -> None:
    assert (
        make("synthetic", 2, 2).name
        == make("synthetic-1x8x8-10", 2, 2).name
        == "synthetic-1x8x8"
    )
    assert make("synthetic-1x8x8-4", 2, 2).name == "synthetic-1x8x8-4"


def test_fewer_samples_are_the_first_of_more() -> None:
    few, many = make("synthetic-1x8x8", 30, 5), make("synthetic-1x8x8", 300, 50)
    assert np.array_equal(few.train_images, many.train_images[:30])
    assert np.array_equal(few.test_images, many.test_images[:5])
    assert np.array_equal(few.train_labels, many.train_labels[:30])
    assert np.array_equal(train_labels("synthetic-1x8x8", 30), few.train_labels)


def test_all_classes_are_as_frequent_and_training_and_tests_show_the_same_ones_anew() -> (
    None
):
    found = make("synthetic-1x8x8", 1000, 500)
    assert np.bincount(found.train_labels).tolist() == [100] * 10
    centres = np.stack(
        [found.train_images[found.train_labels == each].mean(0) for each in range(10)]
    )
    distances = ((found.test_images[:, None] - centres[None]) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == found.test_labels).mean() > 0.95, (
        "the nearest class mean tells them apart"
    )
    assert not np.array_equal(found.train_images[:10], found.test_images[:10])


def test_blank_images_have_the_labels_and_take_no_memory() -> None:
    found = make("synthetic-3x32x32", 10_000, 10, blank=True)
    assert found.train_images.shape == (10_000, 3, 32, 32)
    assert found.train_images.strides[0] == 0
    assert np.array_equal(found.train_labels, train_labels("synthetic-3x32x32", 10_000))
