"""The gate's process: what waits for its turn on a medium, in real time against a queue of our own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from testbed.wire.framing import ETHERNET_HEADER
from testbed_controller.shaping.gatekeeper import Loop
from testbed_controller.shaping.medium import QUEUE
from tests.helpers.netfilter import FakeQueue, LoopServer, make_datagram

RATE = 1e6
SIZE = 1000
LASTS = (SIZE + ETHERNET_HEADER) * 8 / RATE
TO_B = make_datagram("198.18.0.2", "198.18.0.3", SIZE)
ROUTE = {"channels": ["cell"], "rate": RATE, "limit": 10}


@pytest.fixture
def server() -> Iterator[LoopServer]:
    made = LoopServer(Loop)
    yield made
    made.stop()


def opened(server: LoopServer, device: str, **routes: object) -> FakeQueue:
    queue = FakeQueue()
    assert server.ask(queue.socket, do="open", device=device) == {}
    given = routes or {"198.18.0.3": ROUTE}
    assert server.ask(do="set", device=device, routes=given) == {}
    return queue


def test_packets_leave_when_their_time_on_the_medium_is_over(
    server: LoopServer,
) -> None:
    queue = opened(server, "a")
    began = time.monotonic()
    for number in range(3):
        queue.put(QUEUE, number, TO_B)
    found = queue.wait_for_verdicts(3)
    assert [each.number for each in found] == [0, 1, 2]
    assert all(each.accepted and not each.batch for each in found)
    for place, each in enumerate(found, 1):
        assert each.time - began >= place * LASTS - 1e-4


def test_stations_of_one_cell_take_turns(server: LoopServer) -> None:
    one, two = opened(server, "a"), opened(server, "b")
    began = time.monotonic()
    one.put(QUEUE, 1, TO_B)
    two.put(QUEUE, 2, TO_B)
    last = max(one.wait_for_verdicts(1)[0].time, two.wait_for_verdicts(1)[0].time)
    assert last - began >= 2 * LASTS - 1e-4


def test_packets_for_a_full_queue_are_dropped_at_once(server: LoopServer) -> None:
    # On the medium for 0.2 s each: also a busy host has put all five before the first of them has left.
    queue = opened(
        server, "a", **{"198.18.0.3": {**ROUTE, "rate": RATE * LASTS / 0.2, "limit": 2}}
    )
    for number in range(5):
        queue.put(QUEUE, number, TO_B)
    found = queue.wait_for_verdicts(5)
    dropped = [each.number for each in found if not each.accepted]
    assert len(dropped) >= 2
    assert dropped == sorted(dropped)
    figures = server.ask(do="statistics")
    assert figures["dropped"] == {"a": len(dropped)}
    assert figures["passed"] == 5 - len(dropped)
    assert figures["waiting"] == {"a": 0}
    assert figures["lateness"]


def test_ungated_packets_leave_at_once_and_none_after_a_close(
    server: LoopServer,
) -> None:
    queue = opened(server, "a", **{"198.18.0.9": ROUTE})
    queue.put(QUEUE, 7, TO_B)
    assert queue.wait_for_verdicts(1)[0].accepted
    assert server.ask(do="close", device="a") == {}
    assert server.ask(do="close", device="a") == {}
    assert server.ask(do="statistics")["waiting"] == {}
