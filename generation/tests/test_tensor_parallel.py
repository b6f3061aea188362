"""Tensor parallelism generates the texts of one process, with any number of devices and any all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny_model import (
    LINK,
    MODEL,
    REQUESTS,
    SEED,
    SPEED,
    TINY,
    count_tokens,
    expected_lengths,
    expected_texts,
    full_mesh,
    serve_as_coordinator,
)

from testbed.messaging.mailbox import Mailbox
from testbed_generation.architecture import Architecture
from testbed_generation.collectives import (
    AllReduce,
    ExchangeAllReduce,
    RingAllReduce,
    StarAllReduce,
)
from testbed_generation.costs import CostModel
from testbed_generation.sharding import divide_layer
from testbed_generation.tensor_parallel import (
    KINDS,
    ShardServer,
)
from testbed_generation.transport import Transport
from testbed_generation.weights import SeededWeights
from tests.helpers.worlds import events_of, make_world

MakeAllReduce = Callable[[Mailbox, str], AllReduce]

FOUR_HEADS = CostModel(Architecture(2, 32, 4, 4, 48, 64, 128))
"""A model that divides over up to four devices."""


def make_exchange(mailbox: Mailbox, names: str) -> ExchangeAllReduce:
    return ExchangeAllReduce(mailbox, names, Transport("f32"))


def make_q8_exchange(mailbox: Mailbox, names: str) -> ExchangeAllReduce:
    return ExchangeAllReduce(mailbox, names, Transport("q8_0"))


ALL_REDUCES: tuple[MakeAllReduce, ...] = (StarAllReduce, RingAllReduce, make_exchange)


def serve(
    names: str,
    make_all_reduce: MakeAllReduce,
    model: CostModel = MODEL,
    *,
    numerics: bool = True,
) -> tuple[Any, dict[int, list[int]]]:
    """Serve the requests on devices, of which the first is the coordinator.

    Return the simulated world and the tokens of each request.
    """
    texts: dict[int, list[int]] = {}
    weight_source = SeededWeights(model.architecture, SEED) if numerics else None
    shards = divide_layer(model.architecture, [1.0] * len(names))
    links = full_mesh(names)
    coordinator, *others = names

    def make_program(name: str) -> Any:
        async def program(device: Any) -> None:
            async with Mailbox(device, links, KINDS) as mailbox:
                server = ShardServer(
                    mailbox,
                    model=model,
                    shard=shards[names.index(name)],
                    weight_source=weight_source,
                    all_reduce=make_all_reduce(mailbox, names),
                )
                if name != coordinator:
                    # Never returns: the end of the run cancels this program.
                    await server.serve_forwards()
                    return
                texts.update(
                    await serve_as_coordinator(
                        mailbox,
                        model,
                        receivers=others,
                        local_part=server,
                        weight_source=weight_source,
                    )
                )

        return program

    programs = {name: make_program(name) for name in names}
    world = make_world(programs, LINK, speed=SPEED)
    world.run()
    return world, texts


def sent_sizes(world: Any, message: str) -> list[int]:
    """Return the bytes of each message of a kind that the coordinator sent."""
    sizes = []
    for event in events_of(world, "send", "a"):
        if event["message"] == message:
            sizes.append(event["bytes"])
    return sizes


@pytest.mark.parametrize("make_all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("names", ["a", "ab"])
def test_texts_equal_those_of_one_process(
    make_all_reduce: MakeAllReduce, names: str
) -> None:
    _, texts = serve(names, make_all_reduce)
    assert texts == expected_texts()


@pytest.mark.parametrize("make_all_reduce", ALL_REDUCES)
@pytest.mark.parametrize("device_count", [3, 4])
def test_more_devices_generate_texts_of_one_device(
    make_all_reduce: MakeAllReduce, device_count: int
) -> None:
    _, texts_of_one = serve("a", make_all_reduce, FOUR_HEADS)
    _, texts = serve("abcd"[:device_count], make_all_reduce, FOUR_HEADS)
    assert texts == texts_of_one


def test_ring_sends_more_messages_than_star() -> None:
    message_counts = {}
    for make_all_reduce in (StarAllReduce, RingAllReduce):
        world, _ = serve("abcd", make_all_reduce, FOUR_HEADS, numerics=False)
        message_counts[make_all_reduce] = len(sent_sizes(world, "part"))
    # For each sum the coordinator sends 2 (n - 1) messages in a ring, and n - 1 messages as the root of a star.
    assert message_counts[RingAllReduce] > message_counts[StarAllReduce]


def test_flops_of_all_shards_equal_those_of_the_layer() -> None:
    flops = 0.0
    for shard in divide_layer(TINY, [1.0, 1.0]):
        for attention in (True, False):
            cost = MODEL.half_layer_cost(
                shard, tokens=1, past=5, is_attention=attention
            )
            flops += cost.of().flops
    layer = MODEL.layers_cost(count=1, tokens=1, past=5)
    assert flops == pytest.approx(layer.of().flops)


@pytest.mark.parametrize(("names", "kilobytes"), [("ab", 272), ("abcd", 816)])
def test_exchange_in_q8_0_sends_bytes_of_distributed_llama(
    names: str, kilobytes: int
) -> None:
    # b4rtaz/distributed-llama, pull request 64: Llama 3 8B with a Q80 buffer, kB of 1024 bytes for a token and device.
    architecture = Architecture(32, 4096, 32, 8, 14_336, 1024, 64)
    world, _ = serve(names, make_q8_exchange, CostModel(architecture), numerics=False)
    # The pass of a prompt generates the first token, so one token less than generated is computed after the prompt.
    computed_tokens = 0
    for request in REQUESTS:
        computed_tokens += len(request.prompt) + request.limit - 1
    sent = sum(sent_sizes(world, "packed-part"))
    assert sent / computed_tokens / 1024 == pytest.approx(kilobytes, rel=0.05)


def test_exchange_in_q8_0_generates_all_tokens() -> None:
    # Rounding to 8 bits may change the tokens, but not their number.
    _, texts = serve("ab", make_q8_exchange)
    assert count_tokens(texts) == expected_lengths()
