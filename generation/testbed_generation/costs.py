"""Computing costs and memory of the layers of a network on a device. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed_generation.architecture import CACHE_BYTES, Architecture
from testbed_generation.formats import Format, stored_bytes
from testbed_generation.sharding import Shard

VALUE_BYTES = 4
"""Bytes of a value between layers, which are computed and sent in float32."""


@dataclass(frozen=True)
class CostModel:
    """Costs and sizes of one network in a storage format, with sequences of a given length."""

    architecture: Architecture
    storage: Format = "f32"
    tokens: int = 0
    """Tokens of the longest sequence, which every KV cache has room for; 0: the network's context."""
    sequences: int = 1
    """Sequences in flight at once, each with a KV cache of its own."""

    @property
    def longest(self) -> int:
        """Capacity of a KV cache in tokens."""
        return self.tokens or self.architecture.context

    @property
    def cache_value_bytes(self) -> int:
        """Bytes of a value in the KV cache."""
        return VALUE_BYTES if self.storage == "f32" else CACHE_BYTES

    def layers_cost(self, count: float, tokens: int, past: int) -> Cost:
        """Return the cost of ``count`` layers for tokens of one sequence, after ``past`` tokens in the cache.

        Weights are read once for all tokens together; each token reads the cache of those before it.
        """
        architecture = self.architecture
        # The values of each token are read before a layer and written after it.
        activations = 2 * VALUE_BYTES * architecture.width * tokens
        cached = architecture.cache_bytes(self.cache_value_bytes) * (past + tokens)
        weights = architecture.read_bytes(self.storage)
        if architecture.experts and tokens > 1:
            # The tokens of a prompt choose different experts: together they read all of them, or nearly so.
            weights = architecture.layer_bytes(self.storage)
        flops = architecture.layer_flops(tokens, past)
        return Cost(
            count * flops, count * (activations + cached), count * weights, "linear"
        )

    def shard_part(
        self, shard: Shard, tokens: int, past: int, *, attention: bool
    ) -> Cost:
        """Return the cost of a shard's heads in one layer; with ``attention`` false, of the shard's hidden columns."""
        architecture = self.architecture
        # Every shard reads and writes the values of whole tokens.
        activations = 2 * VALUE_BYTES * architecture.width * tokens
        if attention:
            share = shard.heads / architecture.kv_heads
            entry = architecture.cache_bytes(self.cache_value_bytes)
            cached = entry * (past + tokens) * share
            values = architecture.attention_values * share
            # Token i of the new ones attends to past + i tokens, itself included.
            pairs = tokens * past + tokens * (tokens + 1) / 2
            products = 2.0 * tokens * values
            flops = products + 4.0 * architecture.query_values * share * pairs
        else:
            cached = 0.0
            experts = max(1, architecture.active_experts) * architecture.expert_values
            values = experts * shard.columns / architecture.hidden
            # Every shard scores the experts of a token itself.
            values += architecture.router_values
            flops = 2.0 * tokens * values
        weights = stored_bytes(round(values), self.storage)
        return Cost(flops, activations + cached, weights, "linear")

    def shard_layers(self, shard: Shard, tokens: int, past: int) -> Cost:
        """Return the cost of a shard's heads and hidden columns in all layers."""
        heads = self.shard_part(shard, tokens, past, attention=True)
        columns = self.shard_part(shard, tokens, past, attention=False)
        return (heads + columns) * self.architecture.layers

    def product_cost(self, values: int, tokens: int, *, integers: bool) -> Cost:
        """Return the cost of multiplying tokens with a matrix of ``values`` values.

        Products of 8-bit ``integers`` take the time of reading the matrix; only those in float32 count as FLOPs.
        """
        flops = 0.0 if integers else 2.0 * tokens * values
        return Cost(flops, 0.0, stored_bytes(values, self.storage), "linear")

    def attention_cost(self, tokens: int, past: int) -> Cost:
        """Return the cost of attending with all heads of a layer, without the matrices."""
        # A query and a key are multiplied, and a value is weighted: two products of 2 FLOPs for each pair of tokens.
        pairs = tokens * past + tokens * (tokens + 1) / 2
        cached = self.architecture.cache_bytes(self.cache_value_bytes) * (past + tokens)
        return Cost(4.0 * self.architecture.query_values * pairs, cached, 0.0, "linear")

    def embedding_cost(self, tokens: int) -> Cost:
        """Return the cost of looking tokens up in the embedding."""
        return Cost(0.0, VALUE_BYTES * self.architecture.width * tokens, 0.0, "linear")

    def output_cost(self, tokens: int) -> Cost:
        """Return the cost of the last normalisation and the output matrix for tokens."""
        # Inputs of one token are as wide as the network, its logits are one for each token of the vocabulary.
        token_values = self.architecture.width + self.architecture.vocabulary
        values = VALUE_BYTES * token_values * tokens
        weights = self.architecture.output_bytes(self.storage)
        return Cost(self.architecture.output_flops(tokens), values, weights, "linear")

    def layer_cache(self) -> int:
        """Return the bytes of the KV caches of one layer for all sequences at full length."""
        bytes_per_token = self.architecture.cache_bytes(self.cache_value_bytes)
        return bytes_per_token * self.longest * self.sequences

    def layer_memory(self) -> float:
        """Return the bytes of the weights of one layer and of the caches of all sequences at full length."""
        return self.architecture.layer_bytes(self.storage) + self.layer_cache()

    def end_memory(self, *, first: bool, last: bool) -> float:
        """Return the bytes of the embedding on the first stage and of the output matrix on the last one.

        A tied matrix that is on one device as both counts once.
        """
        embedding = self.architecture.embedding_bytes(self.storage) if first else 0
        output = self.architecture.output_bytes(self.storage) if last else 0
        if self.architecture.tied and first and last:
            return output
        return embedding + output

    def whole_memory(self) -> float:
        """Return the bytes of the whole network on one device."""
        layers = self.architecture.layers * self.layer_memory()
        return layers + self.end_memory(first=True, last=True)

    def buffer_memory(self) -> float:
        """Return the bytes of activations while the longest prompt passes a layer."""
        # Gate and up of a feed-forward network, or the logits, whichever are more, and four tensors between layers.
        widest = max(2 * self.architecture.hidden, self.architecture.vocabulary)
        values = widest + 4 * self.architecture.width
        return VALUE_BYTES * values * min(self.longest, 512)

    def layer_seconds(self, device: DeviceSpec, past: int) -> float:
        """Return the seconds of one layer on a device for one decoded token."""
        return device.seconds(self.layers_cost(1, 1, past))

    def message_bytes(self, tokens: int) -> int:
        """Return the bytes of the values of tokens between two layers.

        >>> from testbed_generation.architecture import preset
        >>> CostModel(preset("llama-2-7b")).message_bytes(1)
        16384
        """
        return VALUE_BYTES * self.architecture.width * tokens
