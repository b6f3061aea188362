"""What a device hears of others' casts: whole messages, each once, lost as the links say."""

import socket
import struct
import time
from collections.abc import Sized
from functools import partial

import pytest
import torch

from testbed.network.broadcast import is_received, received_part
from testbed.wire.cast import CastForm
from testbed.wire.framing import CAST_CHUNK
from testbed.wire.message import Message
from testbed_agent.casting import Addresses, Caster, ReceiveFilter, run_mark
from testbed_agent.receiving import Arrival, Inbox


def everything(message: Message, header: int, number: int) -> Message:
    return message


FORMS = {name: CastForm(name, "abc") for name in "abc"}


def make_receiver(
    address: tuple[str, int], sources: dict[str, str], receive_filter: ReceiveFilter
) -> Caster:
    addresses = Addresses(address, None, "0.0.0.0", sources)
    return Caster(FORMS["b"], addresses, "run", 1 << 20, receive_filter)


def make_sender(address: tuple[str, int]) -> Caster:
    addresses = Addresses(("0.0.0.0", 0), address, "127.0.0.1", {})
    return Caster(FORMS["a"], addresses, "run", 1 << 20, everything)


@pytest.fixture
def judged() -> list[int]:
    """The numbers of the casts of which the receiver has decided whether it hears them."""
    return []


@pytest.fixture
def pair(judged: list[int]):
    """A sender, and what a receiver named "b" has heard; its luck can be set."""
    arrivals: list[Arrival] = []
    fraction = {"a": 0.0}
    address = ("127.0.0.1", _free_port())
    inbox = Inbox({"a": "token"}, 1 << 20, arrivals.append)

    def hears(message: Message, header: int, number: int) -> Message | None:
        found = (
            message
            if is_received(3, message.sender, "b", number, fraction["a"])
            else None
        )
        judged.append(number)
        return found

    sources = {"a": "127.0.0.1", "c": "127.0.0.3"}
    receiver = make_receiver(address, sources, hears)
    receiver.start(inbox)
    sender = make_sender(address)
    yield sender, arrivals, fraction
    sender.close()
    receiver.close()


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(arrivals: Sized, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(arrivals) < count and time.monotonic() < deadline:
        time.sleep(0.005)


def cast(
    sender: Caster, number: int, peers=("b",), padding: int = 0
) -> tuple[int, float]:
    return sender.send(
        FORMS["a"].encode(Message("m", {"number": number}, padding=padding), peers),
        1,
        number,
    )


def test_a_message_of_many_datagrams_arrives_whole_and_its_departure_is_noted(pair):
    sender, arrivals, _ = pair
    before = time.monotonic()
    size, left = cast(sender, 0, padding=5 * CAST_CHUNK)
    assert before <= left <= time.monotonic()
    wait_for(arrivals, 1)
    [arrival] = arrivals
    assert arrival.size == size > 5 * CAST_CHUNK
    assert arrival.envelope.message.padding == 5 * CAST_CHUNK


def test_a_large_cast_waits_in_the_kernel_until_the_receiver_reads(pair) -> None:
    """A receiver whose thread gets no processor for a moment loses nothing of a burst.

    The activations of 100 images of 28x28 in half precision need 109 datagrams; each occupies 2,304 bytes of the
    kernel's memory, so a socket of the usual 208 KiB would drop 17 of them.
    """
    _, arrivals, _ = pair
    address = ("127.0.0.1", _free_port())
    late = make_receiver(address, {"a": "127.0.0.1"}, everything)
    sender = make_sender(address)
    try:
        cast(sender, 0, padding=156_800)
        late.start(Inbox({"a": "token"}, 1 << 20, arrivals.append))
        wait_for(arrivals, 1)
    finally:
        sender.close()
        late.close()
    [arrival] = arrivals
    assert arrival.envelope.message.padding == 156_800


def test_whole_casts_are_lost_by_the_same_draw_everywhere_and_live(pair, judged):
    sender, arrivals, fraction = pair
    fraction["a"] = 0.5
    for number in range(100):
        cast(sender, number)
    wait_for(judged, 100)
    fraction["a"] = 0.0
    cast(sender, 100)
    expected = [
        number for number in range(100) if is_received(3, "a", "b", number, 0.5)
    ] + [100]
    wait_for(arrivals, len(expected))
    assert [arrival.envelope.message["number"] for arrival in arrivals] == expected
    assert 35 < len(expected) < 66


def test_casts_for_others_and_foreign_datagrams_are_not_heard(pair):
    sender, arrivals, _ = pair
    cast(sender, 0, peers=["c"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as foreign:
        address = sender._broadcast
        assert address is not None
        prefix = struct.pack("<4sQIHH", run_mark("run"), 1, 1, 0, 1)
        for junk in (
            b"",
            b"CAST",
            bytes(200),
            struct.pack("<4sQIHH", bytes(4), 1, 1, 0, 1),
            prefix + b"\1",
        ):
            foreign.sendto(junk, address)
    cast(sender, 1)
    wait_for(arrivals, 1)
    assert [arrival.envelope.message["number"] for arrival in arrivals] == [1]


def test_broadcast_under_another_name_is_dropped(pair):
    sender, arrivals, _ = pair
    sender.send(FORMS["c"].encode(Message("m", {"number": 0}), ["b"]), 1, 0)
    cast(sender, 1)
    elsewhere = Addresses(("0.0.0.0", 0), sender._broadcast, "127.0.0.3", {})
    other = Caster(FORMS["a"], elsewhere, "run", 1 << 20, everything)
    cast(other, 2)
    other.close()
    cast(sender, 3)
    wait_for(arrivals, 2)
    assert [arrival.envelope.message["number"] for arrival in arrivals] == [1, 3]


def test_too_large_or_unaddressed_broadcast_is_refused(pair):
    sender, _, _ = pair
    with pytest.raises(ValueError, match="too large"):
        sender.send(bytes(0x10000 * CAST_CHUNK), 1, 0)
    lonely = Caster(
        FORMS["a"],
        Addresses(("127.0.0.1", 0), None, "0.0.0.0", {}),
        "run",
        1 << 20,
        everything,
    )
    with pytest.raises(ValueError, match="no broadcast address"):
        lonely.send(b"", 1, 0)
    lonely.close()


def test_frames_are_lost_by_the_same_draws_as_on_the_virtual_clock():
    message = Message("m", {}, {"x": torch.rand(40, 20)}, sender="a")
    header = len(FORMS["a"].header(message, ["b"]))
    chance = partial(is_received, 3, "a", "b", 8, 0.3)
    read = FORMS["b"].decode(FORMS["a"].encode(message, ["b"]))
    assert read is not None
    here, there = (
        received_part(*read, 100, chance),
        received_part(message, header, 100, chance),
    )
    assert here is not None
    assert there is not None
    assert torch.equal(here.missing["x"], there.missing["x"])
    assert torch.equal(here.tensors["x"], there.tensors["x"])
    assert 0.1 < here.missing["x"].float().mean() < 0.5
