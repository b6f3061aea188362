"""The layers of a Llama-family model in torch, whole or as a shard of heads and hidden columns, with KV caches.

Weights have the names and shapes of Hugging Face's Llama checkpoints: ``model.layers.3.mlp.up_proj.weight`` is
``mlp.up_proj`` of its layer. A shard of a layer holds some key-value heads with their query heads, and some columns
of the feed-forward network. The outputs of all shards add up to the output of the layer, as in Megatron-LM (Shoeybi
et al., 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from testbed_generation.architecture import Architecture


@dataclass
class Cache:
    """The keys and values of one layer for the tokens of one sequence so far; shapes (heads, tokens, head values).

    >>> cache = Cache()
    >>> keys, values = cache.extend(torch.ones(2, 3, 8), torch.ones(2, 3, 8))
    >>> cache.length
    3
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return 0 if self.keys is None else self.keys.shape[1]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of the next tokens; return the keys and values of all tokens."""
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
        else:
            self.keys = torch.cat((self.keys, keys), dim=1)
            self.values = torch.cat((self.values, values), dim=1)
        return self.keys, self.values

    def truncate(self, length: int) -> None:
        """Drop all tokens from position ``length`` on."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys[:, :length]
            self.values = self.values[:, :length]


def normalise(values: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm (Zhang and Sennrich, 2019): tokens divided by the root of their mean square, times a scale.

    >>> normalise(torch.tensor([1.0, 7.0]), torch.ones(2), epsilon=0.0)
    tensor([0.2000, 1.4000])
    """
    mean_square = values.pow(2).mean(dim=-1, keepdim=True)
    return values * torch.rsqrt(mean_square + epsilon) * scale


def rotate(values: Tensor, first_position: int, base: float) -> Tensor:
    """Return queries or keys of shape (heads, tokens, values) with rotary positions (Su et al., 2021).

    ``first_position`` is the position of the first token. As in Hugging Face's layout, value i is paired with value
    i + half.
    """
    tokens = values.shape[1]
    half = values.shape[-1] // 2
    # Of d values of a head, pair i turns by the angle position * base ** (-2 * i / d).
    frequencies = base ** (-torch.arange(half, dtype=torch.float32) / half)
    positions = torch.arange(
        first_position, first_position + tokens, dtype=torch.float32
    )
    angles = torch.outer(positions, frequencies)
    cosine, sine = angles.cos(), angles.sin()
    low, high = values[..., :half], values[..., half:]
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


def attend_to(
    architecture: Architecture,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cache: Cache,
) -> Tensor:
    """Return the attention output for the queries of the next tokens.

    Rotates queries and keys, and appends keys and values to the cache. Queries, keys, values and the result have the
    shape (tokens, width of all heads).
    """

    def split_heads(projected: Tensor) -> Tensor:
        """Return (heads, tokens, values of a head)."""
        by_token = projected.view(len(projected), -1, architecture.values_per_head)
        return by_token.transpose(0, 1)

    first_position, tokens = cache.length, len(queries)
    base = architecture.rope_base
    rotated_queries = rotate(split_heads(queries), first_position, base)
    # Keys are cached after their rotation, which depends on their own position alone.
    rotated_keys = rotate(split_heads(keys), first_position, base)
    all_keys, all_values = cache.extend(rotated_keys, split_heads(values))
    # A single token attends to all of the cache, so it needs no mask.
    mask = None
    if tokens > 1:
        # A new token attends to the cache, to earlier new tokens and to itself: the diagonal begins after the cache.
        all_pairs = torch.ones(tokens, all_keys.shape[1], dtype=torch.bool)
        mask = all_pairs.tril(diagonal=first_position)
    # `enable_gqa` lets groups of query heads share a key-value head.
    attended = functional.scaled_dot_product_attention(
        rotated_queries, all_keys, all_values, attn_mask=mask, enable_gqa=True
    )
    return attended.transpose(0, 1).reshape(tokens, -1)


@dataclass(frozen=True)
class LayerShard:
    """A layer or a shard of one; the weights are matrices of shape (outputs, inputs)."""

    architecture: Architecture
    weights: Mapping[str, Tensor] = field(repr=False)

    def attend(self, activations: Tensor, cache: Cache) -> Tensor:
        """Return the attention output of the heads for activations (tokens, width); appends to the cache."""
        architecture = self.architecture
        scale = self.weights["input_layernorm"]
        normalised = normalise(activations, scale, architecture.epsilon)
        queries = functional.linear(normalised, self.weights["self_attn.q_proj"])
        keys = functional.linear(normalised, self.weights["self_attn.k_proj"])
        values = functional.linear(normalised, self.weights["self_attn.v_proj"])
        attended = attend_to(architecture, queries, keys, values, cache)
        return functional.linear(attended, self.weights["self_attn.o_proj"])

    def feed_forward(self, activations: Tensor) -> Tensor:
        """Return the output of the hidden columns for activations (tokens, width): SwiGLU (Shazeer, 2020)."""
        scale = self.weights["post_attention_layernorm"]
        normalised = normalise(activations, scale, self.architecture.epsilon)
        gate = functional.linear(normalised, self.weights["mlp.gate_proj"])
        up = functional.linear(normalised, self.weights["mlp.up_proj"])
        hidden = functional.silu(gate) * up
        return functional.linear(hidden, self.weights["mlp.down_proj"])

    def forward(self, activations: Tensor, cache: Cache) -> Tensor:
        """Return the output of a whole layer for activations (tokens, width); appends to the cache."""
        # Residual connections: both halves of a layer add to their inputs.
        activations = activations + self.attend(activations, cache)
        return activations + self.feed_forward(activations)


def embed(tokens: Tensor, embedding: Tensor) -> Tensor:
    """Return the embedding of tokens, shape (tokens, width)."""
    return functional.embedding(tokens, embedding)


def score(activations: Tensor, scale: Tensor, output: Tensor, epsilon: float) -> Tensor:
    """Return the logits of the token after each of the tokens, shape (tokens, vocabulary).

    ``activations`` are those after the last layer, ``scale`` the scales of the last normalisation, and ``output`` the
    output matrix.
    """
    return functional.linear(normalise(activations, scale, epsilon), output)
