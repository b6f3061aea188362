"""Synthetic images with learnable classes: a prototype for each class, plus noise.

They serve shapes and sizes missing from real sets, and timing. They must never pass as real data, so their set name,
and every metric label derived from the set, begins with ``synthetic``.
"""

from __future__ import annotations

import re

from testbed.common.errors import InputError
from testbed.common.lazy import np, npt
from testbed.common.seeds import derive
from testbed.ml.data.dataset import Dataset

_NAME = re.compile(r"synthetic(?:-(\d+)x(\d+)x(\d+)(?:-(\d+))?)?\Z")
_BLOCK = 4
_NOISE = 0.25
TRAIN, TEST = 2000, 500


def parse(name: str) -> tuple[tuple[int, int, int], int]:
    """Return shape and classes of ``synthetic[-CxHxW[-CLASSES]]``, by default 1x8x8 and 10; raises `InputError`."""
    match = _NAME.match(name)
    if match is None:
        raise InputError(
            f"'{name}' is not synthetic-CxHxW or synthetic-CxHxW-CLASSES",
            ("data", "name"),
        )
    channels, height, width, classes = (
        int(text or default)
        for text, default in zip(match.groups(), (1, 8, 8, 10), strict=True)
    )
    if min(channels, height, width) < 1 or classes < 2:
        raise InputError(
            f"'{name}' needs sizes of at least 1 and at least 2 classes",
            ("data", "name"),
        )
    return (channels, height, width), classes


def train_labels(name: str, train: int | None) -> npt.NDArray[np.int64]:
    """Return the labels of the set's training samples, (samples,), without making the samples."""
    return _class_labels(train or TRAIN, parse(name)[1])


def _class_labels(count: int, classes: int) -> npt.NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) % classes


def make(
    name: str, train: int | None, test: int | None, blank: bool = False
) -> Dataset:
    """Generate the set of this name, independent of the scenario's seed; ``blank``: labels with black images."""
    shape, classes = parse(name)
    channels, height, width = shape
    generator = np.random.default_rng(
        derive(0, "synthetic", "prototypes", *shape, classes)
    )
    # Blocks of equal pixels, so that convolution and pooling leave something to distinguish the classes by.
    coarse = generator.random(
        (classes, channels, -(-height // _BLOCK), -(-width // _BLOCK)), dtype=np.float32
    )
    prototypes = coarse.repeat(_BLOCK, axis=2).repeat(_BLOCK, axis=3)[
        :, :, :height, :width
    ]

    def draw(
        part: str, count: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        noise = np.random.default_rng(derive(0, "synthetic", part, *shape, classes))
        labels = _class_labels(count, classes)
        if blank:
            return np.broadcast_to(
                np.zeros((1, *shape), np.float32), (count, *shape)
            ), labels
        images = prototypes[labels]
        images += np.float32(_NOISE) * noise.standard_normal(
            images.shape, dtype=np.float32
        )
        return images.clip(0, 1, out=images), labels

    full = f"synthetic-{channels}x{height}x{width}" + (
        f"-{classes}" if classes != 10 else ""
    )
    return Dataset(
        full, classes, *draw("train", train or TRAIN), *draw("test", test or TEST)
    )
