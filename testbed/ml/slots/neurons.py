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
from testbed.ml.slots.missing import BackwardWork, ReceivedParts
from testbed.ml.slots.planner import (
    LayerCosts,
    SlotOptions,
    layer_costs,
    layers_of,
    slice_of,
)

Learn = Callable[[LayerShard, torch.Tensor | None], BackwardWork | None]
"""(layer, gradient of its outputs) -> the computation of a backward, as `MissingDataPolicy.learn` returns it."""

MAX_CACHED_BYTES = 1 << 24
"""Approximate limit of the test outputs that are cached, in bytes: 16 MiB, little beside the weights of a network."""


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
        self._pending_backwards: dict[tuple[int, int], torch.Tensor | None] = {}
        """(layer, batch) of forwards that wait for losses -> mask of missing inputs, whose gradient is zero, or None.
        """
        self._cached_costs: dict[tuple[int, int, int], LayerCosts] = {}
        """(layer, number of neurons, samples) -> costs."""
        self._cached_outputs: dict[Hashable, torch.Tensor] = {}
        """(layer, cache key of `infer`) -> outputs in tests, until the weights change."""
        self._buffer = torch.empty(0)
        """Memory for the inputs of tests, reused because large allocations for each test would fragment the heap."""
        self.shards: dict[int, LayerShard] = {}
        """Layer -> this device's neurons of the layer, with their weights."""

    async def forward(
        self,
        layer: int,
        batch: int,
        inputs: torch.Tensor,
        missing_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the outputs of the device's neurons, (samples, values), and keep the values needed by `backward`.

        ``missing_inputs`` marks missing inputs, (samples or 1, values), whose gradient is zero.
        """
        # A forward belongs to training, which is about to change the weights.
        self._cached_outputs.clear()
        work = partial(self.shards[layer].forward, batch, inputs)
        cost = self._layer_costs(layer, inputs.shape[0]).forward
        outputs = await self._device.compute(work, cost, Span("forward", batch))
        self._pending_backwards[layer, batch] = missing_inputs
        return outputs

    async def infer(
        self,
        layer: int,
        batch: int,
        received: ReceivedParts,
        cache_key: Hashable = None,
    ) -> torch.Tensor:
        """Return the outputs of the device's neurons for a test batch, (samples, values).

        Calls with the same ``cache_key`` have equal outputs, which are computed once; None caches nothing.
        """
        work = partial(self._infer_or_reuse, layer, received, cache_key)
        # The emulated device computes every time, and is charged for it; only the host saves work.
        cost = self._layer_costs(layer, received.samples).forward
        return await self._device.compute(work, cost, Span("evaluate", batch))

    def _infer_or_reuse(
        self, layer: int, received: ReceivedParts, cache_key: Hashable
    ) -> torch.Tensor:
        cached = self._cached_outputs.get((layer, cache_key))
        if cached is not None:
            return cached
        inputs = received.joined_values(self._buffer)
        outputs = self.shards[layer].infer(inputs)
        # An approximation, in which all cached outputs are as large as this one.
        cached_bytes = (len(self._cached_outputs) + 1) * outputs.nbytes
        if cache_key is not None and cached_bytes <= MAX_CACHED_BYTES:
            self._cached_outputs[layer, cache_key] = outputs
        return outputs

    async def backward(
        self,
        layer: int,
        batch: int,
        samples: int,
        gradient: torch.Tensor | None,
        learn: Learn,
    ) -> torch.Tensor | None:
        """Learn from the gradient of the device's outputs; return the gradient of the inputs, or None without one.

        Gradients are (samples, values). Without a gradient, ``learn`` may still update weights from saved gradients,
        which is charged as an update alone.
        """
        self._cached_outputs.clear()
        if (layer, batch) not in self._pending_backwards:
            # The device has not computed the forward of the batch, or its neurons have changed since.
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
        missing_inputs = self._pending_backwards.pop((layer, batch), None)
        # Missing inputs have not influenced this batch, so the neurons that sent them get no losses for it.
        if input_gradient is not None and missing_inputs is not None:
            input_gradient.masked_fill_(missing_inputs, 0.0)
        self.shards[layer].forget(batch)
        return input_gradient

    def forget_before(self, layer: int, batch: int) -> None:
        """Drop the forwards of batches before ``batch``, whose losses will not arrive any more."""
        for pending_layer, pending_batch in list(self._pending_backwards):
            if pending_layer == layer and pending_batch < batch:
                del self._pending_backwards[layer, pending_batch]
                self.shards[layer].forget(pending_batch)

    def release(self, layer: int, neurons: Channels) -> dict[str, torch.Tensor]:
        """Remove some or all neurons of a layer and return their state; drop the layer's pending backwards."""
        self._drop_computations(layer)
        shard = self.shards[layer]
        if len(neurons) < len(shard.part.rows):
            return shard.give(neurons)
        # A shard without neurons is removed.
        return self.shards.pop(layer).state()

    def add(self, layer: int, neurons: Channels, state: State | None = None) -> None:
        """Add neurons of a layer with ``state``, by default with initial weights."""
        self._drop_computations(layer)
        graph_layer = self._layers[layer - 1]
        part = slice_of(graph_layer, neurons)
        if state is None:
            state = self._initial_state(graph_layer, part)
        if layer in self.shards:
            self.shards[layer].take(neurons, state)
        else:
            optimizer = self._problem.workload.training.optimizer
            self.shards[layer] = LayerShard(graph_layer, part, state, optimizer)

    def _initial_state(self, graph_layer: GraphLayer, part: Slice) -> State:
        """Return the initial weights of some neurons; weights drawn from the seed are the same on every device."""
        slices = [(graph_layer, part)]
        if self._initial_weights is not None:
            return cut_copies(slices, self._initial_weights)
        return draw_tensors(self._problem.model, slices, self._problem.seed)

    def _drop_computations(self, layer: int) -> None:
        """Drop results computed with the former neurons of a layer."""
        for pending_layer, batch in list(self._pending_backwards):
            if pending_layer == layer:
                del self._pending_backwards[pending_layer, batch]
        self._cached_outputs.clear()

    def _layer_costs(self, layer: int, samples: int) -> LayerCosts:
        neurons = self.shards[layer].part.rows
        key = (layer, len(neurons), samples)
        if key not in self._cached_costs:
            graph_layer = self._layers[layer - 1]
            self._cached_costs[key] = layer_costs(
                graph_layer, neurons, samples, self._problem
            )
        return self._cached_costs[key]
