"""Tensor parallelism: every device computes its heads and hidden columns of every layer for every token.

After the attention and after the feed-forward network of a layer the devices add up their parts (Megatron-LM; Shoeybi
et al., 2019). The source embeds tokens and sends the values to all, and chooses the next token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from testbed.device import Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed_generation.collectives import AllReduce, PackedPart, Part
from testbed_generation.costs import CostModel
from testbed_generation.messages import Forward, Release
from testbed_generation.network import Cache, LayerShard, score
from testbed_generation.sampling import Sampling
from testbed_generation.sharding import Shard
from testbed_generation.source import Embedder, Progress
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, Source, read_layer

KINDS: tuple[type[TypedMessage], ...] = (Forward, Part, PackedPart, Release)


class ShardHolder:
    """A device's shard of all layers, with the KV caches of its heads."""

    def __init__(
        self,
        mailbox: Mailbox,
        model: CostModel,
        shard: Shard,
        source: Source | None,
        reduce: AllReduce,
    ) -> None:
        """``source`` has the weights; None without numerics. ``reduce`` adds up the outputs of all shards."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._model = model
        self._shard = shard
        self._reduce = reduce
        self._caches: dict[int, list[Cache]] = {}
        self._layers: list[LayerShard] = []
        if source is not None:
            architecture = model.architecture
            for layer in range(architecture.layers):
                weights = read_layer(source, architecture, layer, shard)
                self._layers.append(LayerShard(architecture, weights))
        mailbox.on(Release, lambda release: self.release_request(release.request))

    async def serve_forwards(self) -> None:
        """Compute the source's forwards, until cancelled."""
        while True:
            await self.compute_layers(await self._mailbox.take(Forward))

    def release_request(self, request: int) -> None:
        """Forget the caches of a request."""
        self._caches.pop(request, None)

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the values of tokens after all layers, (tokens, width), equal on all devices.

        None without numerics.
        """
        layers = self._model.architecture.layers
        size = self._model.message_bytes(forward.tokens)
        empty = [Cache() for _ in range(layers)]
        caches = self._caches.setdefault(forward.request, empty)
        values = forward.values
        # All devices count alike, so that a part is added to the sum that it belongs to: two sums for each layer.
        operation = 2 * layers * forward.number
        for layer in range(layers):
            for attention in (True, False):
                added = await self._compute_part(
                    layer, forward, values, caches[layer], attention=attention
                )
                total = await self._reduce.all_reduce(operation, added, size)
                operation += 1
                # Both halves of a layer add to their inputs.
                if values is not None and total is not None:
                    values = values + total
        return values

    async def _compute_part(
        self,
        layer: int,
        forward: Forward,
        values: Tensor | None,
        cache: Cache,
        *,
        attention: bool,
    ) -> Tensor | None:
        """Return the output of the shard's heads; with ``attention`` false, of the shard's hidden columns."""

        def work() -> Tensor | None:
            if values is None:
                return None
            with torch.inference_mode():
                shard = self._layers[layer]
                if attention:
                    return shard.attend(values, cache)
                return shard.feed_forward(values)

        cost = self._model.shard_part(
            self._shard, forward.tokens, forward.position, attention=attention
        )
        name = "attention" if attention else "feed_forward"
        last_position = forward.position + forward.tokens - 1
        span = Span(name, batch=forward.request, micro=last_position)
        return await self._device.compute(work, cost, span)


class Computing(Protocol):
    """The source's part of the layers, which obtains the parts of other devices over the network."""

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the values of tokens after all layers, (tokens, width); None without numerics."""

    def release_request(self, request: int) -> None:
        """Forget the caches of a request."""


class TensorParallelSource:
    """The source's side: a `testbed_generation.source.Drive` over shards."""

    def __init__(
        self,
        mailbox: Mailbox,
        model: CostModel,
        names: Sequence[str],
        own: Computing,
        embedder: Embedder,
        sampling: Sampling,
        source: Source | None,
    ) -> None:
        """``names`` are the source and the devices that receive each forward; ``own`` is the source's part.

        ``source`` has the weights; None without numerics.
        """
        self._mailbox = mailbox
        self._device = mailbox.device
        self._model = model
        self._others = names[1:]
        self._own = own
        self._embedder = embedder
        self._sampling = sampling
        self._number = 0
        """Number of the next forward."""
        # All devices number their all-reduces by forwards: two forwards at once would mix them.
        self._turn = asyncio.Lock()
        self._norm = self._output = None
        if source is not None:
            self._norm = source.read(NORM)
            self._output = source.read(EMBEDDING if model.architecture.tied else OUTPUT)

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next token of a request; the shards compute one forward after the other."""
        async with self._turn:
            return [await self._next_token(progress)]

    async def _next_token(self, progress: Progress) -> int:
        # The first forward has the whole prompt, each later one the newest token.
        position = len(progress.all_tokens) - 1 if progress.tokens else 0
        tokens = len(progress.all_tokens) - position
        values = await self._embedder.embed_tokens(progress, position)
        number, self._number = self._number, self._number + 1
        padding = self._model.message_bytes(tokens) if values is None else 0
        forward = Forward(
            number, progress.request.number, position, tokens, values, padding=padding
        )
        for name in self._others:
            self._mailbox.post(name, forward)
        values = await self._own.compute_layers(forward)
        end = position + tokens
        return await self._choose_token(values, progress.request.number, end)

    async def _choose_token(self, values: Tensor | None, request: int, end: int) -> int:
        """Return the token at position ``end`` of a request, from the values of the tokens before it."""

        def work() -> int:
            if values is None or self._norm is None or self._output is None:
                # Without numerics any token stands for all.
                return 0
            epsilon = self._model.architecture.epsilon
            with torch.inference_mode():
                logits = score(values[-1:], self._norm, self._output, epsilon)[0]
            return self._sampling.choose_token(logits, request, end)

        span = Span("choose", batch=request, micro=end - 1)
        return await self._device.compute(work, self._model.output_cost(1), span)

    def forget_request(self, number: int) -> None:
        """Drop the caches of a request on all devices."""
        self._own.release_request(number)
        for name in self._others:
            self._mailbox.post(name, Release(number))
