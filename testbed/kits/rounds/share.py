"""The training data of one device, as the iterations of its rounds see them."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.common.lazy import torch
from testbed.data.batches import batch, steps_per_epoch
from testbed.data.dataset import Dataset


@dataclass(frozen=True)
class Length:
    """How much a device trains in a round: epochs, or else iterations; and in all rounds together."""

    epochs: bool
    """Whether the two numbers are of epochs; else they are of iterations."""
    each: int
    total: int

    @property
    def rounds(self) -> int:
        """Rounds of the whole workload."""
        return -(-self.total // self.each)

    def iterations(self, number: int, per_epoch: int) -> range:
        """Return the iterations of a round, counted from 0 through all rounds; the last round may be shorter.

        A device that trains on, since others are slower, has rounds of full length beyond that.
        """
        unit = per_epoch if self.epochs else 1
        end = (number + 1) * self.each
        return range(number * self.each * unit, (end if number >= self.rounds else min(end, self.total)) * unit)


class Share:
    """A device's samples in iterations of N mini-batches of floor(B/N).

    Each epoch is another order of the samples, cut into whole iterations; what is left over sits out that epoch and
    comes up in others. Fewer samples than a batch are one iteration.
    """

    def __init__(self, dataset: Dataset, batch_size: int, parallel: int, seed: int | None) -> None:
        """Without a seed samples keep their order. Raises ValueError for fewer samples than mini-batches."""
        self._dataset = dataset
        self._seed = seed
        self.samples = len(dataset.train_labels)
        self.parallel = parallel
        self.mini_batch = min(batch_size, self.samples) // parallel
        if not self.mini_batch:
            raise ValueError(f"{self.samples} samples do not make {parallel} mini-batches")
        self._size = self.mini_batch * parallel
        self.per_epoch = steps_per_epoch(self.samples, self._size)

    def iteration(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the mini-batches of an iteration: images (samples, channels, height, width) and labels (samples,)."""
        chosen = batch(self.samples, self._size, self._seed, number)
        images = torch.from_numpy(self._dataset.batch(chosen, number // self.per_epoch))
        labels = torch.from_numpy(self._dataset.train_labels[chosen])
        parts = [slice(begin, begin + self.mini_batch) for begin in range(0, len(labels), self.mini_batch)]
        return [(images[part], labels[part]) for part in parts]
