"""Readers of IDX and CIFAR-10 files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.ml.data.files import (
    check_images,
    find,
    read_cifar,
    read_idx,
    read_idx_pair,
)
from tests.testbed.ml.data.writers import cifar_record, encode_idx

SIZES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))
MAGIC = bytes([0, 0, 8, 3])
"""Magic number of IDX files with bytes in three dimensions."""


def write_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Each example overwrites the file of the last one.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=SIZES, compressed=st.booleans())
def test_idx_file_holds_big_endian_sizes_before_values(
    tmp_path: Path, sizes: tuple[int, int, int], compressed: bool
) -> None:
    values = list(range(int(np.prod(sizes))))
    content = MAGIC + struct.pack(">III", *sizes) + bytes(values)
    if compressed:
        path = write_file(tmp_path / "images.gz", gzip.compress(content))
    else:
        path = write_file(tmp_path / "images", content)
    array = read_idx(path, 3)
    assert array.shape == sizes
    assert array.flatten().tolist() == values


def test_uncompressed_file_precedes_compressed_one(tmp_path: Path) -> None:
    assert find(tmp_path, "images") is None
    compressed = write_file(tmp_path / "images.gz", b"")
    assert find(tmp_path, "images") == compressed
    uncompressed = write_file(tmp_path / "images", b"")
    assert find(tmp_path, "images") == uncompressed


def write_idx(path: Path, values: np.ndarray) -> Path:
    return write_file(path, encode_idx(values))


def test_images_and_labels_are_read_in_pairs(tmp_path: Path) -> None:
    images = write_idx(tmp_path / "images", np.arange(12).reshape(2, 2, 3))
    labels = write_idx(tmp_path / "labels", np.array([1, 9]))
    pixels, classes = read_idx_pair(images, labels, (2, 3), 10)
    assert pixels.shape == (2, 1, 2, 3)
    assert classes.tolist() == [1, 9]


def test_mismatched_images_and_labels_are_rejected(tmp_path: Path) -> None:
    images = write_idx(tmp_path / "images", np.arange(12).reshape(2, 2, 3))
    labels = write_idx(tmp_path / "labels", np.array([1, 9]))
    more_labels = write_idx(tmp_path / "more", np.zeros(3))
    with pytest.raises(InputError, match="3 labels for the 2 images of images"):
        read_idx_pair(images, more_labels, (2, 3), 10)
    with pytest.raises(InputError, match="label 9, but there are 9 classes from 0"):
        read_idx_pair(images, labels, (2, 3), 9)
    with pytest.raises(InputError, match="images of 2x3 pixels, not of 3x2"):
        read_idx_pair(images, labels, (3, 2), 10)


def test_files_without_samples_are_rejected(tmp_path: Path) -> None:
    images = write_idx(tmp_path / "images", np.zeros((0, 2, 3)))
    labels = write_idx(tmp_path / "labels", np.zeros(0))
    with pytest.raises(InputError, match="no samples"):
        read_idx_pair(images, labels, (2, 3), 10)


def test_image_sizes_are_checked_by_header_alone(tmp_path: Path) -> None:
    # The pixels are missing, since a file of gigabytes must not be read.
    header = MAGIC + struct.pack(">III", 60000, 28, 28)
    path = write_file(tmp_path / "images", header)
    check_images(path, (28, 28))
    with pytest.raises(InputError, match="has images of 28x28 pixels, not of 32x32"):
        check_images(path, (32, 32))
    with pytest.raises(InputError, match="cannot be read"):
        check_images(tmp_path / "nowhere", (28, 28))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "wrong magic number : an IDX file of this kind has 00000803"),
        (bytes([0, 0, 8, 1]) + bytes(8), "wrong magic number 00000801"),
        (bytes([0, 0, 13, 3]) + bytes(12), "wrong magic number 00000d03"),
        (
            MAGIC + bytes(7),
            "truncated: 11 bytes are less than the header of 16",
        ),
        (
            MAGIC + struct.pack(">III", 2, 1, 2) + bytes(3),
            "truncated: .* announces 2x1x2 bytes, 3 follow",
        ),
        (
            MAGIC + struct.pack(">III", 2, 1, 2) + bytes(5),
            "too long: .* announces 2x1x2 bytes, 5 follow",
        ),
        # The product of these sizes exceeds 64 bits.
        (
            MAGIC + b"\xff" * 12,
            "truncated: .* announces 4294967295x4294967295x4294967295 bytes, 0 follow",
        ),
    ],
    ids=[
        "empty",
        "one-dimension",
        "floats",
        "truncated-header",
        "truncated",
        "too-long",
        "huge-sizes",
    ],
)
def test_malformed_idx_file_is_rejected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = write_file(tmp_path / "images", content)
    with pytest.raises(InputError, match=message):
        read_idx(path, 3)


def write_cifar_pair(folder: Path) -> list[Path]:
    first = cifar_record(3, 10, 20, 30) + cifar_record(9, 1, 2, 3)
    second = cifar_record(0, 7, 8, 9)
    return [write_file(folder / "one", first), write_file(folder / "two", second)]


def test_cifar_record_holds_label_and_planes_of_three_colours(tmp_path: Path) -> None:
    images, labels = read_cifar(write_cifar_pair(tmp_path))
    assert labels.tolist() == [3, 9, 0]
    assert images.shape == (3, 3, 32, 32)
    assert images[:, :, 31, 0].tolist() == [[10, 20, 30], [1, 2, 3], [7, 8, 9]]


def test_malformed_cifar_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one: label 9, but there are 9 classes"):
        read_cifar(write_cifar_pair(tmp_path), 9)
    message = "truncated: 3072 bytes are not a multiple of a record of 3073"
    with pytest.raises(InputError, match=message):
        read_cifar([write_file(tmp_path / "cut", bytes(3072))])
    with pytest.raises(InputError, match="truncated: 0 bytes"):
        read_cifar([write_file(tmp_path / "empty", b"")])
