"""Tensor parallelism by rows generates the texts of one process, and has distributed-llama's bytes and times."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_model import (
    LINK,
    MODEL,
    SEED,
    SPEED,
    TINY,
    count_tokens,
    expected_lengths,
    expected_texts,
    full_mesh,
    serve_as_coordinator,
)

import testbed
from testbed.common.errors import InputError
from testbed.messaging.mailbox import Mailbox
from testbed_generation.gather import (
    KINDS,
    MatrixRows,
    RowCoordinator,
    serve_products,
)
from testbed_generation.sharding import check_row_division
from testbed_generation.transport import Transport
from testbed_generation.weights import SeededWeights
from tests.helpers.worlds import events_of, make_world


def serve(names: str, *, numerics: bool = True) -> tuple[Any, dict[int, list[int]]]:
    """Serve the requests on devices, of which the first is the coordinator.

    Return the simulated world and the tokens of each request.
    """
    texts: dict[int, list[int]] = {}
    weight_source = SeededWeights(TINY, SEED) if numerics else None
    links = full_mesh(names)
    coordinator, *workers = names

    def make_program(name: str) -> Any:
        async def program(device: Any) -> None:
            async with Mailbox(device, links, KINDS) as mailbox:
                rows = MatrixRows(
                    MODEL,
                    part=names.index(name),
                    parts=len(names),
                    transport=Transport("f32"),
                    weight_source=weight_source,
                )
                if name != coordinator:
                    # Never returns: the end of the run cancels this program.
                    await serve_products(mailbox, coordinator, rows)
                    return
                texts.update(
                    await serve_as_coordinator(
                        mailbox,
                        MODEL,
                        receivers=(),
                        local_part=RowCoordinator(
                            mailbox, workers, rows, weight_source
                        ),
                        weight_source=weight_source,
                    )
                )

        return program

    programs = {name: make_program(name) for name in names}
    world = make_world(programs, LINK, speed=SPEED)
    world.run()
    return world, texts


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_texts_equal_those_of_one_process(names: str) -> None:
    _, texts = serve(names)
    assert texts == expected_texts()


def test_bytes_without_numerics_equal_those_with_numerics() -> None:
    transfers = []
    for numerics in (True, False):
        world, texts = serve("ab", numerics=numerics)
        sizes = []
        for event in events_of(world, "transfer"):
            sizes.append((event["sent"], event["received"]))
        transfers.append(sizes)
        assert count_tokens(texts) == expected_lengths()
    assert transfers[0] == transfers[1]


def test_rows_that_do_not_divide_over_devices_are_refused() -> None:
    # 32 query rows, 16 key rows, 32 output rows and 48 hidden rows divide over 4 devices.
    check_row_division(TINY, devices=4, block=1)
    with pytest.raises(InputError, match=r"32 query rows .* 2 devices in blocks of 32"):
        check_row_division(TINY, devices=2, block=32)
    with pytest.raises(InputError, match=r"32 query rows .* 3 devices in blocks of 1"):
        check_row_division(TINY, devices=3, block=1)


PUBLISHED = {1: (1307.94, 0), 2: (739.00, 1112), 4: (458.81, 2830), 8: (296.69, 6008)}
"""By number of devices, milliseconds of computing and kB of 1024 bytes for a token.

The source is the README of b4rtaz/distributed-llama at revision 4d010f7.
"""


@pytest.mark.parametrize("devices", PUBLISHED)
def test_times_and_bytes_agree_with_distributed_llama(devices: int) -> None:
    changes = {"workload.tokens": 2, "sweep": {"devices.pi.count": [devices]}}
    scenario = testbed.load("generation/distributed-llama", changes)
    metrics = testbed.simulate(scenario).run.metrics
    milliseconds, kilobytes = PUBLISHED[devices]
    # pi1 is the coordinator, whose times are published.
    computing = 1000 * metrics["compute_per_token"]["pi1"]
    assert computing == pytest.approx(milliseconds, rel=0.05)
    transferred = metrics["sent_per_token"] + metrics["received_per_token"]
    assert transferred / 1024 == pytest.approx(kilobytes, rel=0.02)
