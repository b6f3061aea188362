"""The agent's sender and receiver on a shaped link: messages use its full rate despite a long delay."""

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
    with NamespaceLab("userspace", devices=2) as namespace_lab:
        yield namespace_lab


def transmit(
    lab: NamespaceLab, count: int, size: int
) -> tuple[list[Delivery], list[Arrival]]:
    """Send ``count`` messages at once from the first device to the second; return the deliveries and arrivals."""
    arrivals: list[Arrival] = []
    sender, receiver = lab.names
    address = (lab.net.endpoints[receiver].address, PORT)
    settings = Settings("run", receiver, TOKEN, data=address)
    server = lab.net.inside(receiver, lambda: DataServer(settings))
    loop = asyncio.new_event_loop()

    def accept(arrival: Arrival) -> None:
        arrivals.append(arrival)
        # A program would take the message at once, so the inbox never fills up.
        inbox.release(arrival.size)

    inbox = server.inbox = Inbox({sender: TOKEN}, 1 << 26, accept)
    loop.call_soon(server.serve)
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def send() -> list[Delivery]:
        lane = Lane(receiver, address, TOKEN)
        message = Message("m", padding=size)
        bodies = [encode(message, sender, 1, number) for number in range(count)]
        deliveries = await asyncio.gather(*map(lane.deliver, bodies))
        lane.close()
        return deliveries

    def send_all() -> list[Delivery]:
        return asyncio.run(asyncio.wait_for(send(), 60))

    try:
        return lab.net.inside(sender, send_all), arrivals
    finally:
        loop.call_soon_threadsafe(loop.stop)


def test_messages_of_100_kb_use_full_rate_of_link(lab: NamespaceLab) -> None:
    assert LONG.rate is not None
    shares = []
    # The host may be busy during one attempt.
    for _ in range(3):
        lab.shaping.set(dict.fromkeys(lab.pairs, LONG))
        deliveries, arrivals = transmit(lab, count=200, size=100_000)
        assert [arrival.envelope.sequence for arrival in arrivals] == list(range(200))
        # In the first quarter the connection is established and its congestion window grows.
        bits = 149 * wire_bytes(arrivals[-1].size) * 8
        seconds = deliveries[-1].acknowledged - deliveries[50].acknowledged
        shares.append(bits / seconds / LONG.rate)
        if shares[-1] >= 0.95:
            break
    print("share of the rate:", shares)
    assert 0.95 <= max(shares) <= 1.02
