"""Tensor parallelism gives the texts of one process, over any number of devices and either all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
from test_serving import (
    GREEDY,
    LINK,
    MODEL,
    REQUESTS,
    SPEED,
    TINY,
    generate_in_one_process,
)

from testbed.messaging.mailbox import Mailbox
from testbed_generation.architecture import Architecture
from testbed_generation.collectives import Exchange, Ring, Star
from testbed_generation.costs import CostModel
from testbed_generation.sharding import divide_layer
from testbed_generation.source import Embedder, Service, serve_requests
from testbed_generation.tensor_parallel import KINDS, ShardHolder, TensorParallelSource
from testbed_generation.transport import Transport
from testbed_generation.weights import EMBEDDING, Seeded
from tests.helpers.worlds import events_of, make_world


def exchange(mailbox: Mailbox, names: str) -> Exchange:
    return Exchange(mailbox, names, Transport("f32"))


def exchange_of_bytes(mailbox: Mailbox, names: str) -> Exchange:
    return Exchange(mailbox, names, Transport("q8_0"))


def serve(
    names: str, reduce: Any, model: CostModel = MODEL, numerics: bool = True
) -> tuple[Any, dict[int, list[int]]]:
    texts: dict[int, list[int]] = {}
    source = Seeded(model.architecture, 1) if numerics else None
    shards = divide_layer(model.architecture, [1.0] * len(names))

    def program(name: str) -> Any:
        async def run(device: Any) -> None:
            links = {
                (one, other): LINK for one in names for other in names if one != other
            }
            async with Mailbox(device, links, KINDS) as mailbox:
                shard = shards[names.index(name)]
                holder = ShardHolder(
                    mailbox, model, shard, source, reduce(mailbox, names)
                )
                if name != names[0]:
                    await holder.serve_forwards()
                embedder = Embedder(
                    mailbox, model, None if source is None else source.read(EMBEDDING)
                )
                drive = TensorParallelSource(
                    mailbox, model, names, holder, embedder, GREEDY, source
                )
                await serve_requests(
                    device, drive, Service(REQUESTS, 1, None, texts.__setitem__)
                )

        return run

    made = make_world({name: program(name) for name in names}, LINK, speed=SPEED)
    made.run()
    return made, texts


@pytest.mark.parametrize("reduce", [Star, Ring, exchange])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_texts_are_those_of_one_process(reduce: Any, names: str) -> None:
    _, texts = serve(names, reduce)
    assert texts == {
        request.number: generate_in_one_process(request, GREEDY) for request in REQUESTS
    }


@pytest.mark.parametrize("reduce", [Star, Ring, exchange])
@pytest.mark.parametrize("number", [3, 4])
def test_more_devices_give_the_same_texts(reduce: Any, number: int) -> None:
    model = CostModel(Architecture(2, 32, 4, 4, 48, 64, 128))
    _, one = serve("a", reduce, model)
    _, several = serve("abcd"[:number], reduce, model)
    assert several == one


def test_a_ring_takes_more_messages_and_fewer_bytes_on_each_link() -> None:
    model = CostModel(Architecture(2, 32, 4, 4, 48, 64, 128))
    sent = {}
    for reduce in (Star, Ring):
        made, _ = serve("abcd", reduce, model, numerics=False)
        parts = [
            event
            for event in events_of(made, "send", "a")
            if event["message"] == "part"
        ]
        sent[reduce] = (len(parts), sum(event["bytes"] for event in parts))
    assert sent[Ring][0] > sent[Star][0]


def test_costs_of_all_shards_are_those_of_the_layers() -> None:
    shards = divide_layer(TINY, [1.0, 1.0])
    flops = sum(
        MODEL.shard_part(shard, 1, 5, attention=attention).of().flops
        for shard in shards
        for attention in (True, False)
    )
    assert flops == pytest.approx(MODEL.layers_cost(1, 1, 5).of().flops)


@pytest.mark.parametrize(("names", "kilobytes"), [("ab", 272), ("abcd", 816)])
def test_an_exchange_in_q8_0_sends_the_bytes_of_distributed_llama(
    names: str, kilobytes: int
) -> None:
    # b4rtaz/distributed-llama, pull request 64: Llama 3 8B with a Q80 buffer, kB of 1024 for a token and device.
    architecture = Architecture(32, 4096, 32, 8, 14_336, 1024, 64)
    made, _ = serve(names, exchange_of_bytes, CostModel(architecture), numerics=False)
    tokens = sum(request.limit + len(request.prompt) - 1 for request in REQUESTS)
    values = 0
    for event in events_of(made, "send", "a"):
        if event["message"] == "packed-part":
            values += event["bytes"]
    assert values / tokens / 1024 == pytest.approx(kilobytes, rel=0.05)


def test_an_exchange_in_q8_0_gives_all_devices_the_same_text() -> None:
    _, texts = serve("ab", exchange_of_bytes)
    assert {number: len(tokens) for number, tokens in texts.items()} == {0: 6, 1: 5}
