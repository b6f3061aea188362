"""The process of the delay line: the fate of queued packets, in real time with a fake kernel queue."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from testbed.network.link import Link
from testbed.wire.framing import ETHERNET_HEADER
from testbed_controller.shaping.engine import Loop
from tests.helpers.netfilter import FakeQueue, LoopServer, make_datagram

PACKET = make_datagram("198.18.0.3", "198.18.0.2", 500)
QUEUE = 5
"""Number of the device's queue."""
CLOCK_MARGIN = 1e-4
"""Seconds that a verdict may seem early, since test and loop read the clock at different instants."""


class Device:
    """A device whose packets pass through one queue."""

    def __init__(
        self, server: LoopServer, link: Link, downlink: tuple[float, int] | None = None
    ) -> None:
        self._server = server
        self.kernel = FakeQueue()
        self.received, injector = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self.received.settimeout(10)
        server.ask(self.kernel.socket, injector, do="open", device="a")
        self.set(link, downlink)

    def set(self, link: Link, downlink: tuple[float, int] | None = None) -> None:
        impairment = {"queue": QUEUE, "limit": 100, "link": asdict(link), "seed": "s"}
        response = self._server.ask(
            do="set", device="a", impairments=[impairment], downlink=downlink
        )
        assert response == {}

    def put_packets(self, *numbers: int) -> float:
        """Put packets into the queue and return the instant of the first one."""
        start = time.monotonic()
        for number in numbers:
            self.kernel.put(QUEUE, number, PACKET)
        return start

    def counters(self) -> dict[str, int]:
        statistics = self._server.ask(do="statistics")
        counters: dict[str, int] = statistics["devices"]["a"]["lines"][str(QUEUE)]
        return counters


@pytest.fixture
def server() -> Iterator[LoopServer]:
    loop_server = LoopServer(Loop)
    yield loop_server
    loop_server.stop()


def test_packets_leave_in_order_after_delay(server: LoopServer) -> None:
    device = Device(server, Link(delay=0.02))
    start = device.put_packets(1, 2, 3)
    verdicts = device.kernel.wait_for_verdicts(1)
    # One verdict may apply to all packets up to its number, so there may be fewer than three.
    while verdicts[-1].number < 3:
        verdicts = device.kernel.wait_for_verdicts(len(verdicts) + 1)
    assert all(verdict.accepted and verdict.batch for verdict in verdicts)
    assert verdicts[0].time - start >= 0.02 - CLOCK_MARGIN
    assert device.counters()["passed"] == 3
    assert device.counters()["under_way"] == 0


def test_changed_link_keeps_the_due_times_of_packets_in_transit(
    server: LoopServer,
) -> None:
    # Long enough for a busy host to put the second packet while the first one is in transit.
    device = Device(server, Link(delay=0.6))
    start = device.put_packets(1)
    while device.counters()["under_way"] == 0:
        pass
    device.set(Link(delay=0.001))
    device.put_packets(2)
    first, second = device.kernel.wait_for_verdicts(2)
    assert (first.number, second.number) == (2, 1)
    assert second.time - start >= 0.6 - CLOCK_MARGIN


def test_lost_packets_are_dropped(server: LoopServer) -> None:
    device = Device(server, Link(delay=0.001, loss=1.0))
    device.put_packets(1, 2)
    verdicts = device.kernel.wait_for_verdicts(2)
    assert [verdict.accepted for verdict in verdicts] == [False, False]
    assert device.counters()["dropped"] == 2


def test_second_copy_is_injected_into_the_device(server: LoopServer) -> None:
    device = Device(server, Link(delay=0.001, duplicate=1.0))
    device.put_packets(1)
    frame = device.received.recv(2000)
    assert frame[ETHERNET_HEADER:] == PACKET
    assert device.kernel.wait_for_verdicts(1)[0].accepted
    assert device.counters()["duplicated"] == 1


def test_corrupted_packet_differs_in_one_payload_bit(server: LoopServer) -> None:
    device = Device(server, Link(delay=0.001, corrupt=1.0))
    device.put_packets(1)
    [verdict] = device.kernel.wait_for_verdicts(1)
    # The attribute of the new content may be padded.
    content = verdict.content[: len(PACKET)]
    different_bits = 0
    for sent_byte, received_byte in zip(PACKET, content, strict=True):
        different_bits += (sent_byte ^ received_byte).bit_count()
    ip_header = slice(0, 20)
    assert verdict.accepted
    assert different_bits == 1
    assert content[ip_header] == PACKET[ip_header]


def test_downlink_passes_packets_at_rate_and_drops_overflow(
    server: LoopServer,
) -> None:
    delay, rate, queue_limit = 0.001, 1e6, 2
    packet_seconds = (len(PACKET) + ETHERNET_HEADER) * 8 / rate
    device = Device(server, Link(delay=delay), (rate, queue_limit))
    start = device.put_packets(1, 2, 3, 4, 5)
    verdicts = device.kernel.wait_for_verdicts(5)
    passed = [verdict for verdict in verdicts if verdict.accepted]
    # As with HTB, each packet leaves at the beginning of its transmission time.
    for position, verdict in enumerate(passed):
        due = delay + position * packet_seconds
        assert verdict.time - start >= due - CLOCK_MARGIN
    # More than the queue's limit pass if some packets leave before the last ones arrive.
    assert len(passed) >= queue_limit
    assert device.counters()["dropped"] == 5 - len(passed)


def test_closed_device_can_be_opened_again(server: LoopServer) -> None:
    # The delay is so long that the first packet is in the queue when the device is closed.
    device = Device(server, Link(delay=10.0))
    device.put_packets(1)
    server.ask(do="close", device="a")
    reopened = Device(server, Link())
    reopened.put_packets(2)
    verdicts = reopened.kernel.wait_for_verdicts(1)
    assert [verdict.number for verdict in verdicts] == [2]
    assert device.kernel.verdicts == []
