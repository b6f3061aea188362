"""A data set as one safetensors body: how it travels to the device that leads."""

from __future__ import annotations

from typing import Any

from testbed.data.dataset import Dataset
from testbed.wire import tensors
from testbed.wire.tensors import Buffer, TensorError

_ARRAYS = {
    "train_images": ("float32", "int64", "uint8"),
    "train_labels": ("int64", "float32"),
    "test_images": ("float32", "int64", "uint8"),
    "test_labels": ("int64", "float32"),
}
"""The types that each may have."""


def pack(dataset: Dataset) -> bytes:
    """Return the body: its arrays, and as metadata its name and number of classes."""
    arrays = {name: getattr(dataset, name) for name in _ARRAYS}
    metadata = {"name": dataset.name, "classes": str(dataset.classes)}
    return b"".join(tensors.write(tensors.from_numpy(arrays), metadata))


def unpack(body: Buffer) -> Dataset:
    """Read what `pack` wrote; the arrays share the memory of ``body``. Raises `TensorError` for anything else."""
    raw, metadata = tensors.read(body)
    arrays = tensors.to_numpy(raw)
    if set(metadata) != {"name", "classes"} or not metadata["classes"].isdecimal() or len(metadata["classes"]) > 9:
        raise TensorError("a data set has a name and a number of classes")
    if set(arrays) != set(_ARRAYS) or any(array.dtype.name not in _ARRAYS[name] for name, array in arrays.items()):
        wanted = ", ".join(f"{name} ({' or '.join(types)})" for name, types in _ARRAYS.items())
        raise TensorError(f"a data set has the arrays {wanted}")
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        copies = part == "train" and len(labels) > 0 and len(images) % len(labels) == 0  # augmented
        if images.ndim < 2 or labels.ndim < 1 or not (copies or len(labels) == len(images)):
            raise TensorError(f"{part}_images is (samples, ...), and {part}_labels (samples, ...) with as many")
    train, test = arrays["train_images"], arrays["test_images"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise TensorError("training and test samples are of one shape and one type")
    given: dict[str, Any] = dict(arrays)
    return Dataset(metadata["name"], int(metadata["classes"]), **given)
