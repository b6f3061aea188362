"""What is fed into the network: micro-batches of training, and batches of tests with what came out of them."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import numpy.typing as npt
import torch

from testbed.data.batches import micro_batches
from testbed.data.dataset import Dataset
from testbed.kits.layers.feed import Requests, Score, Training


class MicroBatches:
    """Each step's batch in as many parts, as even as can be, numbered through all steps; one, where it is not GPipe."""

    def __init__(self, training: Training, parts: int) -> None:
        self.parts = parts
        self.steps = training.steps
        self.whole = training.samples
        """Samples of a batch."""
        self._training = training
        self._cuts = micro_batches(training.samples, parts)

    def samples(self, number: int) -> int:
        """Return how many samples a micro-batch has."""
        cut = self._cuts[number % self.parts]
        return int(cut.stop - cut.start)

    def images(self, number: int) -> torch.Tensor:
        """Return its samples, (samples, values)."""
        images, _ = self._training.batch(number // self.parts)
        return images[self._cuts[number % self.parts]].flatten(1)

    def labels(self, number: int) -> torch.Tensor:
        """Return the labels of its samples, (samples,)."""
        return self._training.labels(number // self.parts)[self._cuts[number % self.parts]]


class TestRuns:
    """All test samples pass ``runs`` times, each time over the links as they are then; batches numbered from 0."""

    def __init__(self, dataset: Dataset, batch_size: int, runs: int) -> None:
        self._requests = Requests(dataset, batch_size)
        self._scores = [Score() for _ in range(runs)]
        self._scored = 0
        self._images: tuple[int, torch.Tensor] | None = None
        """The batch of samples that was read last: each run reads the same ones."""

    def __len__(self) -> int:
        return len(self._scores) * len(self._requests)

    def images(self, test: int) -> torch.Tensor:
        """Return the samples of a test batch, (samples, values)."""
        batch = test % len(self._requests)
        if self._images is None or self._images[0] != batch:
            self._images = batch, self._requests.images(batch).flatten(1)
        return self._images[1]

    def samples(self, test: int) -> int:
        """Return how many samples a test batch has."""
        return len(self._requests.samples(test % len(self._requests)))

    def labels(self, test: int) -> npt.NDArray[Any]:
        """Return the labels of a test batch, (samples,)."""
        return self._requests.labels(test % len(self._requests))

    def unscored(self, before: int) -> range:
        """Return the test batches below a number that were not scored yet."""
        return range(self._scored, before)

    def score(self, test: int, results: torch.Tensor) -> None:
        """Count the results of a test batch, (samples, classes); tests are scored in their order."""
        self._scores[test // len(self._requests)].add(results, self.labels(test))
        self._scored = test + 1

    def finish(self) -> dict[str, Any]:
        """Return mean accuracy and loss over the runs, standard deviation and each run's accuracy, and begin again."""
        accuracies = [run.accuracy or 0.0 for run in self._scores]
        loss = fmean(run.loss for run in self._scores)
        self._scores, self._scored = [Score() for _ in self._scores], 0
        return {"accuracy": fmean(accuracies), "loss": loss, "deviation": pstdev(accuracies), "runs": accuracies}
