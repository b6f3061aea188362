"""Writers of published data formats, independent of the readers under test."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

UNSIGNED_BYTE = 8
"""IDX's code of the type of values."""


def encode_idx(values: np.ndarray) -> bytes:
    """Return an IDX file: two zeros, type, number of dimensions, big-endian sizes, and the values."""
    magic = bytes([0, 0, UNSIGNED_BYTE, values.ndim])
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return magic + sizes + values.astype(np.uint8).tobytes()


def draw_images(count: int) -> np.ndarray:
    """Draw MNIST-sized images with ``count`` as seed."""
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28))


def write_mnist(
    folder: Path,
    *,
    train: int | None = 6,
    test: int | None = 4,
    compressed: bool = True,
) -> None:
    """Write the files of MNIST with the given numbers of samples; None omits a part. Labels count from 0."""
    for part, count in (("train", train), ("t10k", test)):
        if count is None:
            continue
        images = encode_idx(draw_images(count))
        labels = encode_idx(np.arange(count) % 10)
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{part}-{kind}-ubyte"
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def cifar_record(label: int, red: int, green: int, blue: int) -> bytes:
    """Return a CIFAR-10 record with an image of one colour: a label and three planes of 32x32 bytes."""
    pixels = 32 * 32
    planes = bytes([red]) * pixels + bytes([green]) * pixels + bytes([blue]) * pixels
    return bytes([label]) + planes


def write_cifar(folder: Path) -> None:
    """Write the six files of CIFAR-10 with two records each, whose label is the number of the file."""
    folder.mkdir(exist_ok=True)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    names.append("test_batch")
    for index, name in enumerate(names):
        record = cifar_record(index, red=index * 10, green=1, blue=2)
        (folder / f"{name}.bin").write_bytes(record * 2)
