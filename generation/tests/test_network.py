"""The network equals an independent implementation, with and without cache, whole and in shards."""

import math

import pytest
import torch

from testbed.common.errors import InputError
from testbed_generation.architecture import PRESETS, Architecture, preset
from testbed_generation.formats import stored_bytes
from testbed_generation.network import Cache, LayerShard, embed, score
from testbed_generation.sharding import apportion, divide_layer
from testbed_generation.weights import (
    EMBEDDING,
    NORM,
    OUTPUT,
    Seeded,
    full_name,
    read_layer,
    shapes,
)

TINY = Architecture(3, 32, 4, 2, 48, 64, 128)


def logits(architecture: Architecture, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens at once by complex rotations and explicit loops over heads."""
    source = Seeded(architecture, 7)
    width = architecture.values_per_head

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return (
            values
            / torch.sqrt(
                (values * values).mean(-1, keepdim=True) + architecture.epsilon
            )
            * source.read(name)
        )

    def turned(values: torch.Tensor) -> torch.Tensor:
        half = width // 2
        pairs = torch.complex(values[:, :half].double(), values[:, half:].double())
        for position in range(len(values)):
            for index in range(half):
                angle = position * architecture.rope_base ** (-2 * index / width)
                pairs[position, index] *= complex(math.cos(angle), math.sin(angle))
        return torch.cat((pairs.real, pairs.imag), -1).float()

    values = source.read(EMBEDDING)[tokens]
    for layer in range(architecture.layers):
        normal = norm(values, full_name(layer, "input_layernorm"))
        query, key, value = (
            normal @ source.read(full_name(layer, f"self_attn.{n}_proj")).T
            for n in "qkv"
        )
        outputs = []
        for head in range(architecture.heads):
            shared = head // (architecture.heads // architecture.kv_heads)
            q = turned(query[:, head * width : (head + 1) * width])
            k = turned(key[:, shared * width : (shared + 1) * width])
            v = value[:, shared * width : (shared + 1) * width]
            weights = q @ k.T / math.sqrt(width)
            weights = weights + torch.full_like(weights, -torch.inf).triu(1)
            outputs.append(weights.softmax(-1) @ v)
        values = (
            values
            + torch.cat(outputs, -1)
            @ source.read(full_name(layer, "self_attn.o_proj")).T
        )
        normal = norm(values, full_name(layer, "post_attention_layernorm"))
        gate = normal @ source.read(full_name(layer, "mlp.gate_proj")).T
        up = normal @ source.read(full_name(layer, "mlp.up_proj")).T
        values = (
            values
            + (gate * gate.sigmoid() * up)
            @ source.read(full_name(layer, "mlp.down_proj")).T
        )
    output = EMBEDDING if architecture.tied else OUTPUT
    return norm(values, NORM) @ source.read(output).T


def run(
    architecture: Architecture, tokens: torch.Tensor, steps: list[int], parts: int = 1
) -> torch.Tensor:
    """Return the logits of tokens that go through the network in steps, each layer in a number of shards."""
    source = Seeded(architecture, 7)
    shards = divide_layer(architecture, [1.0] * parts)
    layers = [
        [
            LayerShard(architecture, read_layer(source, architecture, layer, shard))
            for shard in shards
        ]
        for layer in range(architecture.layers)
    ]
    caches = [[Cache() for _ in shards] for _ in layers]
    output = source.read(EMBEDDING if architecture.tied else OUTPUT)
    results = []
    for part in tokens.split(steps):
        values = embed(part, source.read(EMBEDDING))
        for layer, own in zip(layers, caches, strict=True):
            values = values + sum(
                shard.attend(values, cache)
                for shard, cache in zip(layer, own, strict=True)
            )
            values = values + sum(shard.feed_forward(values) for shard in layer)
        results.append(score(values, source.read(NORM), output, architecture.epsilon))
    return torch.cat(results)


@pytest.mark.parametrize("tied", [False, True])
def test_network_equals_an_independent_implementation(tied: bool) -> None:
    architecture = Architecture(3, 32, 4, 2, 48, 64, 128, tied=tied)
    tokens = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        run(architecture, tokens, [20]),
        logits(architecture, tokens),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("steps", [[20], [5, 15], [12] + [1] * 8, [1] * 20])
@pytest.mark.parametrize("parts", [1, 2])
def test_cache_and_shards_do_not_change_the_logits(
    steps: list[int], parts: int
) -> None:
    tokens = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        run(TINY, tokens, steps, parts), run(TINY, tokens, [20]), atol=1e-5, rtol=1e-5
    )


def test_truncated_cache_continues_as_if_the_tokens_had_not_been_there() -> None:
    source = Seeded(TINY, 7)
    layer = LayerShard(TINY, read_layer(source, TINY, 0))
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    cache = Cache()
    layer.forward(values[:6], cache)
    cache.truncate(4)
    assert cache.length == 4
    later = layer.forward(values[6:], cache)
    fresh = Cache()
    layer.forward(values[:4], fresh)
    torch.testing.assert_close(later, layer.forward(values[6:], fresh))


def test_network_equals_hugging_faces() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rope_theta=10_000.0, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    source = Seeded(TINY, 7)
    model.load_state_dict({name: source.read(name) for name in shapes(TINY)})
    tokens = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(run(TINY, tokens, [20]), expected, atol=1e-5, rtol=1e-5)


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
def test_presets_have_the_published_numbers_of_parameters(
    name: str, parameters: int
) -> None:
    assert preset(name).parameters == parameters


def test_described_parameters_are_those_of_the_weights() -> None:
    for architecture in (TINY, PRESETS["tinystories-260k"]):
        values = sum(math.prod(shape) for shape in shapes(architecture).values())
        assert architecture.parameters == values


def test_layer_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer = LayerShard(TINY, read_layer(Seeded(TINY, 7), TINY, 0))
    cache = Cache()
    layer.forward(torch.zeros(5, 32), cache)
    with FlopCounterMode(display=False) as counter:
        layer.forward(torch.zeros(1, 32), cache)
    matrices = 2 * TINY.layer_values
    assert counter.get_total_flops() >= matrices
    assert TINY.layer_flops(1, past=5) == matrices + 4 * 32 * 6


@pytest.mark.parametrize(
    ("storage", "expected"),
    [("f32", 4096), ("f16", 2048), ("q8_0", 1088), ("q4_0", 576)],
)
def test_formats_store_blocks_as_ggml_does(storage: str, expected: int) -> None:
    assert stored_bytes(1024, storage) == expected  # type: ignore[arg-type]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        InputError,
        match="2 key-value heads do not divide over 3 devices: use at most 2 devices",
    ):
        divide_layer(TINY, [1, 1, 1])


def test_shares_are_whole_numbers_that_add_up() -> None:
    assert apportion(8, (1.0, 1.0, 2.0), "heads") == (2, 2, 4)
    assert apportion(8, (0.001, 1.0, 1.0), "heads") == (1, 4, 3)
    assert sum(apportion(11_008, (3.0, 5.0, 7.0), "columns")) == 11_008
