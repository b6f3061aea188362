"""Saved gradients (Section IV-B): what a layer learns from when what it should learn from has not arrived."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import torch

from testbed.methods.parts.layer_shard import LayerShard
from testbed.methods.parts.shard import State

Granularity = Literal["layer", "neuron", "link"]
"""What has to have arrived for new gradients: all transmissions to the layer, all to the neuron, or any to it."""
Learned = Literal["fresh", "reused", "nothing"]


def complete(granularity: Granularity, arrived: int, due: int, others: bool) -> bool:
    """Return whether new gradients are to be computed of so many parts that arrived of those due.

    ``others`` is whether all other devices of the layer received all of theirs. All neurons of a device hear the same.
    """
    if granularity == "link":
        return arrived > 0
    return arrived == due and (granularity == "neuron" or others)


class Learner:
    """A shard that takes its last gradients again while it has no new ones, at most so many times in a row."""

    def __init__(self, shard: LayerShard) -> None:
        self.shard = shard
        self.forget()

    def forget(self) -> None:
        """Forget the saved gradients: they are of other neurons."""
        self._saved: State = {}
        self._used = 0

    def learn(self, key: Hashable, gradient: torch.Tensor) -> torch.Tensor:
        """Update with new gradients and save them; return the gradient of the inputs, as `LayerShard.backward` does."""
        before = self.shard.backward(key, gradient)
        self._saved, self._used = self.shard.gradients(), 0
        self.shard.update()
        return before

    def pass_on(self, key: Hashable, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs alone (equation 2), and learn nothing of it."""
        before = self.shard.backward(key, gradient)
        self.shard.drop_gradients()
        return before

    def reuse(self, limit: int) -> bool:
        """Update with the saved gradients; False where there are none, or after ``limit`` times since they were new."""
        if not self._saved or self._used >= limit:
            return False
        self._used += 1
        self.shard.add_gradients(self._saved)
        self.shard.update()
        return True
