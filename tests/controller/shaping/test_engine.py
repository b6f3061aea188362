"""The delay line's process: what becomes of queued packets, in real time against a queue of our own."""

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


class Device:
    """A device with one queue, numbered 5."""

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
        each = {"queue": 5, "limit": 100, "link": asdict(link), "seed": "s"}
        assert (
            self._server.ask(
                do="set", device="a", impairments=[each], downlink=downlink
            )
            == {}
        )

    def arrives(self, *numbers: int) -> float:
        began = time.monotonic()
        for number in numbers:
            self.kernel.put(5, number, PACKET)
        return began

    def counted(self) -> dict[str, int]:
        found: dict[str, int] = self._server.ask(do="statistics")["devices"]["a"][
            "lines"
        ]["5"]
        return found


@pytest.fixture
def server() -> Iterator[LoopServer]:
    made = LoopServer(Loop)
    yield made
    made.stop()


def test_packets_leave_in_their_order_when_their_delay_is_over(
    server: LoopServer,
) -> None:
    device = Device(server, Link(delay=0.02))
    began = device.arrives(1, 2, 3)
    found = device.kernel.wait_for_verdicts(1)
    while found[-1].number < 3:  # one verdict may hold for all that came before it
        found = device.kernel.wait_for_verdicts(len(found) + 1)
    assert all(each.accepted and each.batch for each in found)
    assert found[0].time - began >= 0.02 - 1e-4
    assert device.counted()["passed"] == 3
    assert device.counted()["under_way"] == 0


def test_changed_link_keeps_the_due_times_of_packets_in_transit(
    server: LoopServer,
) -> None:
    device = Device(
        server, Link(delay=0.6)
    )  # of which a busy host needs some until the second one is there
    began = device.arrives(1)
    while device.counted()["under_way"] == 0:
        pass
    device.set(Link(delay=0.001))
    device.arrives(2)
    first, second = device.kernel.wait_for_verdicts(2)
    assert (first.number, second.number) == (2, 1)
    assert second.time - began >= 0.6 - 1e-4


def test_lost_packets_are_dropped(server: LoopServer) -> None:
    device = Device(server, Link(delay=0.001, loss=1.0))
    device.arrives(1, 2)
    assert [each.accepted for each in device.kernel.wait_for_verdicts(2)] == [
        False,
        False,
    ]
    assert device.counted()["dropped"] == 2


def test_second_copy_is_injected_into_the_device(server: LoopServer) -> None:
    device = Device(server, Link(delay=0.001, duplicate=1.0))
    device.arrives(1)
    frame = device.received.recv(2000)
    assert frame[ETHERNET_HEADER:] == PACKET
    assert device.kernel.wait_for_verdicts(1)[0].accepted
    assert device.counted()["duplicated"] == 1


def test_a_corrupted_packet_differs_in_one_bit_of_its_payload(
    server: LoopServer,
) -> None:
    device = Device(server, Link(delay=0.001, corrupt=1.0))
    device.arrives(1)
    [verdict] = device.kernel.wait_for_verdicts(1)
    content = verdict.content[: len(PACKET)]
    different = sum(
        (one ^ two).bit_count() for one, two in zip(content, PACKET, strict=True)
    )
    assert verdict.accepted
    assert different == 1
    assert content[:20] == PACKET[:20]


def test_downlink_passes_packets_at_its_rate_and_drops_the_overflow(
    server: LoopServer,
) -> None:
    size, rate = len(PACKET) + ETHERNET_HEADER, 1e6
    device = Device(server, Link(delay=0.001), (rate, 2))
    began = device.arrives(1, 2, 3, 4, 5)
    found = device.kernel.wait_for_verdicts(5)
    passed = [each for each in found if each.accepted]
    for place, each in enumerate(
        passed
    ):  # as of HTB, each leaves at the beginning of its time
        assert each.time - began >= 0.001 + place * size * 8 / rate - 1e-4
    assert (
        len(passed) >= 2
    )  # of its queue; the others, unless some left meanwhile, found it full
    assert device.counted()["dropped"] == 5 - len(passed)


def test_closed_device_can_be_opened_again(server: LoopServer) -> None:
    device = Device(server, Link(delay=10.0))
    device.arrives(1)
    server.ask(do="close", device="a")
    again = Device(server, Link())
    again.arrives(2)
    assert [each.number for each in again.kernel.wait_for_verdicts(1)] == [2]
    assert device.kernel.verdicts == []
