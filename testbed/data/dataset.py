"""A data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def shape(self) -> tuple[Any, ...]:
        """(channels, height, width) of one image."""
        return self.train_images.shape[1:]
