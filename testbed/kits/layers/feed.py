"""What the lead feeds into a model: training batches, and the requests of an inference workload."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from testbed.common.lazy import torch
from testbed.data.batches import batch, steps_per_epoch
from testbed.data.dataset import Dataset
from testbed.workload import WorkloadPart


class Training:
    """The batches of every training step; a step that is done again sees the same samples."""

    def __init__(self, dataset: Dataset, workload: WorkloadPart, seed: int) -> None:
        self._dataset = dataset
        self._size = workload.batch_size
        self._seed = seed if workload.data.shuffle else None
        self._samples = len(dataset.train_labels)
        per_epoch = steps_per_epoch(self._samples, self._size)
        self.steps = workload.steps if workload.steps is not None else (workload.epochs or 0) * per_epoch
        """Training steps of the whole workload."""

    @property
    def samples(self) -> int:
        """Samples of one batch."""
        return min(self._size, self._samples)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples, (samples, ...), and labels, (samples,), of a step counted from 0.

        Of images the samples are (samples, channels, height, width).
        """
        epoch = step // steps_per_epoch(self._samples, self._size)
        return torch.from_numpy(self._dataset.batch(self._chosen(step), epoch)), self.labels(step)

    def labels(self, step: int) -> torch.Tensor:
        """Return the labels of a step, (samples,)."""
        return torch.from_numpy(self._dataset.train_labels[self._chosen(step)])

    def _chosen(self, step: int) -> npt.NDArray[np.int64]:
        return batch(self._samples, self._size, self._seed, step)


class Requests:
    """Batches of test samples, from the first on: ``count`` full ones, round and round, or one pass over all."""

    def __init__(self, dataset: Dataset, batch_size: int, count: int | None = None) -> None:
        self._dataset = dataset
        self._size = batch_size
        self._round = count is not None
        self._count = math.ceil(len(dataset.test_labels) / batch_size) if count is None else count

    def __len__(self) -> int:
        return self._count

    @property
    def labelled(self) -> bool:
        """Whether it is known what the answers should be."""
        return self._dataset.classes > 0

    def samples(self, index: int) -> list[int]:
        """Return which test samples one request is about."""
        there = len(self._dataset.test_labels)
        wanted = range(index * self._size, (index + 1) * self._size)
        return [at % there for at in wanted] if self._round else [at for at in wanted if at < there]

    def images(self, index: int) -> torch.Tensor:
        """Return the samples of one request, (samples, ...); of images (samples, channels, height, width)."""
        return torch.from_numpy(self._dataset.tests(self.samples(index)))

    def labels(self, index: int) -> npt.NDArray[Any]:
        """Return the labels that belong to one request's images, (samples, ...)."""
        return self._dataset.test_labels[self.samples(index)]
