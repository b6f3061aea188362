"""Readers of IDX and CIFAR-10, against files written byte by byte as their publishers describe them."""

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

SIZES = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SIZES, st.booleans())
def test_an_idx_file_has_sizes_as_big_endian_numbers_and_then_bytes(
    tmp_path: Path, sizes, zipped: bool
) -> None:
    values = list(range(int(np.prod(sizes))))
    content = bytes([0, 0, 8, 3]) + struct.pack(">III", *sizes) + bytes(values)
    path = written(
        tmp_path / f"images{'.gz' if zipped else ''}",
        gzip.compress(content) if zipped else content,
    )
    found = read_idx(path, 3)
    assert found.shape == sizes
    assert found.flatten().tolist() == values


def test_a_plain_file_is_taken_before_a_packed_one(tmp_path: Path) -> None:
    assert find(tmp_path, "images") is None
    packed = written(tmp_path / "images.gz", b"")
    assert find(tmp_path, "images") == packed
    assert (
        find(tmp_path, "images")
        != written(tmp_path / "images", b"")
        == find(tmp_path, "images")
    )


def idx(path: Path, *sizes: int, values: bytes) -> Path:
    return written(
        path,
        bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + values,
    )


def test_images_and_labels_have_to_fit(tmp_path: Path) -> None:
    images = idx(tmp_path / "images", 2, 2, 3, values=bytes(range(12)))
    pixels, labels = read_idx_pair(
        images, idx(tmp_path / "labels", 2, values=bytes([1, 9])), (2, 3), 10
    )
    assert pixels.shape == (2, 1, 2, 3)
    assert labels.tolist() == [1, 9]
    with pytest.raises(InputError, match="3 labels for the 2 images of images"):
        read_idx_pair(images, idx(tmp_path / "more", 3, values=bytes(3)), (2, 3), 10)
    with pytest.raises(InputError, match="label 9, but there are 9 classes from 0"):
        read_idx_pair(images, tmp_path / "labels", (2, 3), 9)
    with pytest.raises(InputError, match="images of 2x3 pixels, not of 3x2"):
        read_idx_pair(images, tmp_path / "labels", (3, 2), 10)
    none = (
        idx(tmp_path / "none", 0, 2, 3, values=b""),
        idx(tmp_path / "no-labels", 0, values=b""),
    )
    with pytest.raises(InputError, match="no samples"):
        read_idx_pair(*none, (2, 3), 10)


def test_sizes_of_images_are_read_from_the_header_alone(tmp_path: Path) -> None:
    """Of a file of a gigabyte only the beginning is read: what follows may even be missing."""
    path = idx(tmp_path / "images", 60000, 28, 28, values=b"")
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
            bytes([0, 0, 8, 3]) + bytes(7),
            "truncated: 11 bytes are less than the header of 16",
        ),
        (
            bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 1, 2) + bytes(3),
            "truncated: .* announces 2x1x2 bytes, 3 follow",
        ),
        (
            bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 1, 2) + bytes(5),
            "too long: .* announces 2x1x2 bytes, 5 follow",
        ),
        (
            bytes([0, 0, 8, 3]) + b"\xff" * 12,
            "truncated: .* announces 4294967295x4294967295x4294967295 bytes, 0 follow",
        ),
    ],
)
def test_malformed_idx_files_are_rejected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_idx(written(tmp_path / "images", content), 3)


def test_a_cifar_record_is_a_label_and_then_red_green_and_blue(tmp_path: Path) -> None:
    def record(label: int, *colours: int) -> bytes:
        return bytes([label]) + b"".join(bytes([colour]) * 1024 for colour in colours)

    paths = [
        written(tmp_path / "one", record(3, 10, 20, 30) + record(9, 1, 2, 3)),
        written(tmp_path / "two", record(0, 7, 8, 9)),
    ]
    images, labels = read_cifar(paths)
    assert labels.tolist() == [3, 9, 0]
    assert images.shape == (3, 3, 32, 32)
    assert images[:, :, 31, 0].tolist() == [[10, 20, 30], [1, 2, 3], [7, 8, 9]]
    with pytest.raises(InputError, match="one: label 9, but there are 9 classes"):
        read_cifar(paths, 9)
    with pytest.raises(
        InputError, match="truncated: 3072 bytes are no whole records of 3073"
    ):
        read_cifar([written(tmp_path / "cut", bytes(3072))])
    with pytest.raises(InputError, match="truncated: 0 bytes"):
        read_cifar([written(tmp_path / "empty", b"")])
