"""Training in micro-batches, numbered through all steps: GPipe's. One a batch is everyone else's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from testbed.data.batches import micro_batches
from testbed.kits.layers.feed import Training
from testbed.kits.layers.layer_shard import LayerShard
from testbed.kits.slots.missing import Learn, at_once, back


class MicroBatches:
    """Each step's batch in as many parts, as even as can be."""

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
        """Return what the answers should be."""
        return self._training.labels(number // self.parts)[self._cuts[number % self.parts]]


def update_after(parts: int) -> Learn:
    """Return what adds up gradients and updates after the last of ``parts`` micro-batches, with those that came."""
    if parts == 1:
        return at_once

    def learn(
        shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor | None
    ) -> Callable[[], torch.Tensor | None] | None:
        last = (batch + 1) % parts == 0
        if gradient is None and not (last and shard.gradients()):
            return None

        def work() -> torch.Tensor | None:
            before = None if gradient is None else back(shard, layer, batch, gradient)
            if last:
                shard.update()
            return before

        return work

    return learn
