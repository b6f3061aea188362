"""Saved gradients (Section IV-B): what a layer learns from while what it should learn from does not arrive."""

from __future__ import annotations

import torch

from testbed.kits.layers.layer_shard import LayerShard
from testbed.kits.layers.shard import State
from testbed.kits.slots.missing import back
from testbed.methods.versatile.planner import Granularity


def fresh(granularity: Granularity, arrived: int, due: int, others: bool) -> bool:
    """Return whether new gradients are computed, given the parts that arrived and those due.

    ``others`` is whether all other devices of the layer received all of theirs. All neurons of a device hear the same.
    """
    if granularity == "link":
        return arrived > 0
    return arrived == due and (granularity == "neuron" or others)


class Saved:
    """The last gradients of a shard, and how often in a row they were used since they were new."""

    def __init__(self) -> None:
        self._gradients: State = {}
        self._used = 0

    def learn(self, shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Update with new gradients and save them; return the gradient of the inputs, as `missing.back` does."""
        before = back(shard, layer, batch, gradient)
        self._gradients, self._used = shard.gradients(), 0
        shard.update()
        return before

    def usable(self, limit: int) -> bool:
        """Return whether there are any, used less than ``limit`` times since they were new."""
        return bool(self._gradients) and self._used < limit

    def reuse(self, shard: LayerShard) -> None:
        """Update with them."""
        self._used += 1
        shard.add_gradients(self._gradients)
        shard.update()


def pass_on(shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of the inputs (equation 2), if anyone wants it, and learn nothing from it."""
    if layer == 1:
        return None
    before = shard.backward(batch, gradient)
    shard.drop_gradients()
    return before
