"""The agent's own sender and receiver on a shaped link: messages fill it, however long it is."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from testbed.network.link import Link
from testbed.wire.framing import wire_bytes
from testbed.wire.message import Message, encode
from testbed_agent.receiving import Arrival, DataServer, Inbox
from testbed_agent.sending import Delivery, Lane
from testbed_agent.settings import Settings
from tools.bench.conformance import NamespaceLab

pytestmark = [
    pytest.mark.root,
    pytest.mark.timed,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

TOKEN = "a-token-of-the-tests"
PORT = 8701
LONG = Link(rate=50e6, delay=0.02)


@pytest.fixture
def lab() -> Iterator[NamespaceLab]:
    with NamespaceLab("userspace", devices=2) as made:
        yield made


def transmit(
    lab: NamespaceLab, count: int, size: int
) -> tuple[list[Delivery], list[Arrival]]:
    """Send ``count`` messages at once from the first device to the second; return when each was acknowledged."""
    arrivals: list[Arrival] = []
    here, there = lab.names
    address = (lab.net.endpoints[there].address, PORT)
    data = lab.net.inside(
        there, lambda: DataServer(Settings("run", there, TOKEN, data=address))
    )
    loop = asyncio.new_event_loop()

    def arrived(arrival: Arrival) -> None:
        arrivals.append(arrival)
        inbox.release(arrival.size)

    inbox = data.inbox = Inbox({here: TOKEN}, 1 << 26, arrived)
    loop.call_soon(data.serve)
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def send() -> list[Delivery]:
        lane = Lane(there, address, TOKEN)
        bodies = [
            encode(Message("m", padding=size), here, 1, number)
            for number in range(count)
        ]
        done = await asyncio.gather(*map(lane.deliver, bodies))
        lane.close()
        return done

    try:
        return lab.net.inside(
            here, lambda: asyncio.run(asyncio.wait_for(send(), 60))
        ), arrivals
    finally:
        loop.call_soon_threadsafe(loop.stop)


def test_messages_of_100_kb_fill_50_mbit_over_20_ms(lab: NamespaceLab) -> None:
    shares = []
    for _ in range(3):  # the machine may be busy with something else meanwhile
        with_back = dict.fromkeys(lab.pairs, LONG)
        lab.shaping.set(with_back)
        done, arrivals = transmit(lab, 200, 100_000)
        assert [each.envelope.sequence for each in arrivals] == list(range(200))
        # Without the first quarter: the connection is made, and its window opens.
        carried = 149 * wire_bytes(arrivals[-1].size) * 8
        seconds = done[-1].ended - done[50].ended
        shares.append(carried / seconds / LONG.rate if LONG.rate else 0.0)
        if shares[-1] >= 0.95:
            break
    print("share of the rate:", shares)
    assert 0.95 <= max(shares) <= 1.02
