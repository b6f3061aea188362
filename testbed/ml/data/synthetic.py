"""Synthetic images with learnable classes: a prototype for each class, plus noise.

Synthetic images serve measurements of time, and shapes and numbers of samples that real sets lack. No result may pass
as one of real data, so the names of these sets, which reports show, begin with ``synthetic``.
"""

from __future__ import annotations

import math
import re

from testbed.common.errors import InputError
from testbed.common.lazy import np, npt
from testbed.common.seeds import derive
from testbed.ml.data.dataset import Dataset

_NAME = re.compile(r"synthetic(?:-(\d+)x(\d+)x(\d+)(?:-(\d+))?)?\Z")
"""synthetic, synthetic-CHANNELSxHEIGHTxWIDTH or synthetic-CHANNELSxHEIGHTxWIDTH-CLASSES."""
_BLOCK = 4
"""Side, in pixels, of the squares of equal pixels in a prototype."""
_NOISE = 0.25
"""Standard deviation of the noise, for pixels in [0, 1]: a small network learns, and needs some epochs."""
TRAIN, TEST = 2000, 500
"""Number of training and test samples if the scenario gives none: a small network learns them in seconds."""


def parse(name: str) -> tuple[tuple[int, int, int], int]:
    """Return shape and classes of ``synthetic[-CxHxW[-CLASSES]]``, by default 1x8x8 and 10; raises `InputError`.

    >>> parse("synthetic-3x32x32-100")
    ((3, 32, 32), 100)
    """
    match = _NAME.match(name)
    if match is None:
        raise InputError(
            f"'{name}' must be synthetic-CxHxW or synthetic-CxHxW-CLASSES, such as synthetic-1x8x8",
            ("data", "name"),
        )
    defaults = (1, 8, 8, 10)
    numbers = []
    for text, default in zip(match.groups(), defaults, strict=True):
        numbers.append(int(text or default))
    channels, height, width, classes = numbers
    if min(channels, height, width) < 1 or classes < 2:
        raise InputError(
            f"'{name}' needs sizes of at least 1 and at least 2 classes",
            ("data", "name"),
        )
    return (channels, height, width), classes


def train_labels(name: str, train: int | None) -> npt.NDArray[np.int64]:
    """Return the labels of the set's training samples, (samples,), without making the samples."""
    _, classes = parse(name)
    return _class_labels(train or TRAIN, classes)


def _class_labels(count: int, classes: int) -> npt.NDArray[np.int64]:
    # The classes take turns, so that any number of first samples has equally many of each class.
    return np.arange(count, dtype=np.int64) % classes


def make(
    name: str,
    train: int | None,
    test: int | None,
    *,
    blank: bool = False,
) -> Dataset:
    """Generate the set of a name such as synthetic-1x4x4-2, which does not depend on the scenario's seed.

    ``train`` and ``test`` are numbers of samples, None for the defaults `TRAIN` and `TEST`. With ``blank``, the images
    are black and only the labels are generated. Raises `InputError` for an invalid name.

    >>> make("synthetic-1x4x4-2", train=4, test=2).train_labels
    array([0, 1, 0, 1])
    """
    shape, classes = parse(name)
    channels, height, width = shape
    prototypes = _class_prototypes(shape, classes)

    def generate(
        subset: str, count: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        labels = _class_labels(count, classes)
        if blank:
            black = np.zeros((1, *shape), np.float32)
            # All samples share the memory of one image.
            return np.broadcast_to(black, (count, *shape)), labels
        generator = np.random.default_rng(
            derive(0, "synthetic", subset, *shape, classes)
        )
        images = prototypes[labels]
        noise = generator.standard_normal(images.shape, dtype=np.float32)
        images += np.float32(_NOISE) * noise
        return images.clip(0, 1, out=images), labels

    full_name = f"synthetic-{channels}x{height}x{width}"
    if classes != 10:
        full_name += f"-{classes}"
    train_images, train_labels = generate("train", train or TRAIN)
    test_images, test_labels = generate("test", test or TEST)
    return Dataset(
        full_name, classes, train_images, train_labels, test_images, test_labels
    )


def _class_prototypes(
    shape: tuple[int, int, int], classes: int
) -> npt.NDArray[np.float32]:
    """Return an image for each class, (classes, channels, height, width)."""
    channels, height, width = shape
    generator = np.random.default_rng(
        derive(0, "synthetic", "prototypes", *shape, classes)
    )
    # With blocks of equal pixels, classes differ even after convolution and pooling. Blocks at the lower and right edge
    # may be incomplete, so their number is rounded up.
    rows = math.ceil(height / _BLOCK)
    columns = math.ceil(width / _BLOCK)
    coarse = generator.random((classes, channels, rows, columns), dtype=np.float32)
    prototypes = coarse.repeat(_BLOCK, axis=2).repeat(_BLOCK, axis=3)
    return prototypes[:, :, :height, :width]
