"""Rows of every matrix on every device: texts of one process, and distributed-llama's published bytes and times."""

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

import testbed
from testbed.common.errors import InputError
from testbed.messaging.mailbox import Mailbox
from testbed_generation.gather import KINDS, GatherSource, Rows, serve_rows
from testbed_generation.sharding import check_rows
from testbed_generation.source import Embedder, Service, serve_requests
from testbed_generation.tensor_parallel import TensorParallelSource
from testbed_generation.transport import Transport
from testbed_generation.weights import EMBEDDING, Seeded
from tests.helpers.worlds import events_of, make_world


def serve(
    names: str, transport: Transport, numerics: bool = True
) -> tuple[Any, dict[int, list[int]]]:
    texts: dict[int, list[int]] = {}
    source = Seeded(TINY, 1) if numerics else None

    def program(name: str) -> Any:
        async def run(device: Any) -> None:
            links = {
                (one, other): LINK for one in names for other in names if one != other
            }
            async with Mailbox(device, links, KINDS) as mailbox:
                rows = Rows(MODEL, names.index(name), len(names), transport, source)
                if name != names[0]:
                    await serve_rows(mailbox, names[0], rows)
                own = GatherSource(mailbox, names[1:], rows, source)
                embedder = Embedder(
                    mailbox, MODEL, None if source is None else source.read(EMBEDDING)
                )
                drive = TensorParallelSource(
                    mailbox, MODEL, names[:1], own, embedder, GREEDY, source
                )
                await serve_requests(
                    device, drive, Service(REQUESTS, 1, None, texts.__setitem__)
                )

        return run

    made = make_world({name: program(name) for name in names}, LINK, speed=SPEED)
    made.run()
    return made, texts


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_texts_are_those_of_one_process(names: str) -> None:
    _, texts = serve(names, Transport("f32"))
    assert texts == {
        request.number: generate_in_one_process(request, GREEDY) for request in REQUESTS
    }


def test_bytes_without_numerics_are_those_with_them() -> None:
    transfers = []
    for numerics in (True, False):
        made, texts = serve("ab", Transport("f32"), numerics)
        transfers.append(
            [
                (event["sent"], event["received"])
                for event in events_of(made, "transfer")
            ]
        )
        assert {number: len(tokens) for number, tokens in texts.items()} == {0: 6, 1: 5}
    assert transfers[0] == transfers[1]


def test_rows_that_do_not_divide_are_refused() -> None:
    check_rows(TINY, 4, 1)
    with pytest.raises(
        InputError, match="32 query rows do not divide over 2 devices in blocks of 32"
    ):
        check_rows(TINY, 2, 32)
    with pytest.raises(
        InputError, match="32 query rows do not divide over 3 devices in blocks of 1"
    ):
        check_rows(TINY, 3, 1)


PUBLISHED = {1: (1307.94, 0), 2: (739.00, 1112), 4: (458.81, 2830), 8: (296.69, 6008)}
"""Devices -> milliseconds of computing and kB for a token; README of b4rtaz/distributed-llama, revision 4d010f7."""


@pytest.mark.parametrize("devices", PUBLISHED)
def test_distributed_llama(devices: int) -> None:
    changes = {"workload.tokens": 2, "sweep": {"devices.pi.count": [devices]}}
    figures = testbed.simulate(
        testbed.load("generation/distributed-llama", changes)
    ).run.metrics
    milliseconds, kilobytes = PUBLISHED[devices]
    assert 1000 * figures["compute_per_token"]["pi1"] == pytest.approx(
        milliseconds, rel=0.05
    )
    assert (
        figures["sent_per_token"] + figures["received_per_token"]
    ) / 1024 == pytest.approx(kilobytes, rel=0.02)
