"""Broadcasts received by a device: complete messages without duplicates, and losses as drawn from the links."""

import socket
import struct
import time
from collections.abc import Iterator, Sized
from functools import partial
from typing import NamedTuple

import pytest
import torch

from testbed.network.broadcast import is_received, received_part
from testbed.wire.cast import CastEncoding
from testbed.wire.framing import CAST_CHUNK
from testbed.wire.message import Message
from testbed_agent.casting import Addresses, Caster, ReceiveFilter, run_mark
from testbed_agent.receiving import Arrival, Inbox

SEED = 3
"""Seed of the draws of losses."""
INBOX_LIMIT = 1 << 20
FORMS = {name: CastEncoding(name, "abc") for name in "abc"}


def receive_all(message: Message, header: int, number: int) -> Message:
    return message


def make_receiver(
    address: tuple[str, int], sources: dict[str, str], receive_filter: ReceiveFilter
) -> Caster:
    addresses = Addresses(address, None, "0.0.0.0", sources)
    return Caster(FORMS["b"], addresses, "run", INBOX_LIMIT, receive_filter)


def make_sender(address: tuple[str, int], source: str = "127.0.0.1") -> Caster:
    addresses = Addresses(("0.0.0.0", 0), address, source, {})
    return Caster(FORMS["a"], addresses, "run", INBOX_LIMIT, receive_all)


class Pair(NamedTuple):
    """A sender "a" and the state of a receiver "b"."""

    sender: Caster
    arrivals: list[Arrival]
    filtered: list[int]
    """Numbers of the broadcasts for which the receiver has drawn a loss or reception."""
    loss: dict[str, float]
    """Loss by sender, which a test may change."""

    def arrived_numbers(self) -> list[int]:
        return [arrival.envelope.message["number"] for arrival in self.arrivals]


@pytest.fixture
def pair() -> Iterator[Pair]:
    address = ("127.0.0.1", find_free_port())
    arrivals: list[Arrival] = []
    filtered: list[int] = []
    loss = {"a": 0.0}

    def draw_reception(message: Message, header: int, number: int) -> Message | None:
        received = is_received(SEED, message.sender, "b", number, loss["a"])
        filtered.append(number)
        return message if received else None

    sources = {"a": "127.0.0.1", "c": "127.0.0.3"}
    receiver = make_receiver(address, sources, draw_reception)
    receiver.start(Inbox({"a": "token"}, INBOX_LIMIT, arrivals.append))
    sender = make_sender(address)
    yield Pair(sender, arrivals, filtered, loss)
    sender.close()
    receiver.close()


def find_free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_count(items: Sized, count: int) -> None:
    """Wait for a number of items; a missing one is reported by the assertions of the test."""
    deadline = time.monotonic() + 20
    while len(items) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def cast(
    sender: Caster, number: int, peers=("b",), padding: int = 0
) -> tuple[int, float]:
    """Send a broadcast; return the size and the instant of departure."""
    message = Message("m", {"number": number}, padding=padding)
    return sender.send(FORMS["a"].encode(message, peers), 1, number)


def test_broadcast_of_many_datagrams_arrives_completely(pair):
    start = time.monotonic()
    size, departure = cast(pair.sender, 0, padding=5 * CAST_CHUNK)
    assert start <= departure <= time.monotonic()
    wait_for_count(pair.arrivals, 1)
    [arrival] = pair.arrivals
    assert arrival.size == size > 5 * CAST_CHUNK
    assert arrival.envelope.message.padding == 5 * CAST_CHUNK


def test_large_broadcast_waits_in_the_kernel_for_a_late_receiver() -> None:
    # On a busy host, the receiving thread may get no processor during a burst. The activations of 100 images of 28x28
    # in half precision need 109 datagrams, each of which occupies 2,304 bytes of the kernel's memory, so that a socket
    # with the usual 208 KiB would drop 17 of them.
    padding = 156_800
    arrivals: list[Arrival] = []
    address = ("127.0.0.1", find_free_port())
    receiver = make_receiver(address, {"a": "127.0.0.1"}, receive_all)
    sender = make_sender(address)
    try:
        cast(sender, 0, padding=padding)
        receiver.start(Inbox({"a": "token"}, INBOX_LIMIT, arrivals.append))
        wait_for_count(arrivals, 1)
    finally:
        sender.close()
        receiver.close()
    [arrival] = arrivals
    assert arrival.envelope.message.padding == padding


def test_lost_broadcasts_follow_the_draws_and_the_current_loss(pair):
    pair.loss["a"] = 0.5
    for number in range(100):
        cast(pair.sender, number)
    # The loss changes only after the draws of all broadcasts.
    wait_for_count(pair.filtered, 100)
    pair.loss["a"] = 0.0
    cast(pair.sender, 100)
    expected = []
    for number in range(100):
        if is_received(SEED, "a", "b", number, 0.5):
            expected.append(number)
    expected.append(100)
    wait_for_count(pair.arrivals, len(expected))
    assert pair.arrived_numbers() == expected
    # Within three standard deviations, sqrt(100) / 2 each, of 50 broadcasts and the last one.
    assert 35 < len(expected) < 66


def test_broadcasts_for_others_and_foreign_datagrams_are_ignored(pair):
    cast(pair.sender, 0, peers=["c"])
    address = pair.sender._broadcast
    assert address is not None
    # Mark of the run, incarnation of the sender, number of the broadcast, and number and count of its chunks.
    head = struct.Struct("<4sQIHH")
    other_run = head.pack(bytes(4), 1, 1, 0, 1)
    undecodable = head.pack(run_mark("run"), 1, 1, 0, 1) + b"\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
        for datagram in (b"", b"CAST", bytes(200), other_run, undecodable):
            foreign.sendto(datagram, address)
    cast(pair.sender, 1)
    wait_for_count(pair.arrivals, 1)
    assert pair.arrived_numbers() == [1]


def test_broadcast_under_another_name_is_dropped(pair):
    # The name of another device, from the address of a.
    other_name = FORMS["c"].encode(Message("m", {"number": 0}), ["b"])
    pair.sender.send(other_name, 1, 0)
    cast(pair.sender, 1)
    # The name of a, from the address of another device.
    impostor = make_sender(pair.sender._broadcast, source="127.0.0.3")
    cast(impostor, 2)
    impostor.close()
    cast(pair.sender, 3)
    wait_for_count(pair.arrivals, 2)
    assert pair.arrived_numbers() == [1, 3]


def test_too_large_broadcast_is_refused(pair):
    # The count of the chunks has 16 bits.
    with pytest.raises(ValueError, match="too large"):
        pair.sender.send(bytes(0x10000 * CAST_CHUNK), 1, 0)


def test_sending_without_a_broadcast_address_is_refused():
    addresses = Addresses(("127.0.0.1", 0), None, "0.0.0.0", {})
    caster = Caster(FORMS["a"], addresses, "run", INBOX_LIMIT, receive_all)
    with pytest.raises(ValueError, match="no broadcast address"):
        caster.send(b"", 1, 0)
    caster.close()


def test_frames_are_lost_by_the_draws_of_the_virtual_clock():
    # An emulation draws from the decoded message, a simulation from the original one.
    message = Message("m", {}, {"x": torch.rand(40, 20)}, sender="a")
    header = len(FORMS["a"].header(message, ["b"]))
    draw = partial(is_received, SEED, "a", "b", 8, 0.3)
    decoded = FORMS["b"].decode(FORMS["a"].encode(message, ["b"]))
    assert decoded is not None
    emulated = received_part(*decoded, 100, draw)
    simulated = received_part(message, header, 100, draw)
    assert emulated is not None
    assert simulated is not None
    assert torch.equal(emulated.missing["x"], simulated.missing["x"])
    assert torch.equal(emulated.tensors["x"], simulated.tensors["x"])
    assert 0.1 < emulated.missing["x"].float().mean() < 0.5
