"""Test runs: all test samples pass ``runs`` times, each time over the links as they are then."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from testbed.data.dataset import Dataset
from testbed.kits.layers.feed import Requests
from testbed.kits.layers.score import Score


class TestRuns:
    """The batches of some test runs in a row, numbered from 0, and what came out of them."""

    def __init__(self, dataset: Dataset, batch_size: int, runs: int) -> None:
        self._requests = Requests(dataset, batch_size)
        self._scores = [Score() for _ in range(runs)]
        self._scored = 0

    def __len__(self) -> int:
        return len(self._scores) * len(self._requests)

    def images(self, test: int) -> torch.Tensor:
        """Return the samples of a test batch, (samples, values)."""
        return self._requests.images(test % len(self._requests)).flatten(1)

    def labels(self, test: int) -> npt.NDArray[np.int64]:
        """Return what the answers should be."""
        return self._requests.labels(test % len(self._requests))

    def samples(self, test: int) -> int:
        """Return how many samples a test batch has."""
        return len(self._requests.samples(test % len(self._requests)))

    def unscored(self, before: int) -> range:
        """Return the test batches below a number that were not scored yet."""
        return range(self._scored, before)

    def score(self, test: int, results: torch.Tensor) -> None:
        """Count the results of a test batch, (samples, classes); tests are scored in their order."""
        self._scores[test // len(self._requests)].add(results, self.labels(test))
        self._scored = test + 1

    def finish(self) -> dict[str, Any]:
        """Return mean accuracy and loss over the runs, standard deviation and each run's accuracy, and begin again."""
        accuracies = [run.accuracy for run in self._scores]
        loss = fmean(run.loss for run in self._scores)
        self._scores, self._scored = [Score() for _ in self._scores], 0
        return {"accuracy": fmean(accuracies), "loss": loss, "deviation": pstdev(accuracies), "runs": accuracies}
