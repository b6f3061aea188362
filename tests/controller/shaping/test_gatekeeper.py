"""The process of the gate: packets wait for the medium, in real time with a fake kernel queue."""

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
PACKET_SECONDS = (SIZE + ETHERNET_HEADER) * 8 / RATE
PACKET = make_datagram("198.18.0.2", "198.18.0.3", SIZE)
ROUTE = {"channels": ["cell"], "rate": RATE, "limit": 10}
CLOCK_MARGIN = 1e-4
"""Seconds that a verdict may seem early, since test and loop read the clock at different instants."""


@pytest.fixture
def server() -> Iterator[LoopServer]:
    loop_server = LoopServer(Loop)
    yield loop_server
    loop_server.stop()


def open_queue(server: LoopServer, device: str, **routes: object) -> FakeQueue:
    """Open a device with routes by address, by default one to the packet's destination."""
    queue = FakeQueue()
    assert server.ask(queue.socket, do="open", device=device) == {}
    device_routes = routes or {"198.18.0.3": ROUTE}
    assert server.ask(do="set", device=device, routes=device_routes) == {}
    return queue


def test_packets_leave_at_end_of_transmission(server: LoopServer) -> None:
    queue = open_queue(server, "a")
    start = time.monotonic()
    for number in range(3):
        queue.put(QUEUE, number, PACKET)
    verdicts = queue.wait_for_verdicts(3)
    assert [verdict.number for verdict in verdicts] == [0, 1, 2]
    # A batch verdict would also release later packets, which are still waiting.
    assert all(verdict.accepted and not verdict.batch for verdict in verdicts)
    for position, verdict in enumerate(verdicts, 1):
        assert verdict.time - start >= position * PACKET_SECONDS - CLOCK_MARGIN


def test_stations_of_one_cell_take_turns(server: LoopServer) -> None:
    queue_of_a, queue_of_b = open_queue(server, "a"), open_queue(server, "b")
    start = time.monotonic()
    queue_of_a.put(QUEUE, 1, PACKET)
    queue_of_b.put(QUEUE, 2, PACKET)
    [verdict_of_a] = queue_of_a.wait_for_verdicts(1)
    [verdict_of_b] = queue_of_b.wait_for_verdicts(1)
    last = max(verdict_of_a.time, verdict_of_b.time)
    assert last - start >= 2 * PACKET_SECONDS - CLOCK_MARGIN


def test_packets_for_a_full_queue_are_dropped_at_once(server: LoopServer) -> None:
    # A packet takes 0.2 s, so that even a busy host puts all five packets before the first one has left.
    slow_rate = RATE * PACKET_SECONDS / 0.2
    route = {**ROUTE, "rate": slow_rate, "limit": 2}
    queue = open_queue(server, "a", **{"198.18.0.3": route})
    for number in range(5):
        queue.put(QUEUE, number, PACKET)
    verdicts = queue.wait_for_verdicts(5)
    dropped = [verdict.number for verdict in verdicts if not verdict.accepted]
    assert len(dropped) >= 2
    assert dropped == sorted(dropped)
    statistics = server.ask(do="statistics")
    assert statistics["dropped"] == {"a": len(dropped)}
    assert statistics["passed"] == 5 - len(dropped)
    assert statistics["waiting"] == {"a": 0}
    assert statistics["lateness"]


def test_packets_without_a_route_leave_at_once(server: LoopServer) -> None:
    queue = open_queue(server, "a", **{"198.18.0.9": ROUTE})
    queue.put(QUEUE, 7, PACKET)
    assert queue.wait_for_verdicts(1)[0].accepted
    # A device may be closed again, as after a lost response.
    assert server.ask(do="close", device="a") == {}
    assert server.ask(do="close", device="a") == {}
    assert server.ask(do="statistics")["waiting"] == {}
