"""Sizes of decoder-only transformers of the Llama family: parameters, FLOPs, bytes of weights and of the KV cache.

Planning works on these numbers alone and does not import torch. `testbed_generation.transformer` has the layers in
torch.

A layer is: RMSNorm, attention with grouped queries and rotary positions, RMSNorm, and a SwiGLU feed-forward network
or a mixture of such networks (experts). The token embedding precedes the first layer; an RMSNorm and the output matrix
follow the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.common.errors import InputError, nearest
from testbed_generation.formats import Format, stored_bytes

CACHE_BYTES = 2
"""Bytes of a value in the KV cache of a plan whose weights are not float32; llama.cpp keeps the cache in f16."""


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only transformer, in the terms of the Llama family."""

    layers: int
    """Number of layers."""
    width: int
    """Activations of a token between layers (``hidden_size`` in Hugging Face's configuration)."""
    heads: int
    """Query heads of an attention layer."""
    kv_heads: int
    """Key and value heads, which groups of query heads share."""
    hidden: int
    """Hidden activations of a feed-forward network (``intermediate_size``), or of each expert."""
    vocabulary: int
    """Number of tokens in the vocabulary."""
    context: int
    """Tokens of the longest sequence, prompt included."""
    rope_base: float = 10_000.0
    """Base of the frequencies of the rotary positions."""
    epsilon: float = 1e-5
    """Added to the mean square by RMSNorm."""
    tied: bool = False
    """Whether the output matrix is the token embedding."""
    head_width: int = 0
    """Values of a head; 0: width / heads."""
    experts: int = 0
    """Number of feed-forward networks of a layer, of which a router chooses some for each token; 0: a single network
    without a router."""
    active_experts: int = 0
    """Number of experts that a router chooses for a token."""

    @property
    def values_per_head(self) -> int:
        """Number of values of a query, key or value of one head."""
        return self.head_width or self.width // self.heads

    @property
    def query_values(self) -> int:
        """Values of all query heads of a token together."""
        return self.heads * self.values_per_head

    @property
    def kv_values(self) -> int:
        """Values of all key heads of a token together, and also of all value heads."""
        return self.kv_heads * self.values_per_head

    @property
    def attention_values(self) -> int:
        """Values of the four matrices of an attention layer: query, key, value, output."""
        return 2 * self.width * (self.query_values + self.kv_values)

    @property
    def expert_values(self) -> int:
        """Values of the three matrices of one SwiGLU network: gate, up, down."""
        return 3 * self.width * self.hidden

    @property
    def router_values(self) -> int:
        """Values of the router's matrix, which scores the experts for a token."""
        return self.width * self.experts

    @property
    def layer_values(self) -> int:
        """Values of all matrices of a layer; the two normalisations have 2 * width more."""
        experts = max(1, self.experts) * self.expert_values
        return self.attention_values + experts + self.router_values

    @property
    def read_values(self) -> int:
        """Values of a layer's matrices read for one decoded token; of a mixture, only the chosen experts."""
        experts = max(1, self.active_experts) * self.expert_values
        return self.attention_values + experts + self.router_values

    @property
    def embedding_values(self) -> int:
        """Values of the token embedding, and also of the output matrix."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All values of the model; a tied output matrix counts once."""
        matrices = 1 if self.tied else 2
        # Two normalisations in each layer, and one before the output matrix.
        norms = (2 * self.layers + 1) * self.width
        layers = self.layers * self.layer_values
        return matrices * self.embedding_values + layers + norms

    def layer_bytes(self, storage: Format) -> int:
        """Return the bytes of a layer's weights as stored.

        >>> preset("llama-2-7b").layer_bytes("q4_0")
        113868800
        """
        # Vectors stay in float32 in every format.
        norms = stored_bytes(2 * self.width, "f32")
        return stored_bytes(self.layer_values, storage) + norms

    def read_bytes(self, storage: Format) -> int:
        """Return the bytes of a layer's weights read for one decoded token."""
        norms = stored_bytes(2 * self.width, "f32")
        return stored_bytes(self.read_values, storage) + norms

    def embedding_bytes(self, storage: Format) -> int:
        """Return the bytes of the token embedding as stored."""
        return stored_bytes(self.embedding_values, storage)

    def output_bytes(self, storage: Format) -> int:
        """Return the bytes of the last normalisation and the output matrix as stored."""
        norm = stored_bytes(self.width, "f32")
        return stored_bytes(self.embedding_values, storage) + norm

    def cache_bytes(self, value_bytes: int = CACHE_BYTES) -> int:
        """Return the bytes of all keys and values of one token in the KV cache of one layer.

        >>> preset("llama-3-8b").cache_bytes()
        4096
        """
        return 2 * self.kv_values * value_bytes

    def layer_flops(self, tokens: int, past: int = 0) -> float:
        """Return the FLOPs of one layer for ``tokens`` tokens of a sequence after ``past`` tokens in the cache.

        A multiplication and an addition are two FLOPs. The activations of each token are multiplied with the matrices
        of `read_values`. A token attends to itself and to all tokens before it: each pair of tokens needs the product
        of a query and a key, and a weighted value.
        """
        # Pairs of a new token and a token that it attends to.
        pairs = tokens * past + tokens * (tokens + 1) / 2
        return 2.0 * tokens * self.read_values + 4.0 * self.query_values * pairs

    def output_flops(self, tokens: int) -> float:
        """Return the FLOPs of the output matrix for ``tokens`` tokens."""
        return 2.0 * tokens * self.embedding_values


# Positional arguments are layers, width, heads, kv_heads, hidden, vocabulary and context, as in `Architecture`.
PRESETS: dict[str, Architecture] = {
    "tinystories-260k": Architecture(5, 64, 8, 4, 172, 512, 512, tied=True),
    "smollm2-135m": Architecture(
        30, 576, 9, 3, 1536, 49_152, 8192, rope_base=100_000.0, tied=True
    ),
    "tinyllama-1.1b": Architecture(22, 2048, 32, 4, 5632, 32_000, 2048),
    "llama-3.2-3b": Architecture(
        28, 3072, 24, 8, 8192, 128_256, 131_072, rope_base=500_000.0, tied=True
    ),
    "llama-2-7b": Architecture(32, 4096, 32, 32, 11_008, 32_000, 4096),
    "llama-3-8b": Architecture(
        32, 4096, 32, 8, 14_336, 128_256, 8192, rope_base=500_000.0
    ),
    "llama-3-70b": Architecture(
        80, 8192, 64, 8, 28_672, 128_256, 8192, rope_base=500_000.0
    ),
    "qwen3-30b-a3b": Architecture(
        48,
        2048,
        32,
        4,
        768,
        151_936,
        40_960,
        rope_base=1_000_000.0,
        epsilon=1e-6,
        head_width=128,
        experts=128,
        active_experts=8,
    ),
}
"""Published shapes, from each model's ``config.json``; the first is that of llama2.c's ``stories260K``."""


def preset(name: str) -> Architecture:
    """Return a published architecture; raises `InputError` for an unknown name.

    >>> preset("llama-2-7b").layers
    32
    """
    if name not in PRESETS:
        raise InputError(
            f"unknown preset '{name}': {nearest(name, PRESETS)}",
            ("workload", "model", "preset"),
        )
    return PRESETS[name]
