"""A data set as one safetensors body: how it travels to the device that leads."""

from __future__ import annotations

from testbed.data.dataset import Dataset
from testbed.wire import tensors
from testbed.wire.tensors import Buffer, TensorError

_ARRAYS = {"train_images": "float32", "train_labels": "int64", "test_images": "float32", "test_labels": "int64"}


def pack(dataset: Dataset) -> bytes:
    """Return the body; its arrays in float32 and int64, name and number of classes as metadata."""
    arrays = {name: getattr(dataset, name) for name in _ARRAYS}
    metadata = {"name": dataset.name, "classes": str(dataset.classes)}
    return b"".join(tensors.write(tensors.from_numpy(arrays), metadata))


def unpack(body: Buffer) -> Dataset:
    """Read what `pack` wrote; the arrays share the memory of ``body``. Raises `TensorError` for anything else."""
    raw, metadata = tensors.read(body)
    arrays = tensors.to_numpy(raw)
    if set(metadata) != {"name", "classes"} or not metadata["classes"].isdecimal() or len(metadata["classes"]) > 9:
        raise TensorError("a data set has a name and a number of classes")
    if {name: array.dtype.name for name, array in arrays.items()} != _ARRAYS:
        raise TensorError(
            "a data set has the arrays " + ", ".join(f"{name} ({dtype})" for name, dtype in _ARRAYS.items())
        )
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if images.ndim != 4 or labels.shape != images.shape[:1]:
            raise TensorError(f"{part}_images has four dimensions, and {part}_labels one label for each image")
    if arrays["train_images"].shape[1:] != arrays["test_images"].shape[1:]:
        raise TensorError("training and test images are of one shape")
    return Dataset(metadata["name"], int(metadata["classes"]), **arrays)
