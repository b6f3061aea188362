"""Computing costs and memory of a language model on a device. Pure functions without torch.

In all costs ``tokens`` is the number of tokens of one sequence that are computed together, and ``past`` the number of
tokens before them, whose keys and values are in the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed_generation.architecture import CACHE_BYTES, Architecture
from testbed_generation.formats import Format, stored_bytes
from testbed_generation.sharding import Shard

VALUE_BYTES = 4
"""Bytes of an activation; activations are computed and sent in float32."""

BUFFER_TOKENS = 512
"""Maximum number of tokens for which buffers have room: llama.cpp computes longer prompts in parts of this size."""


@dataclass(frozen=True)
class CostModel:
    """Costs and sizes of one model in a storage format, with sequences of a given length."""

    architecture: Architecture
    storage: Format = "f32"
    """Format of the stored weights."""
    tokens: int = 0
    """Tokens of the longest sequence, for which every KV cache has room; 0: the model's context."""
    sequences: int = 1
    """Number of sequences in flight at once, each with a KV cache of its own."""

    @property
    def cache_length(self) -> int:
        """Number of tokens for which a KV cache has room: the tokens of the longest sequence."""
        return self.tokens or self.architecture.context

    @property
    def cache_value_bytes(self) -> int:
        """Bytes of a value in the KV cache."""
        return VALUE_BYTES if self.storage == "f32" else CACHE_BYTES

    def layers_cost(self, count: float, tokens: int, past: int) -> Cost:
        """Return the cost of ``count`` layers.

        Weights and entries of the cache are read once for all tokens together.
        """
        architecture = self.architecture
        # Activations of each token are read before a layer and written after the layer.
        activations = 2 * VALUE_BYTES * architecture.width * tokens
        cached = architecture.cache_bytes(self.cache_value_bytes) * (past + tokens)
        weights = architecture.read_bytes(self.storage)
        if architecture.experts and tokens > 1:
            # The tokens of a prompt choose different experts, and together read nearly all experts.
            weights = architecture.layer_bytes(self.storage)
        flops = architecture.layer_flops(tokens, past)
        return Cost(
            count * flops, count * (activations + cached), count * weights, "linear"
        )

    def half_layer_cost(
        self, shard: Shard, tokens: int, past: int, *, is_attention: bool
    ) -> Cost:
        """Return the cost of a shard in one half of one layer: the heads if ``is_attention``, else the columns."""
        architecture = self.architecture
        # Every shard reads and writes the activations at full width.
        activations = 2 * VALUE_BYTES * architecture.width * tokens
        if is_attention:
            share = shard.heads / architecture.kv_heads
            entry = architecture.cache_bytes(self.cache_value_bytes)
            cached = entry * (past + tokens) * share
            values = architecture.attention_values * share
            # The new token number i, counted from 1, attends to past + i tokens, itself included.
            pairs = tokens * past + tokens * (tokens + 1) / 2
            products = 2.0 * tokens * values
            flops = products + 4.0 * architecture.query_values * share * pairs
        else:
            cached = 0.0
            experts = max(1, architecture.active_experts) * architecture.expert_values
            values = experts * shard.columns / architecture.hidden
            # Every device computes the router's scores of a token.
            values += architecture.router_values
            flops = 2.0 * tokens * values
        weights = stored_bytes(round(values), self.storage)
        return Cost(flops, activations + cached, weights, "linear")

    def shard_cost(self, shard: Shard, tokens: int, past: int) -> Cost:
        """Return the cost of a shard's heads and hidden columns in all layers."""
        heads = self.half_layer_cost(shard, tokens, past, is_attention=True)
        columns = self.half_layer_cost(shard, tokens, past, is_attention=False)
        return (heads + columns) * self.architecture.layers

    def product_cost(self, values: int, tokens: int, *, integers: bool) -> Cost:
        """Return the cost of multiplying tokens with a matrix of ``values`` values.

        Products of 8-bit ``integers`` take the time of reading the matrix; only those in float32 count as FLOPs.
        """
        flops = 0.0 if integers else 2.0 * tokens * values
        return Cost(flops, 0.0, stored_bytes(values, self.storage), "linear")

    def attention_cost(self, tokens: int, past: int) -> Cost:
        """Return the cost of the attention of all heads in one layer, without the weight matrices."""
        # A query and a key are multiplied, and a value is weighted: two products of 2 FLOPs for each pair of tokens.
        pairs = tokens * past + tokens * (tokens + 1) / 2
        cached = self.architecture.cache_bytes(self.cache_value_bytes) * (past + tokens)
        return Cost(4.0 * self.architecture.query_values * pairs, cached, 0.0, "linear")

    def embedding_cost(self, tokens: int) -> Cost:
        """Return the cost of reading the embedding of tokens."""
        return Cost(0.0, VALUE_BYTES * self.architecture.width * tokens, 0.0, "linear")

    def output_cost(self, tokens: int) -> Cost:
        """Return the cost of the last normalisation and the output matrix for tokens."""
        # The activations of a token are read, and one logit is written for each token of the vocabulary.
        token_values = self.architecture.width + self.architecture.vocabulary
        activations = VALUE_BYTES * token_values * tokens
        weights = self.architecture.output_bytes(self.storage)
        flops = self.architecture.output_flops(tokens)
        return Cost(flops, activations, weights, "linear")

    def layer_cache(self) -> int:
        """Return the bytes of the KV caches of one layer for all sequences at full length."""
        bytes_per_token = self.architecture.cache_bytes(self.cache_value_bytes)
        return bytes_per_token * self.cache_length * self.sequences

    def layer_memory(self) -> float:
        """Return the bytes of the weights of one layer and of the caches of all sequences at full length."""
        return self.architecture.layer_bytes(self.storage) + self.layer_cache()

    def end_memory(self, *, has_embedding: bool, has_output: bool) -> float:
        """Return the bytes of the embedding, on the first stage, and of the output matrix, on the last stage.

        A tied matrix counts once on a device that has both.
        """
        embedding = (
            self.architecture.embedding_bytes(self.storage) if has_embedding else 0
        )
        output = self.architecture.output_bytes(self.storage) if has_output else 0
        if self.architecture.tied and has_embedding and has_output:
            return output
        return embedding + output

    def total_memory(self) -> float:
        """Return the bytes of the whole model on one device."""
        layers = self.architecture.layers * self.layer_memory()
        return layers + self.end_memory(has_embedding=True, has_output=True)

    def buffer_memory(self) -> float:
        """Return the bytes of activations while a prompt passes a layer."""
        # For each token: either gate and up of a feed-forward network or the logits, whatever is more, and four
        # activations.
        largest_output = max(2 * self.architecture.hidden, self.architecture.vocabulary)
        values = largest_output + 4 * self.architecture.width
        return VALUE_BYTES * values * min(self.cache_length, BUFFER_TOKENS)

    def layer_seconds(self, device: DeviceSpec, past: int) -> float:
        """Return the seconds of one layer on a device for one decoded token."""
        return device.seconds(self.layers_cost(1, 1, past))

    def message_bytes(self, tokens: int) -> int:
        """Return the bytes of the activations of tokens between two layers.

        >>> from testbed_generation.architecture import preset
        >>> CostModel(preset("llama-2-7b")).message_bytes(1)
        16384
        """
        return VALUE_BYTES * self.architecture.width * tokens
