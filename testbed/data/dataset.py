"""A data set in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Dataset:
    """Images and labels, split into training and test parts."""

    name: str
    """As shown beside every figure; a synthetic set has the word in its name."""
    classes: int
    """0: it has no labels, and its arrays of labels hold zeros."""
    train_images: npt.NDArray[np.float32]
    """(samples, channels, height, width), scaled to [0, 1]."""
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]

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
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """(channels, height, width) of one image."""
        return self.train_images.shape[1:]


Images = npt.NDArray[np.float32]


def _blank(images: Images) -> Images:
    return np.broadcast_to(np.zeros((1, *images.shape[1:]), np.float32), images.shape)


def _chosen(images: Images, indices: npt.NDArray[np.int64]) -> Images:
    """Return some of the images; of blank ones, as many that take no memory either."""
    return images[: len(indices)] if len(images) and images.strides[0] == 0 else images[indices]
