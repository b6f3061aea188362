"""Tensor parallelism: every device computes its heads and hidden columns of every layer for every token.

After the attention and after the feed-forward network of a layer the devices add up their parts (Megatron-LM; Shoeybi
et al., 2019). The coordinator embeds tokens, sends the activations to all devices, and chooses the next token.
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
from testbed_generation.decoding import Embedder, Progress
from testbed_generation.messages import Forward, Release
from testbed_generation.sampling import Sampling
from testbed_generation.sharding import Shard
from testbed_generation.transformer import Cache, LayerShard, score
from testbed_generation.weights import EMBEDDING, NORM, OUTPUT, WeightSource, read_layer

KINDS: tuple[type[TypedMessage], ...] = (Forward, Part, PackedPart, Release)
"""Messages that the mailbox of each device has to register."""


class ShardServer:
    """A device's shard of all layers, with the KV caches of its heads; on the coordinator, a `LocalPart`."""

    def __init__(
        self,
        mailbox: Mailbox,
        model: CostModel,
        shard: Shard,
        weight_source: WeightSource | None,
        all_reduce: AllReduce,
    ) -> None:
        """``weight_source`` is None without numerics; ``all_reduce`` adds up the outputs of all shards."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._model = model
        self._shard = shard
        self._all_reduce = all_reduce
        self._caches: dict[int, list[Cache]] = {}
        self._layers: list[LayerShard] = []
        if weight_source is not None:
            architecture = model.architecture
            for layer in range(architecture.layers):
                weights = read_layer(weight_source, architecture, layer, shard)
                self._layers.append(LayerShard(architecture, weights))
        mailbox.on(Release, lambda release: self.release_request(release.request))

    async def serve_forwards(self) -> None:
        """Compute the forward passes requested by the coordinator, until cancelled."""
        while True:
            forward = await self._mailbox.take(Forward)
            await self.compute_layers(forward)

    def release_request(self, request: int) -> None:
        """Drop the caches of a request."""
        self._caches.pop(request, None)

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the activations after all layers, (tokens, width), which are equal on all devices.

        None without numerics.
        """
        layers = self._model.architecture.layers
        size = self._model.message_bytes(forward.tokens)
        new_caches = [Cache() for _ in range(layers)]
        caches = self._caches.setdefault(forward.request, new_caches)
        activations = forward.values
        # Each layer has two sums. All devices number them alike, so that parts of different sums are not mixed.
        operation = 2 * layers * forward.number
        for layer in range(layers):
            for is_attention in (True, False):
                part = await self._compute_half(
                    layer,
                    forward,
                    activations,
                    caches[layer],
                    is_attention=is_attention,
                )
                total = await self._all_reduce.all_reduce(operation, part, size)
                operation += 1
                # Residual connection: both halves of a layer add to their inputs.
                if activations is not None and total is not None:
                    activations = activations + total
        return activations

    async def _compute_half(
        self,
        layer: int,
        forward: Forward,
        activations: Tensor | None,
        cache: Cache,
        *,
        is_attention: bool,
    ) -> Tensor | None:
        """Return the output of the shard's heads if ``is_attention``, otherwise the output of the hidden columns."""

        def compute() -> Tensor | None:
            if activations is None:
                return None
            with torch.inference_mode():
                shard = self._layers[layer]
                if is_attention:
                    return shard.attend(activations, cache)
                return shard.feed_forward(activations)

        cost = self._model.half_layer_cost(
            self._shard, forward.tokens, forward.position, is_attention=is_attention
        )
        name = "attention" if is_attention else "feed_forward"
        last_position = forward.position + forward.tokens - 1
        span = Span(name, batch=forward.request, micro=last_position)
        return await self._device.compute(compute, cost, span)


class LocalPart(Protocol):
    """The coordinator's part of the layers, which obtains the parts of other devices over the network."""

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the activations after all layers, (tokens, width); None without numerics."""

    def release_request(self, request: int) -> None:
        """Drop the caches of a request."""


class TensorParallelDecoder:
    """A `testbed_generation.decoding.Decoder` whose devices hold a part of every layer."""

    def __init__(
        self,
        mailbox: Mailbox,
        model: CostModel,
        receivers: Sequence[str],
        local_part: LocalPart,
        embedder: Embedder,
        sampling: Sampling,
        weight_source: WeightSource | None,
    ) -> None:
        """``receivers`` are the devices that receive each forward pass; ``weight_source`` is None without numerics."""
        self._mailbox = mailbox
        self._device = mailbox.device
        self._model = model
        self._receivers = receivers
        self._local_part = local_part
        self._embedder = embedder
        self._sampling = sampling
        self._next_number = 0
        """Number of the next forward pass."""
        # All devices number their all-reduces by forward passes: two passes at once would mix them.
        self._forward_lock = asyncio.Lock()
        self._norm: Tensor | None = None
        self._output: Tensor | None = None
        if weight_source is not None:
            self._norm = weight_source.read(NORM)
            output = EMBEDDING if model.architecture.tied else OUTPUT
            self._output = weight_source.read(output)

    async def next_tokens(self, progress: Progress) -> list[int]:
        """Return the next token of a request; the devices compute one forward pass after the other."""
        async with self._forward_lock:
            token = await self._next_token(progress)
        return [token]

    async def _next_token(self, progress: Progress) -> int:
        # The first forward pass has the whole prompt, each later pass the newest token.
        position = len(progress.all_tokens) - 1 if progress.tokens else 0
        tokens = len(progress.all_tokens) - position
        embedded = await self._embedder.embed_tokens(progress, position)
        request = progress.request.number
        padding = self._model.message_bytes(tokens) if embedded is None else 0
        forward = Forward(
            number=self._next_number,
            request=request,
            position=position,
            tokens=tokens,
            values=embedded,
            padding=padding,
        )
        self._next_number += 1
        for name in self._receivers:
            self._mailbox.post(name, forward)
        activations = await self._local_part.compute_layers(forward)
        return await self._choose_token(activations, request, position + tokens)

    async def _choose_token(
        self, activations: Tensor | None, request: int, position: int
    ) -> int:
        """Return the token at a position of a request, from the activations of the preceding tokens."""

        def choose() -> int:
            if activations is None or self._norm is None or self._output is None:
                # Without numerics all tokens are equal.
                return 0
            epsilon = self._model.architecture.epsilon
            with torch.inference_mode():
                logits = score(activations[-1:], self._norm, self._output, epsilon)[0]
            return self._sampling.choose_token(logits, request, position)

        span = Span("choose", batch=request, micro=position - 1)
        return await self._device.compute(choose, self._model.output_cost(1), span)

    def forget_request(self, number: int) -> None:
        """Drop the caches of a request on all devices."""
        self._local_part.release_request(number)
        for name in self._receivers:
            self._mailbox.post(name, Release(number))
