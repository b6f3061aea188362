"""The transformer equals an independent implementation, with and without cache, whole and in shards."""

import math
from dataclasses import replace

import pytest
import torch

from testbed.common.errors import InputError
from testbed_generation.architecture import PRESETS, Architecture, preset
from testbed_generation.formats import stored_bytes
from testbed_generation.sharding import apportion, divide_layer
from testbed_generation.transformer import Cache, LayerShard, embed, score
from testbed_generation.weights import (
    EMBEDDING,
    NORM,
    OUTPUT,
    SeededWeights,
    read_layer,
    read_weights,
    weight_name,
    weight_shapes,
)

TINY = Architecture(
    layers=3, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=64, context=128
)
SEED = 7
"""Seed of the weights."""


def random_tokens() -> torch.Tensor:
    """Return 20 tokens, always the same."""
    return torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(1))


def rotate_pairs(values: torch.Tensor, base: float) -> torch.Tensor:
    """Return the values of one head with rotary positions, by complex numbers."""
    width = values.shape[1]
    half = width // 2
    pairs = torch.complex(values[:, :half].double(), values[:, half:].double())
    for position in range(len(values)):
        for index in range(half):
            angle = position * base ** (-2 * index / width)
            pairs[position, index] *= complex(math.cos(angle), math.sin(angle))
    return torch.cat((pairs.real, pairs.imag), -1).float()


def reference_logits(architecture: Architecture, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens at once, by complex rotations and explicit loops over heads."""
    weights = SeededWeights(architecture, SEED)
    width = architecture.values_per_head
    base = architecture.rope_base
    group_size = architecture.heads // architecture.kv_heads

    def read_matrix(layer: int, name: str) -> torch.Tensor:
        return weights.read(weight_name(layer, name)).T

    def normalise(activations: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = (activations * activations).mean(-1, keepdim=True)
        scale = weights.read(name)
        return activations / torch.sqrt(mean_square + architecture.epsilon) * scale

    activations = weights.read(EMBEDDING)[tokens]
    for layer in range(architecture.layers):
        normalised = normalise(activations, weight_name(layer, "input_layernorm"))
        queries = normalised @ read_matrix(layer, "self_attn.q_proj")
        keys = normalised @ read_matrix(layer, "self_attn.k_proj")
        values = normalised @ read_matrix(layer, "self_attn.v_proj")
        outputs = []
        for head in range(architecture.heads):
            # Groups of query heads share a key and value head.
            shared = head // group_size
            head_columns = slice(head * width, (head + 1) * width)
            shared_columns = slice(shared * width, (shared + 1) * width)
            query = rotate_pairs(queries[:, head_columns], base)
            key = rotate_pairs(keys[:, shared_columns], base)
            scores = query @ key.T / math.sqrt(width)
            # No token attends to a later token.
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            outputs.append(scores.softmax(-1) @ values[:, shared_columns])
        attended = torch.cat(outputs, -1)
        activations = activations + attended @ read_matrix(layer, "self_attn.o_proj")
        normalised = normalise(
            activations, weight_name(layer, "post_attention_layernorm")
        )
        gate = normalised @ read_matrix(layer, "mlp.gate_proj")
        up = normalised @ read_matrix(layer, "mlp.up_proj")
        hidden = gate * gate.sigmoid() * up
        activations = activations + hidden @ read_matrix(layer, "mlp.down_proj")
    output = EMBEDDING if architecture.tied else OUTPUT
    return normalise(activations, NORM) @ weights.read(output).T


def compute_logits(
    architecture: Architecture,
    tokens: torch.Tensor,
    pass_lengths: list[int],
    shard_count: int = 1,
) -> torch.Tensor:
    """Return the logits of tokens that are computed in several passes, with each layer in a number of shards."""
    weights = SeededWeights(architecture, SEED)
    shards = divide_layer(architecture, [1.0] * shard_count)
    layers = []
    for layer in range(architecture.layers):
        layer_shards = []
        for shard in shards:
            shard_weights = read_layer(weights, architecture, layer, shard)
            layer_shards.append(LayerShard(architecture, shard_weights))
        layers.append(layer_shards)
    caches = [[Cache() for _ in shards] for _ in layers]
    norm = weights.read(NORM)
    output = weights.read(EMBEDDING if architecture.tied else OUTPUT)
    logits = []
    for pass_tokens in tokens.split(pass_lengths):
        activations = embed(pass_tokens, weights.read(EMBEDDING))
        for layer_shards, layer_caches in zip(layers, caches, strict=True):
            attended = torch.zeros_like(activations)
            for layer_shard, cache in zip(layer_shards, layer_caches, strict=True):
                attended = attended + layer_shard.attend(activations, cache)
            activations = activations + attended
            hidden = torch.zeros_like(activations)
            for layer_shard in layer_shards:
                hidden = hidden + layer_shard.feed_forward(activations)
            activations = activations + hidden
        logits.append(score(activations, norm, output, architecture.epsilon))
    return torch.cat(logits)


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums in another order differ in the last bits of float32.
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_independent_implementation(tied: bool) -> None:
    architecture = replace(TINY, tied=tied)
    tokens = random_tokens()
    logits = compute_logits(architecture, tokens, [20])
    assert_close(logits, reference_logits(architecture, tokens))


@pytest.mark.parametrize(
    "pass_lengths",
    [[20], [5, 15], [12] + [1] * 8, [1] * 20],
    ids=["at-once", "two-passes", "prompt-and-tokens", "single-tokens"],
)
@pytest.mark.parametrize("shard_count", [1, 2])
def test_logits_do_not_depend_on_passes_or_shards(
    pass_lengths: list[int], shard_count: int
) -> None:
    tokens = random_tokens()
    logits = compute_logits(TINY, tokens, pass_lengths, shard_count)
    assert_close(logits, compute_logits(TINY, tokens, [20]))


def test_truncated_cache_equals_cache_without_dropped_tokens() -> None:
    weights = SeededWeights(TINY, SEED)
    layer = LayerShard(TINY, read_layer(weights, TINY, 0))
    generator = torch.Generator().manual_seed(2)
    activations = torch.randn(8, TINY.width, generator=generator)
    truncated = Cache()
    layer.forward(activations[:6], truncated)
    truncated.truncate(4)
    assert truncated.length == 4
    short = Cache()
    layer.forward(activations[:4], short)
    next_activations = activations[6:]
    torch.testing.assert_close(
        layer.forward(next_activations, truncated),
        layer.forward(next_activations, short),
    )


def test_logits_equal_those_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rope_theta=10_000.0, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(read_weights(SeededWeights(TINY, SEED), TINY))
    tokens = random_tokens()
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert_close(compute_logits(TINY, tokens, [20]), expected)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tinystories-260k", 260_032),
        ("smollm2-135m", 134_515_008),
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_presets_have_published_numbers_of_parameters(
    name: str, parameters: int
) -> None:
    assert preset(name).parameters == parameters


@pytest.mark.parametrize(
    "architecture", [TINY, PRESETS["tinystories-260k"]], ids=["untied", "tied"]
)
def test_parameters_equal_number_of_weight_values(architecture: Architecture) -> None:
    shapes = weight_shapes(architecture).values()
    assert architecture.parameters == sum(math.prod(shape) for shape in shapes)


def test_layer_flops_agree_with_count_of_torch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer = LayerShard(TINY, read_layer(SeededWeights(TINY, SEED), TINY, 0))
    cache = Cache()
    layer.forward(torch.zeros(5, 32), cache)
    with FlopCounterMode(display=False) as counter:
        layer.forward(torch.zeros(1, 32), cache)
    matrices = 2 * TINY.layer_values
    # Whether the count includes attention depends on the kernel.
    assert counter.get_total_flops() >= matrices
    # The new token attends to 6 tokens, itself included: 2 products of 32 values, with 2 FLOPs each.
    assert TINY.layer_flops(1, past=5) == matrices + 4 * 32 * 6


@pytest.mark.parametrize(
    ("storage", "expected"),
    [("f32", 4096), ("f16", 2048), ("q8_0", 1088), ("q4_0", 576)],
)
def test_stored_bytes_agree_with_blocks_of_ggml(storage: str, expected: int) -> None:
    # 1024 values are 32 blocks: of 34 bytes in q8_0, and of 18 bytes in q4_0.
    assert stored_bytes(1024, storage) == expected  # type: ignore[arg-type]


def test_more_devices_than_key_value_heads_are_refused() -> None:
    with pytest.raises(InputError, match=r"2 key-value heads .* at most 2 devices"):
        divide_layer(TINY, [1, 1, 1])


def test_apportioned_numbers_are_proportional_and_add_up_to_total() -> None:
    assert apportion(8, (1.0, 1.0, 2.0), "heads") == (2, 2, 4)
    # Each share gets at least one head, however small it is.
    assert apportion(8, (0.001, 1.0, 1.0), "heads") == (1, 4, 3)
    assert sum(apportion(11_008, (3.0, 5.0, 7.0), "columns")) == 11_008
