"""The neurons of one device under training, with the cost of each operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from testbed.device import Device, Span
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.layers.shard import State
from testbed.ml.method import Problem
from testbed.ml.models.sliced import cut_copies, draw
from testbed.ml.models.slices import Channels
from testbed.ml.slots.missing import Arrived, Work
from testbed.ml.slots.planner import (
    LayerCosts,
    SlotOptions,
    layer_costs,
    layers_of,
    slice_of,
)

Learn = Callable[[LayerShard, torch.Tensor | None], Work | None]
"""From a layer and the gradient of its outputs to the work of a backward, as `MissingDataPolicy.learn` returns it."""

MOST_KEPT = 1 << 24
"""Bytes of outputs in tests that are kept, about, since they may be wanted again."""


class Neurons:
    """Some neurons of each of some layers, numbered from 1; all operations take the device's time."""

    def __init__(
        self, device: Device, problem: Problem[SlotOptions], given: State | None = None
    ) -> None:
        """``given`` is the initial weights of the whole network; None draws them from the seed."""
        self._given = given
        self._device = device
        self._problem = problem
        self._layers = layers_of(problem)
        self._forwarded: dict[tuple[int, int], torch.Tensor | None] = {}
        """Layers and batches that wait for their losses, with the outputs of the layer before that are to get none."""
        self._known_costs: dict[tuple[int, int, int], LayerCosts] = {}
        """By layer, number of own neurons, and samples."""
        self._inferred: dict[Hashable, torch.Tensor] = {}
        """Outputs in tests, by what their inputs are made of, while the weights are the same."""
        self._room = torch.empty(0)
        """Memory for the inputs of tests: as large as these are, new one each time would leave gaps in the heap."""
        self.shards: dict[int, LayerShard] = {}

    async def forward(
        self,
        layer: int,
        batch: int,
        inputs: torch.Tensor,
        unheard: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs, (samples, own values), keeping the values `backward` needs.

        ``unheard`` marks missing inputs, (samples or 1, values), whose gradient is zero.
        """
        self._inferred.clear()
        shard, cost = (
            self.shards[layer],
            self._layer_costs(layer, inputs.shape[0]).forward,
        )
        outputs = await self._device.compute(
            partial(shard.forward, batch, inputs), cost, Span("forward", batch)
        )
        self._forwarded[layer, batch] = unheard
        return outputs

    async def infer(
        self, layer: int, batch: int, entering: Arrived, alike: Hashable = None
    ) -> torch.Tensor:
        """Return the outputs of a test, (samples, own values).

        Calls with the same ``alike`` other than None have equal outputs, which are computed once.
        """

        def work() -> torch.Tensor:
            outputs = self._inferred.get((layer, alike))
            if outputs is None:
                outputs = shard.infer(entering.joined_values(self._room))
                if (
                    alike is not None
                    and (len(self._inferred) + 1) * outputs.nbytes <= MOST_KEPT
                ):
                    self._inferred[layer, alike] = outputs
            return outputs

        shard, cost = (
            self.shards[layer],
            self._layer_costs(layer, entering.samples).forward,
        )
        return await self._device.compute(work, cost, Span("evaluate", batch))

    async def backward(
        self,
        layer: int,
        batch: int,
        samples: int,
        gradient: torch.Tensor | None,
        learn: Learn,
    ) -> torch.Tensor | None:
        """Learn from the gradient of the own outputs; return the inputs' gradient, or None if nothing is to be cast.

        Gradients are (samples, values).

        Without a gradient, any other learning is charged as an update.
        """
        self._inferred.clear()
        if (layer, batch) not in self._forwarded:
            gradient = None
        before = None
        work = learn(self.shards[layer], gradient)
        if work is not None:
            costs = self._layer_costs(layer, samples)
            cost = costs.update if gradient is None else costs.backward + costs.update
            before = await self._device.compute(work, cost, Span("backward", batch))
        unheard = self._forwarded.pop((layer, batch), None)
        if before is not None and unheard is not None:
            before.masked_fill_(unheard, 0.0)
        self.shards[layer].forget(batch)
        return before

    def forget_before(self, layer: int, batch: int) -> None:
        """Drop the forwards of batches before this one, whose losses will not arrive."""
        for old in [old for at, old in self._forwarded if at == layer and old < batch]:
            del self._forwarded[layer, old]
            self.shards[layer].forget(old)

    def give(self, layer: int, neurons: Channels) -> dict[str, torch.Tensor]:
        """Remove some or all neurons of a layer and return their state. Batches under way are dropped there."""
        self._drop_computations(layer)
        shard = self.shards[layer]
        if len(neurons) < len(shard.part.rows):
            return shard.give(neurons)
        return self.shards.pop(layer).state()

    def take(self, layer: int, neurons: Channels, state: State | None = None) -> None:
        """Add neurons of a layer with their state; None: with initial weights."""
        self._drop_computations(layer)
        whole = self._layers[layer - 1]
        part = slice_of(whole, neurons)
        if state is None and self._given is not None:
            state = cut_copies([(whole, part)], self._given)
        elif state is None:
            state = draw(self._problem.model, [(whole, part)], self._problem.seed)
        if layer in self.shards:
            self.shards[layer].take(neurons, state)
        else:
            self.shards[layer] = LayerShard(
                whole, part, state, self._problem.workload.training.optimizer
            )

    def _drop_computations(self, layer: int) -> None:
        """Drop computations made with other neurons of a layer than the current ones."""
        self._forwarded = {
            key: kept for key, kept in self._forwarded.items() if key[0] != layer
        }
        self._inferred.clear()

    def _layer_costs(self, layer: int, samples: int) -> LayerCosts:
        neurons = self.shards[layer].part.rows
        key = (layer, len(neurons), samples)
        if key not in self._known_costs:
            self._known_costs[key] = layer_costs(
                self._layers[layer - 1], neurons, samples, self._problem
            )
        return self._known_costs[key]
