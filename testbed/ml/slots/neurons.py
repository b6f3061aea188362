"""The neurons of one device under training, with the cost of each operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from testbed.device import Device, Span
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.layers.shard import State
from testbed.ml.method import PlanningProblem
from testbed.ml.models.graph import GraphLayer
from testbed.ml.models.sliced import cut_copies, draw_tensors
from testbed.ml.models.slices import Channels, Slice
from testbed.ml.slots.missing import ReceivedParts, Work
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
"""Approximate limit, in bytes, of the outputs in tests that are kept for equal inputs."""


class Neurons:
    """The neurons of one device: some of each layer of its group; all operations take the device's time.

    Layers are numbered from 1, since the input layer, layer 0, has no weights.
    """

    def __init__(
        self,
        device: Device,
        problem: PlanningProblem[SlotOptions],
        initial_weights: State | None = None,
    ) -> None:
        """``initial_weights``: the weights of the whole network at the start; None draws weights from the seed."""
        self._initial_weights = initial_weights
        self._device = device
        self._problem = problem
        self._layers = layers_of(problem)
        self._forwarded: dict[tuple[int, int], torch.Tensor | None] = {}
        """By layer and batch, for forwards that wait for losses: mask of the inputs without a gradient, or None."""
        self._known_costs: dict[tuple[int, int, int], LayerCosts] = {}
        """By layer, number of own neurons, and samples."""
        self._inferred: dict[Hashable, torch.Tensor] = {}
        """Outputs in tests by layer and inputs, until the weights change."""
        self._buffer = torch.empty(0)
        """Memory for the inputs of tests, reused because large allocations for each test would fragment the heap."""
        self.shards: dict[int, LayerShard] = {}
        """The device's neurons by layer."""

    async def forward(
        self,
        layer: int,
        batch: int,
        inputs: torch.Tensor,
        missing_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs, (samples, own values), keeping the values `backward` needs.

        ``missing_inputs`` marks missing inputs, (samples or 1, values), whose gradient is zero.
        """
        # Training follows, which changes the weights.
        self._inferred.clear()
        work = partial(self.shards[layer].forward, batch, inputs)
        cost = self._layer_costs(layer, inputs.shape[0]).forward
        outputs = await self._device.compute(work, cost, Span("forward", batch))
        self._forwarded[layer, batch] = missing_inputs
        return outputs

    async def infer(
        self,
        layer: int,
        batch: int,
        received: ReceivedParts,
        cache_key: Hashable = None,
    ) -> torch.Tensor:
        """Return the outputs of a test, (samples, own values).

        Calls with the same ``cache_key`` other than None have equal outputs, which are computed once.
        """

        work = partial(self._infer_once, layer, received, cache_key)
        # The emulated device computes every time, and is charged for it; only the host saves work.
        cost = self._layer_costs(layer, received.samples).forward
        return await self._device.compute(work, cost, Span("evaluate", batch))

    def _infer_once(
        self, layer: int, received: ReceivedParts, cache_key: Hashable
    ) -> torch.Tensor:
        known = self._inferred.get((layer, cache_key))
        if known is not None:
            return known
        inputs = received.joined_values(self._buffer)
        outputs = self.shards[layer].infer(inputs)
        # Approximate: all outputs count as large as this one.
        fits = (len(self._inferred) + 1) * outputs.nbytes <= MOST_KEPT
        if cache_key is not None and fits:
            self._inferred[layer, cache_key] = outputs
        return outputs

    async def backward(
        self,
        layer: int,
        batch: int,
        samples: int,
        gradient: torch.Tensor | None,
        learn: Learn,
    ) -> torch.Tensor | None:
        """Learn from the gradient of the own outputs; return the inputs' gradient, or None without one to cast.

        Gradients are (samples, values). Without a gradient, any other learning is charged as an update.
        """
        self._inferred.clear()
        if (layer, batch) not in self._forwarded:
            # The forward was lost, or the neurons have changed since.
            gradient = None
        input_gradient = None
        work = learn(self.shards[layer], gradient)
        if work is not None:
            costs = self._layer_costs(layer, samples)
            cost = costs.update
            if gradient is not None:
                cost = costs.backward + costs.update
            span = Span("backward", batch)
            input_gradient = await self._device.compute(work, cost, span)
        missing_inputs = self._forwarded.pop((layer, batch), None)
        # Outputs that did not arrive have not influenced this batch: their neurons get no losses for it.
        if input_gradient is not None and missing_inputs is not None:
            input_gradient.masked_fill_(missing_inputs, 0.0)
        self.shards[layer].forget(batch)
        return input_gradient

    def forget_before(self, layer: int, batch: int) -> None:
        """Drop forward passes of batches before a given one, since losses for these will not arrive."""
        for other_layer, other_batch in list(self._forwarded):
            if other_layer == layer and other_batch < batch:
                del self._forwarded[layer, other_batch]
                self.shards[layer].forget(other_batch)

    def release(self, layer: int, neurons: Channels) -> dict[str, torch.Tensor]:
        """Remove some or all neurons of a layer and return their state; drop the layer's batches under way."""
        self._drop_computations(layer)
        shard = self.shards[layer]
        if len(neurons) < len(shard.part.rows):
            return shard.give(neurons)
        # A shard without neurons is removed.
        return self.shards.pop(layer).state()

    def add(self, layer: int, neurons: Channels, state: State | None = None) -> None:
        """Add neurons of a layer with a given state; without a state, neurons have initial weights."""
        self._drop_computations(layer)
        whole = self._layers[layer - 1]
        part = slice_of(whole, neurons)
        if state is None:
            state = self._initial_state(whole, part)
        if layer in self.shards:
            self.shards[layer].take(neurons, state)
        else:
            optimizer = self._problem.workload.training.optimizer
            self.shards[layer] = LayerShard(whole, part, state, optimizer)

    def _initial_state(self, whole: GraphLayer, part: Slice) -> State:
        """Return initial weights of some neurons: given ones, or the same as any device would draw from the seed."""
        wanted = [(whole, part)]
        if self._initial_weights is not None:
            return cut_copies(wanted, self._initial_weights)
        return draw_tensors(self._problem.model, wanted, self._problem.seed)

    def _drop_computations(self, layer: int) -> None:
        """Drop computations made with other neurons of a layer than the current ones."""
        for key in list(self._forwarded):
            if key[0] == layer:
                del self._forwarded[key]
        self._inferred.clear()

    def _layer_costs(self, layer: int, samples: int) -> LayerCosts:
        neurons = self.shards[layer].part.rows
        key = (layer, len(neurons), samples)
        if key not in self._known_costs:
            self._known_costs[key] = layer_costs(
                self._layers[layer - 1], neurons, samples, self._problem
            )
        return self._known_costs[key]
