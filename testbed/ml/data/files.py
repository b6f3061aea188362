"""Readers of published file formats: IDX (MNIST and similar sets) and CIFAR-10's binary version.

An IDX file has a header of a magic number and the size of each axis, followed by the values. A malformed file raises
`InputError` with its name and the problem.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from testbed.common.errors import InputError
from testbed.common.lazy import np, npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
"""Pixels or labels of one byte each."""

_UNSIGNED_BYTE = 0x08
"""Code of the IDX format for values of one unsigned byte."""
CIFAR_IMAGE = (3, 32, 32)
"""Channels, height and width of an image."""
_CIFAR_RECORD = 1 + math.prod(CIFAR_IMAGE)
"""Bytes of a sample: a byte for the label, then the values of the pixels."""


def find(folder: Path, name: str) -> Path | None:
    """Return the file with this name, plain or with ``.gz``; None if both are missing."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _read_content(path: Path) -> bytes:
    """Return the decompressed content of a file; raises `InputError` for unreadable and damaged files."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except EOFError as error:
        raise InputError(
            f"{path}: truncated: the gzip stream ends early; download it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path}: damaged gzip file ({error}); download it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def read_idx(path: Path, axes: int) -> Bytes:
    """Read an IDX file of unsigned bytes with a number of axes: 3 for images, 1 for labels.

    Raises `InputError` for other files.
    """
    content = _read_content(path)
    shape = _declared_sizes(path, content, axes)
    header_size = _header_bytes(axes)
    actual = len(content) - header_size
    declared = math.prod(shape)
    if actual != declared:
        sizes = "x".join(map(str, shape))
        fault = "truncated" if actual < declared else "too long"
        raise InputError(
            f"{path}: {fault}: its header announces {sizes} bytes, {actual} follow"
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)


def _header_bytes(axes: int) -> int:
    """Return the length of an IDX header in bytes."""
    magic_number = 4
    # The size of each axis has four bytes, too.
    return magic_number + 4 * axes


def check_images(path: Path, pixels: tuple[int, ...]) -> None:
    """Raise `InputError` if the header of an IDX image file declares other sizes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # The pixels are decompressed only when the set is loaded.
            header = file.read(_header_bytes(3))
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    _check_pixels(path, _declared_sizes(path, header, 3), pixels)


def _check_pixels(path: Path, shape: tuple[int, ...], pixels: tuple[int, ...]) -> None:
    """Raise `InputError` unless ``shape`` is (samples, height, width) with height and width as in ``pixels``."""
    if shape[1:] != pixels:
        actual = "x".join(map(str, shape[1:]))
        wanted = "x".join(map(str, pixels))
        raise InputError(f"{path}: has images of {actual} pixels, not of {wanted}")


def _declared_sizes(path: Path, content: bytes, axes: int) -> tuple[int, ...]:
    """Return the sizes declared by the header of an IDX file; raises `InputError` for other files."""
    header_size = _header_bytes(axes)
    # Two zeros, the type of the values, and the number of axes.
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if content[:4] != magic:
        raise InputError(
            f"{path}: wrong magic number {content[:4].hex()}: an IDX file of this kind has {magic.hex()}"
        )
    if len(content) < header_size:
        raise InputError(
            f"{path}: truncated: {len(content)} bytes are less than the header of {header_size}"
        )
    # The sizes are big-endian, and follow the magic number.
    sizes = np.frombuffer(content, ">u4", axes, offset=4)
    return tuple(int(size) for size in sizes)


def read_idx_pair(
    images: Path,
    labels: Path,
    shape: tuple[int, int],
    classes: int,
) -> tuple[Bytes, Bytes]:
    """Read images (samples, 1, height, width) and labels (samples,); raises `InputError` if their numbers differ."""
    pixels = read_idx(images, 3)
    targets = read_idx(labels, 1)
    _check_pixels(images, pixels.shape, shape)
    if len(pixels) != len(targets):
        raise InputError(
            f"{labels}: {len(targets)} labels for the {len(pixels)} images of {images.name}"
        )
    if len(targets) == 0:
        raise InputError(f"{labels}: no samples")
    _check_labels(labels, targets, classes)
    # Grey images have one channel, for which IDX has no axis.
    return pixels[:, None], targets


def _check_labels(path: Path, labels: Bytes, classes: int) -> None:
    """Raise `InputError` for labels above the number of classes."""
    if labels.max() >= classes:
        raise InputError(
            f"{path}: label {labels.max()}, but there are {classes} classes from 0"
        )


def read_cifar(paths: Sequence[Path], classes: int = 10) -> tuple[Bytes, Bytes]:
    """Read images (samples, 3, 32, 32) and labels (samples,) from the files of CIFAR-10, one file after the other.

    Raises `InputError`.
    """
    images = []
    labels = []
    for path in paths:
        content = _read_content(path)
        if not content or len(content) % _CIFAR_RECORD:
            raise InputError(
                f"{path}: truncated: {len(content)} bytes are not a multiple of a record of {_CIFAR_RECORD}"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
        targets = records[:, 0]
        _check_labels(path, targets, classes)
        labels.append(targets)
        pixels = records[:, 1:]
        images.append(pixels.reshape(-1, *CIFAR_IMAGE))
    return np.concatenate(images), np.concatenate(labels)
