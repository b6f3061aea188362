"""A data set, in memory or in files larger than memory, and its safetensors encoding for devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from testbed.common.lazy import np, npt
from testbed.ml.data.augment import Drawing
from testbed.ml.fields import Fields
from testbed.wire import tensors
from testbed.wire.tensors import Buffer, TensorError

Images: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.int64]"
Labels: TypeAlias = "npt.NDArray[Any]"
"""Values of int64 or of float32."""


@dataclass(frozen=True)
class Dataset:
    """Samples and labels, split into training and test parts. Samples of any kind are called images.

    >>> from testbed.ml.data.synthetic import make
    >>> dataset = make("synthetic-1x4x4-2", train=4, test=2)
    >>> dataset.shape, len(dataset.train_labels), dataset.classes
    ((1, 4, 4), 4, 2)
    """

    name: str
    """Name shown beside every metric; names of synthetic sets contain the word."""
    classes: int
    """Number of classes, or of float32 values per label; 0 without labels, when label arrays hold zeros."""
    train_images: Images
    """(samples, channels, height, width), scaled to [0, 1]; of the user's own data (samples, ...), integers included.

    Augmented samples are transmitted as copies of all samples, for one epoch after the other. Samples in a file larger
    than memory are read when `batch` or `tests` needs some; bytes are scaled only then.
    """
    train_labels: Labels
    """(samples,) of classes from 0; of the user's own data (samples, ...), float32 included."""
    test_images: Images
    test_labels: Labels
    groups: npt.NDArray[np.int64] | None = None
    """(training samples,): the group of each sample by the split column of a table. Not sent to devices."""
    fields: Fields = ()
    """The inputs of a sample, which is then a row of numbers; empty for a single input. Not sent with the samples."""
    drawing: Drawing | None = None
    """Changes training samples anew in each epoch. Not sent: `pack` draws them for all epochs."""

    def batch(
        self,
        indices: npt.NDArray[np.int64],
        epoch: int,
        values: slice | None = None,
    ) -> Images:
        """Return training samples, (samples, ...), of an epoch; augmentation differs in each epoch.

        With ``values`` only these values of each sample, (samples, values), which is faster than selecting them later.
        """
        if self.drawing is not None:
            images = _scale_bytes(self.train_images[indices])
            return _select_values(values, self.drawing(images, indices, epoch))
        # Received augmented samples are copies of the set, one for each epoch.
        samples = len(self.train_labels)
        copies = max(1, len(self.train_images) // max(1, samples))
        copy = epoch % copies
        # The values first: the samples are copied, and only these values of them.
        images = _select_values(values, self.train_images)
        chosen: Images = images[indices + copy * samples]
        return _scale_bytes(chosen)

    def tests(self, indices: Sequence[int]) -> Images:
        """Return test samples, (samples, ...)."""
        return _scale_bytes(self.test_images[indices])

    @property
    def integers(self) -> bool:
        """Whether the samples are integers, such as tokens."""
        return self.train_images.dtype.kind == "i"

    def floats(self) -> Dataset:
        """Return a copy with samples of float32, for networks that accept no integers."""
        if not self.integers:
            return self
        return replace(
            self,
            train_images=self.train_images.astype(np.float32),
            test_images=self.test_images.astype(np.float32),
        )

    def blank(self) -> Dataset:
        """Return the same number of black samples with the same labels, for shapes only. The samples take no memory."""
        return replace(
            self,
            train_images=_blank_images(self.train_images),
            test_images=_blank_images(self.test_images),
        )

    def part(self, train: npt.NDArray[np.int64], *, tests: bool) -> Dataset:
        """Return a set of the training samples with these indices, (samples,), and all or no test samples.

        >>> import numpy as np
        >>> from testbed.ml.data.synthetic import make
        >>> dataset = make("synthetic-1x4x4-2", train=4, test=2)
        >>> part = dataset.part(np.array([0, 2]), tests=False)
        >>> len(part.train_labels), len(part.test_labels)
        (2, 0)
        """
        test = slice(None) if tests else slice(0)
        drawing = None if self.drawing is None else self.drawing.part(train)
        return replace(
            self,
            train_images=_select_images(self.train_images, train),
            train_labels=self.train_labels[train],
            test_images=self.test_images[test],
            test_labels=self.test_labels[test],
            drawing=drawing,
        )

    def drawn(self) -> Dataset:
        """Return a copy with the augmented training samples of all epochs, independent of the augmentation."""
        if self.drawing is None or not len(self.train_labels):
            return replace(self, drawing=None)
        all_indices = np.arange(len(self.train_labels))
        epochs = range(self.drawing.copies)
        parts: list[npt.NDArray[Any]] = [
            self.batch(all_indices, epoch) for epoch in epochs
        ]
        images: Images = np.concatenate(parts)
        return replace(self, train_images=images, drawing=None)

    def noisy(self, deviation: float, seed: int) -> Dataset:
        """Return a copy with Gaussian noise of a standard deviation on the training samples, as float32."""
        generator = np.random.default_rng(seed)
        noise = generator.normal(0, deviation, self.train_images.shape)
        # Added in float64 and rounded once.
        images = (_scale_bytes(self.train_images) + noise).astype(np.float32)
        return replace(self, train_images=images)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of one sample: (channels, height, width) of an image."""
        return self.train_images.shape[1:]


def _select_values(values: slice | None, images: Images) -> Images:
    """Return the selected values of each image; None returns the images unchanged. Memory is shared."""
    if values is None:
        return images
    rows = images.reshape(len(images), -1)
    return rows[:, values]


def _scale_bytes(images: Images) -> Images:
    """Return bytes scaled to [0, 1], and other values unchanged."""
    if images.dtype.kind != "u":
        return images
    # float32 / float32: a Python number would widen the values first.
    return images.astype(np.float32) / np.float32(255)


def _blank_images(images: Images) -> Images:
    """Return images of zeros with shape and type of the given ones."""
    one = np.zeros((1, *images.shape[1:]), images.dtype)
    # Strides of zero: all samples are one and the same image in memory.
    return np.broadcast_to(one, images.shape)


def _select_images(images: Images, indices: npt.NDArray[np.int64]) -> Images:
    """Return the selected images; a selection of blank images takes no memory either."""
    # `_blank_images` makes the only arrays without a stride between samples.
    is_blank = len(images) > 0 and images.strides[0] == 0
    return images[: len(indices)] if is_blank else images[indices]


_ARRAYS = {
    "train_images": ("float32", "int64", "uint8"),
    "train_labels": ("int64", "float32"),
    "test_images": ("float32", "int64", "uint8"),
    "test_labels": ("int64", "float32"),
}
"""Arrays of a transmitted data set, with the types allowed for each."""


def pack(dataset: Dataset) -> bytes:
    """Return a data set as the body of a message: its arrays, with name and number of classes as metadata.

    >>> from testbed.ml.data.synthetic import make
    >>> dataset = make("synthetic-1x4x4-2", train=4, test=2)
    >>> unpack(bytearray(pack(dataset))).train_labels
    array([0, 1, 0, 1])
    """
    dataset = dataset.drawn()
    arrays = {name: getattr(dataset, name) for name in _ARRAYS}
    metadata = {"name": dataset.name, "classes": str(dataset.classes)}
    return b"".join(tensors.write(tensors.from_numpy(arrays), metadata))


def unpack(body: Buffer) -> Dataset:
    """Read the output of `pack`; the arrays share the memory of ``body``. Raises `TensorError` for other bytes."""
    # The bytes come from the network, so everything is checked.
    raw, metadata = tensors.read(body)
    arrays = tensors.to_numpy(raw)
    has_keys = set(metadata) == {"name", "classes"}
    if not has_keys or not re.fullmatch("[0-9]{1,9}", metadata["classes"]):
        raise TensorError("a data set has a name and a number of classes")
    _check_types(arrays)
    for part in ("train", "test"):
        _check_lengths(arrays, part)
    train = arrays["train_images"]
    test = arrays["test_images"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise TensorError("training and test samples are of one shape and one type")
    given: dict[str, Any] = dict(arrays)
    return Dataset(metadata["name"], int(metadata["classes"]), **given)


def _check_types(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise `TensorError` unless exactly the arrays of a data set are given, each of a permitted type."""
    is_valid = set(arrays) == set(_ARRAYS)
    for name, array in arrays.items():
        if array.dtype.name not in _ARRAYS.get(name, ()):
            is_valid = False
    if is_valid:
        return
    wanted = []
    for name, types in _ARRAYS.items():
        wanted.append(f"{name} ({' or '.join(types)})")
    raise TensorError(f"a data set has the arrays {', '.join(wanted)}")


def _check_lengths(arrays: Mapping[str, npt.NDArray[Any]], part: str) -> None:
    """Raise `TensorError` unless the arrays of a part, "train" or "test", have as many samples as labels."""
    images = arrays[f"{part}_images"]
    labels = arrays[f"{part}_labels"]
    has_equal_lengths = len(images) == len(labels)
    if part == "train" and len(labels):
        # Augmented samples are there once for each epoch.
        has_equal_lengths = len(images) % len(labels) == 0
    if images.ndim < 2 or labels.ndim < 1 or not has_equal_lengths:
        raise TensorError(
            f"{part}_images is (samples, ...), and {part}_labels (samples, ...) with as many"
        )
