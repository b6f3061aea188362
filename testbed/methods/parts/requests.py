"""What an inference workload sends: batches of test samples, from the first on and round again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from testbed.data.dataset import Dataset
from testbed.scenario.schema import WorkloadPart

if TYPE_CHECKING:
    import torch


class Requests:
    """The images of every request. As many as the workload says, or one pass over the test part."""

    def __init__(self, dataset: Dataset, batch_size: int, count: int | None = None) -> None:
        self._dataset = dataset
        self._size = batch_size
        self._pass = math.ceil(len(dataset.test_labels) / batch_size)
        self._count = self._pass if count is None else count

    @staticmethod
    def of(dataset: Dataset, workload: WorkloadPart) -> Requests:
        """Return those of an inference workload."""
        return Requests(dataset, workload.batch_size, workload.requests)

    def __len__(self) -> int:
        return self._count

    def images(self, index: int) -> torch.Tensor:
        """Return the images of one request, as (samples, channels, height, width)."""
        import torch

        return torch.from_numpy(self._dataset.test_images[self._slice(index)])

    def labels(self, index: int) -> npt.NDArray[np.int64]:
        """Return the labels that belong to one request's images."""
        return self._dataset.test_labels[self._slice(index)]

    def _slice(self, index: int) -> slice:
        start = index % self._pass * self._size
        return slice(start, start + self._size)
