"""The neurons of one device under training, and what its work on them costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from testbed.device import Device, Span
from testbed.kits.layers.layer_shard import LayerShard
from testbed.kits.layers.shard import State
from testbed.kits.slots.missing import Work
from testbed.kits.slots.planner import LayerCosts, SlotOptions, layer_costs, layers_of, slice_of
from testbed.method import Problem
from testbed.models.sliced import cut_copies, draw
from testbed.models.slices import Channels

Learn = Callable[[LayerShard, torch.Tensor | None], Work | None]
"""From a layer and the gradient of its outputs to the work of a backward, as `OnMissing.learn` returns it."""


class Neurons:
    """Some neurons of each of some layers, from 1 on; all work takes time on the device."""

    def __init__(self, device: Device, problem: Problem[SlotOptions], given: State | None = None) -> None:
        """``given``: first weights of the whole network; None: those drawn from the seed."""
        self._given = given
        self._device = device
        self._problem = problem
        self._layers = layers_of(problem)
        self._forwarded: dict[tuple[int, int], torch.Tensor | None] = {}
        """Layers and batches that wait for their losses, with the outputs of the layer before that are to get none."""
        self.shards: dict[int, LayerShard] = {}

    async def forward(
        self, layer: int, batch: int, inputs: torch.Tensor, unheard: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs, (samples, own values), and keep what `backward` needs.

        ``unheard`` marks inputs, (samples, values), that had not arrived: their gradient is zero.
        """
        shard, cost = self.shards[layer], self._costs(layer, len(inputs)).forward
        outputs = await self._device.compute(partial(shard.forward, batch, inputs), cost, Span("forward", batch))
        self._forwarded[layer, batch] = unheard
        return outputs

    async def infer(self, layer: int, batch: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs of a test, (samples, own values)."""
        shard, cost = self.shards[layer], self._costs(layer, len(inputs)).forward
        return await self._device.compute(partial(shard.infer, inputs), cost, Span("evaluate", batch))

    async def backward(
        self, layer: int, batch: int, samples: int, gradient: torch.Tensor | None, learn: Learn
    ) -> torch.Tensor | None:
        """Learn from the gradient of the own outputs; return that of the inputs, or None: nothing is to be cast.

        Gradients are (samples, values).

        Where there is no gradient, what is learnt all the same is charged as an update.
        """
        if (layer, batch) not in self._forwarded:
            gradient = None
        before = None
        work = learn(self.shards[layer], gradient)
        if work is not None:
            costs = self._costs(layer, samples)
            cost = costs.update if gradient is None else costs.backward + costs.update
            before = await self._device.compute(work, cost, Span("backward", batch))
        unheard = self._forwarded.pop((layer, batch), None)
        if before is not None and unheard is not None:
            before.masked_fill_(unheard, 0.0)
        self.shards[layer].forget(batch)
        return before

    def forget_before(self, layer: int, batch: int) -> None:
        """Drop what waits for the losses of batches before one: they will not come."""
        for old in [old for at, old in self._forwarded if at == layer and old < batch]:
            del self._forwarded[layer, old]
            self.shards[layer].forget(old)

    def give(self, layer: int, neurons: Channels) -> dict[str, torch.Tensor]:
        """Part with some neurons of a layer, or all: return their state. Batches under way are forgotten there."""
        self._forwarded = {key: kept for key, kept in self._forwarded.items() if key[0] != layer}
        shard = self.shards[layer]
        if len(neurons) < len(shard.part.rows):
            return shard.give(neurons)
        return self.shards.pop(layer).state()

    def take(self, layer: int, neurons: Channels, state: State | None = None) -> None:
        """Take in neurons of a layer with their state; None: with first weights."""
        self._forwarded = {key: kept for key, kept in self._forwarded.items() if key[0] != layer}
        whole = self._layers[layer - 1]
        part = slice_of(whole, neurons)
        if state is None and self._given is not None:
            state = cut_copies([(whole, part)], self._given)
        elif state is None:
            state = draw(self._problem.model, [(whole, part)], self._problem.seed)
        if layer in self.shards:
            self.shards[layer].take(neurons, state)
        else:
            self.shards[layer] = LayerShard(whole, part, state, self._problem.workload.training.optimizer)

    def _costs(self, layer: int, samples: int) -> LayerCosts:
        return layer_costs(self._layers[layer - 1], self.shards[layer].part.rows, samples, self._problem)
