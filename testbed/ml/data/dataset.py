"""A data set in memory, and as one safetensors body: how it travels to the device that leads."""

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
    """Samples and their labels, split into training and test parts. Samples are called images, whatever they are."""

    name: str
    """As shown beside every figure; a synthetic set has the word in its name."""
    classes: int
    """Or, where labels are of float32, values of each; 0: it has no labels, and its arrays of labels hold zeros."""
    train_images: Images
    """(samples, channels, height, width), scaled to [0, 1]; of one's own data (samples, ...), also of whole numbers.

    Augmented ones, as they travel, are copies of all samples, for one epoch after the other. Of a file that is larger
    than memory they are read as they are asked for, bytes then as they lie there: `batch` and `tests` scale them.
    """
    train_labels: Labels
    """(samples,) of classes from 0; of one's own data (samples, ...), also of float32."""
    test_images: Images
    test_labels: Labels
    groups: npt.NDArray[np.int64] | None = None
    """(training samples,): of a table that is split by a column, which value of it each has. Not sent to devices."""
    fields: Fields = ()
    """The inputs that a sample, a row of numbers then, consists of; empty: there is one. Not sent with the samples."""
    drawing: Drawing | None = None
    """Changes training samples anew in each epoch. Not sent: `pack` draws them for all epochs."""

    def batch(self, indices: npt.NDArray[np.int64], epoch: int, values: slice | None = None) -> Images:
        """Return training samples, (samples, ...), of an epoch: each epoch sees augmented ones drawn anew.

        With ``values`` only these of the values of each, (samples, values), which is quicker than to choose them later.
        """
        if self.drawing is not None:
            return _with(values, self.drawing(_scaled(self.train_images[indices]), indices, epoch))
        samples = len(self.train_labels)
        copy = epoch % max(1, len(self.train_images) // max(1, samples))
        return _scaled(_with(values, self.train_images)[indices + copy * samples])

    def tests(self, indices: Sequence[int]) -> Images:
        """Return test samples, (samples, ...)."""
        return _scaled(self.test_images[indices])

    @property
    def integers(self) -> bool:
        """Whether the samples are whole numbers, such as tokens."""
        return self.train_images.dtype.kind == "i"

    def floats(self) -> Dataset:
        """Return the same with samples of float32, for networks that take no whole numbers."""
        if not self.integers:
            return self
        train, test = (each.astype(np.float32) for each in (self.train_images, self.test_images))
        return replace(self, train_images=train, test_images=test)

    def blank(self) -> Dataset:
        """Return as many samples of the same labels, all black: for what asks for shapes alone. They take no memory."""
        return replace(self, train_images=_blank(self.train_images), test_images=_blank(self.test_images))

    def part(self, train: npt.NDArray[np.int64], tests: bool) -> Dataset:
        """Return a set with these training samples alone, (samples,) by their indices, and all or no test samples."""
        test = slice(None) if tests else slice(0)
        return replace(
            self,
            train_images=_chosen(self.train_images, train),
            train_labels=self.train_labels[train],
            test_images=self.test_images[test],
            test_labels=self.test_labels[test],
            drawing=self.drawing and self.drawing.part(train),
        )

    def drawn(self) -> Dataset:
        """Return the same with its training samples drawn for all epochs, so that what draws them is not needed."""
        if self.drawing is None or not len(self.train_labels):
            return replace(self, drawing=None)
        every = np.arange(len(self.train_labels))
        copies: Images = np.concatenate([self.batch(every, epoch) for epoch in range(self.drawing.copies)])
        return replace(self, train_images=copies, drawing=None)

    def noisy(self, deviation: float, seed: int) -> Dataset:
        """Return the same with Gaussian noise of a standard deviation on the training samples, of float32."""
        noise = np.random.default_rng(seed).normal(0, deviation, self.train_images.shape)
        return replace(self, train_images=(_scaled(self.train_images) + noise).astype(np.float32))

    @property
    def shape(self) -> tuple[Any, ...]:
        """Shape of one sample: (channels, height, width) of an image."""
        return self.train_images.shape[1:]


def _with(values: slice | None, images: Images) -> Images:
    """Return some values of each image; None: the images as they are. They share memory."""
    return images if values is None else images.reshape(len(images), -1)[:, values]


def _scaled(images: Images) -> Images:
    return images.astype(np.float32) / np.float32(255) if images.dtype.kind == "u" else images


def _blank(images: Images) -> Images:
    return np.broadcast_to(np.zeros((1, *images.shape[1:]), images.dtype), images.shape)


def _chosen(images: Images, indices: npt.NDArray[np.int64]) -> Images:
    """Return some of the images; of blank ones, as many that take no memory either."""
    return images[: len(indices)] if len(images) and images.strides[0] == 0 else images[indices]


_ARRAYS = {
    "train_images": ("float32", "int64", "uint8"),
    "train_labels": ("int64", "float32"),
    "test_images": ("float32", "int64", "uint8"),
    "test_labels": ("int64", "float32"),
}
"""The types that each may have."""


def pack(dataset: Dataset) -> bytes:
    """Return the body: its arrays, and as metadata its name and number of classes."""
    dataset = dataset.drawn()
    arrays = {name: getattr(dataset, name) for name in _ARRAYS}
    metadata = {"name": dataset.name, "classes": str(dataset.classes)}
    return b"".join(tensors.write(tensors.from_numpy(arrays), metadata))


def unpack(body: Buffer) -> Dataset:
    """Read what `pack` wrote; the arrays share the memory of ``body``. Raises `TensorError` for anything else."""
    raw, metadata = tensors.read(body)
    arrays = tensors.to_numpy(raw)
    if set(metadata) != {"name", "classes"} or not re.fullmatch("[0-9]{1,9}", metadata["classes"]):
        raise TensorError("a data set has a name and a number of classes")
    _check_types(arrays)
    for part in ("train", "test"):
        _check_lengths(arrays, part)
    train, test = arrays["train_images"], arrays["test_images"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise TensorError("training and test samples are of one shape and one type")
    given: dict[str, Any] = dict(arrays)
    return Dataset(metadata["name"], int(metadata["classes"]), **given)


def _check_types(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    if set(arrays) == set(_ARRAYS) and all(array.dtype.name in _ARRAYS[name] for name, array in arrays.items()):
        return
    wanted = ", ".join(f"{name} ({' or '.join(types)})" for name, types in _ARRAYS.items())
    raise TensorError(f"a data set has the arrays {wanted}")


def _check_lengths(arrays: Mapping[str, npt.NDArray[Any]], part: str) -> None:
    images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    fits = len(images) == len(labels)
    if part == "train" and len(labels):
        fits = len(images) % len(labels) == 0  # augmented samples are there once for each epoch
    if images.ndim < 2 or labels.ndim < 1 or not fits:
        raise TensorError(f"{part}_images is (samples, ...), and {part}_labels (samples, ...) with as many")
