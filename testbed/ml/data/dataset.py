"""A data set, in memory or in files larger than memory, and its encoding as safetensors for devices.

The controller reads a set as a `Dataset`, gives each device a subset of the training samples, and sends the subset as
bytes: `pack` writes them, `unpack` reads them on the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from testbed.common.lazy import np, npt
from testbed.ml.data.augment import Augmentation
from testbed.ml.fields import Fields
from testbed.wire import tensors
from testbed.wire.tensors import Buffer, TensorError

Images: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.int64]"
"""Samples of any kind, (samples, ...). Bytes, as in a file larger than memory, become float32 when they are read."""
Labels: TypeAlias = "npt.NDArray[Any]"
"""(samples, ...) of int64 for classes, or of float32 for values to predict."""


@dataclass(frozen=True)
class Dataset:
    """Training and test samples with their labels. Samples of any kind are called images.

    >>> from testbed.ml.data.synthetic import make
    >>> dataset = make("synthetic-1x4x4-2", train=4, test=2)
    >>> dataset.shape, len(dataset.train_labels), dataset.classes
    ((1, 4, 4), 4, 2)
    """

    name: str
    """Name shown beside every metric; names of synthetic sets contain the word."""
    classes: int
    """Number of classes, or of float32 values per label; 0 without labels, when the arrays of labels are zeros."""
    train_images: Images
    """(samples, channels, height, width), scaled to [0, 1]; the user's own data may be (samples, ...) and integers.

    A file larger than memory is read by `batch` and `test_batch`, for the requested samples alone; bytes are scaled
    then. On a device that received augmented samples, the array has a copy of all samples for each epoch.
    """
    train_labels: Labels
    """(samples,) of classes from 0; the user's own data may be (samples, ...) and float32."""
    test_images: Images
    test_labels: Labels
    groups: npt.NDArray[np.int64] | None = None
    """(training samples,): a number for each value of the column by which samples are split. Not sent to devices."""
    fields: Fields = ()
    """The inputs of a sample, which is then a row of numbers; empty for a single input. Not sent with the samples."""
    augmentation: Augmentation | None = None
    """Changes training samples at random in each epoch. Not sent: `pack` writes the changed samples of all epochs."""

    def batch(
        self,
        indices: npt.NDArray[np.int64],
        epoch: int,
        values: slice | None = None,
    ) -> Images:
        """Return training samples, (samples, ...), of an epoch; augmentation differs in each epoch.

        With ``values``, the result is these values of each flattened sample, (samples, values). This is faster than a
        selection from the result.
        """
        if self.augmentation is not None:
            images = _scale_bytes(self.train_images[indices])
            return _select_values(values, self.augmentation(images, indices, epoch))
        # Received augmented samples are copies of the set, one for each epoch.
        samples = len(self.train_labels)
        # A set of test samples alone has no training samples, and no copies of them.
        copies = max(1, len(self.train_images) // max(1, samples))
        copy = epoch % copies
        # The selection of values shares memory, so the selection of samples after it copies only these values.
        images = _select_values(values, self.train_images)
        selected: Images = images[indices + copy * samples]
        return _scale_bytes(selected)

    def test_batch(self, indices: Sequence[int]) -> Images:
        """Return the test samples with these indices, (samples, ...)."""
        return _scale_bytes(self.test_images[indices])

    @property
    def integers(self) -> bool:
        """Whether the samples are integers, such as tokens."""
        return self.train_images.dtype.kind == "i"

    def with_floats(self) -> Dataset:
        """Return a copy with samples of float32, for networks accepting no integers."""
        if not self.integers:
            return self
        return replace(
            self,
            train_images=self.train_images.astype(np.float32),
            test_images=self.test_images.astype(np.float32),
        )

    def blank(self) -> Dataset:
        """Return a copy with zeros for all values of the samples, for runs requiring shapes only.

        The labels stay, and the samples take no memory.
        """
        return replace(
            self,
            train_images=_blank_images(self.train_images),
            test_images=_blank_images(self.test_images),
        )

    def subset(self, indices: npt.NDArray[np.int64], *, tests: bool) -> Dataset:
        """Return a set of the training samples with these indices, (samples,), and all or no test samples.

        >>> import numpy as np
        >>> from testbed.ml.data.synthetic import make
        >>> dataset = make("synthetic-1x4x4-2", train=4, test=2)
        >>> subset = dataset.subset(np.array([0, 2]), tests=False)
        >>> len(subset.train_labels), len(subset.test_labels)
        (2, 0)
        """
        all_or_none = slice(None) if tests else slice(0)
        augmentation = self.augmentation
        if augmentation is not None:
            augmentation = augmentation.subset(indices)
        return replace(
            self,
            train_images=_select_images(self.train_images, indices),
            train_labels=self.train_labels[indices],
            test_images=self.test_images[all_or_none],
            test_labels=self.test_labels[all_or_none],
            augmentation=augmentation,
        )

    def with_augmented_copies(self) -> Dataset:
        """Return a set with the augmented training samples of all epochs, and without the augmentation."""
        if self.augmentation is None or not len(self.train_labels):
            return replace(self, augmentation=None)
        all_indices = np.arange(len(self.train_labels))
        copies: list[npt.NDArray[Any]] = []
        for epoch in range(self.augmentation.copies):
            copies.append(self.batch(all_indices, epoch))
        images: Images = np.concatenate(copies)
        return replace(self, train_images=images, augmentation=None)

    def with_noise(self, deviation: float, seed: int) -> Dataset:
        """Return a copy with Gaussian noise of the given standard deviation on the training samples, as float32."""
        generator = np.random.default_rng(seed)
        noise = generator.normal(0, deviation, self.train_images.shape)
        # The sum is computed in float64, so it is rounded only once.
        images = (_scale_bytes(self.train_images) + noise).astype(np.float32)
        return replace(self, train_images=images)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of one sample: (channels, height, width) of an image."""
        return self.train_images.shape[1:]


def _select_values(values: slice | None, images: Images) -> Images:
    """Return the selected values of each flattened image; None returns the images unchanged. Memory is shared."""
    if values is None:
        return images
    rows = images.reshape(len(images), -1)
    return rows[:, values]


def _scale_bytes(images: Images) -> Images:
    """Return bytes scaled to [0, 1], and other values unchanged."""
    if images.dtype.kind != "u":
        return images
    # 255 as float32 keeps the result in float32.
    return images.astype(np.float32) / np.float32(255)


def _blank_images(images: Images) -> Images:
    """Return images of zeros with the shape and type of ``images``."""
    one_image = np.zeros((1, *images.shape[1:]), images.dtype)
    # `broadcast_to` sets the stride between samples to zero: all samples are the same image in memory.
    return np.broadcast_to(one_image, images.shape)


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
    """Return a data set as the body of a message: the arrays, with name and number of classes as metadata.

    >>> from testbed.ml.data.synthetic import make
    >>> dataset = make("synthetic-1x4x4-2", train=4, test=2)
    >>> unpack(bytearray(pack(dataset))).train_labels
    array([0, 1, 0, 1])
    """
    dataset = dataset.with_augmented_copies()
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
        raise TensorError("a data set needs a name and a number of classes as metadata")
    _check_types(arrays)
    _check_lengths(arrays, "train")
    _check_lengths(arrays, "test")
    train = arrays["train_images"]
    test = arrays["test_images"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise TensorError("training and test samples must have one shape and one type")
    array_fields: dict[str, Any] = dict(arrays)
    return Dataset(metadata["name"], int(metadata["classes"]), **array_fields)


def _check_types(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise `TensorError` unless the arrays have the names and permitted types of a data set's arrays."""
    is_valid = set(arrays) == set(_ARRAYS)
    for name, array in arrays.items():
        if array.dtype.name not in _ARRAYS.get(name, ()):
            is_valid = False
    if is_valid:
        return
    permitted = []
    for name, types in _ARRAYS.items():
        permitted.append(f"{name} ({' or '.join(types)})")
    raise TensorError(f"a data set needs the arrays {', '.join(permitted)}")


def _check_lengths(
    arrays: Mapping[str, npt.NDArray[Any]], prefix: Literal["train", "test"]
) -> None:
    """Raise `TensorError` unless each training or test sample has a label."""
    images = arrays[f"{prefix}_images"]
    labels = arrays[f"{prefix}_labels"]
    has_equal_lengths = len(images) == len(labels)
    if prefix == "train" and len(labels):
        # Augmented samples have a copy for each epoch, and the copies have common labels.
        has_equal_lengths = len(images) % len(labels) == 0
    if images.ndim < 2 or labels.ndim < 1 or not has_equal_lengths:
        raise TensorError(
            f"{prefix}_images and {prefix}_labels must be (samples, ...) with equal numbers of samples"
        )
