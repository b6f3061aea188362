"""Transmission of messages over plain links: times computed by hand, order, loss and cancelled sends."""

import asyncio

import pytest

from testbed.device import Device
from testbed.network.link import Link
from testbed.simulation.channel import next_attempt
from testbed.wire.framing import WINDOW, cast_wire_bytes, chunks, wire_bytes
from testbed.wire.message import Message
from tests.helpers.worlds import (
    LINK,
    events_of,
    first_message_bytes,
    make_world,
    receive_forever,
)
from tests.testbed.simulation.observations import (
    send_one,
    sleep_for,
    times_of,
    transmission_time,
    values_of,
)


def send_concurrently(peer: str, count: int, padding: int):
    """Make a program to send equal messages concurrently, of kinds m000, m001 and so on."""

    async def program(device: Device):
        sends = []
        for number in range(count):
            # Kinds of equal length, so that all messages have the same number of bytes.
            message = Message(f"m{number:03}", padding=padding)
            sends.append(device.send(peer, message))
        await asyncio.gather(*sends)

    return program


def send_sequentially(peer: str, count: int, padding: int = 0):
    """Make a program to send each message after the acknowledgement of the previous one."""

    async def program(device: Device):
        for _ in range(count):
            await device.send(peer, Message("m", padding=padding))

    return program


def collect_kinds(kinds: list):
    """Make a program to append the kind of each received message to a list."""

    async def program(device: Device):
        while True:
            message = await device.receive()
            kinds.append(message.kind)

    return program


def collect_field(name: str, values: list):
    """Make a program to append a field of each received message to a list."""

    async def program(device: Device):
        while True:
            message = await device.receive()
            values.append(message[name])

    return program


def test_wire_bytes_include_headers_of_message_and_packets():
    # 132 bytes for a message; 66 for each packet: Ethernet 14, IP 20 and TCP with its timestamps 32.
    assert wire_bytes(1000) == 1000 + 132 + 66
    assert wire_bytes(10_000) == 10_000 + 132 + 7 * 66
    # A cast has 20 bytes of its own and UDP's 8 instead of TCP's 32 for each packet.
    assert chunks(1452) == 1
    assert cast_wire_bytes(1452) == 1452 + 20 + 8 + 20 + 14 == 1514
    assert cast_wire_bytes(1453) == 1514 + 1 + 62


# A limit on the uplink that is no tighter than the link must not change anything: it selects the shared channel.
@pytest.mark.parametrize(
    "access", [{}, {"source": {"uplink": 8e6}}], ids=["plain", "shared"]
)
def test_messages_to_one_peer_are_transmitted_one_after_another(access):
    world = make_world(
        {
            "source": send_concurrently("sink", 3, padding=50_000),
            "sink": receive_forever,
        },
        access=access,
    )
    world.run()
    seconds = transmission_time(world, "m000")
    received, sent = events_of(world, "receive"), events_of(world, "send")
    for index in range(3):
        begin, end = index * seconds, (index + 1) * seconds
        assert received[index]["start"] == pytest.approx(begin + LINK.delay)
        assert received[index]["duration"] == pytest.approx(seconds)
        assert received[index]["time"] == pytest.approx(end + LINK.delay)
        assert sent[index]["start"] == 0
        assert sent[index]["queued"] == pytest.approx(begin)
        # A send lasts until its acknowledgement, one more delay later.
        assert sent[index]["time"] == pytest.approx(end + 2 * LINK.delay)
        assert sent[index]["duration"] == sent[index]["time"]


@pytest.mark.parametrize(
    "access", [{}, {"coordinator": {"uplink": 1e12}}], ids=["plain", "shared"]
)
def test_full_window_waits_for_first_acknowledgement(access):
    # Two messages exceed the window, so each pair waits for the round trip of 0.5 s of the pair before it.
    world = make_world(
        {
            "coordinator": send_concurrently("b", 5, padding=WINDOW // 2 + 1),
            "b": receive_forever,
        },
        link=Link(delay=0.25),
        access=access,
    )
    world.run()
    expected = [0.25, 0.25, 0.75, 0.75, 1.25]
    assert times_of(world, "receive") == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    "access", [{}, {"coordinator": {"uplink": 50e6}}], ids=["plain", "shared"]
)
def test_many_messages_use_full_rate_of_long_link(access):
    world = make_world(
        {
            "coordinator": send_concurrently("b", 100, padding=100_000),
            "b": receive_forever,
        },
        link=Link(rate=50e6, delay=0.02),
        access=access,
    )
    world.run()
    bits = 100 * first_message_bytes(world, "m000") * 8
    # The round trip of 0.04 s of the last message is not transmission.
    assert bits / (world.event_queue.now - 0.04) / 50e6 == pytest.approx(1)


def test_acknowledgements_stay_in_order_when_delay_shrinks():
    order = []

    async def send_five(device: Device):
        async def send_numbered(number: int):
            await device.send("b", Message("m", {"number": number}))
            order.append(number)

        await asyncio.gather(*(send_numbered(number) for number in range(5)))

    shorten = {
        "degrade": {"between": ["coordinator", "b"], "delay": "1ms"},
        "at": "300ms",
    }
    world = make_world(
        {"coordinator": send_five, "b": receive_forever},
        link=Link(rate=1e5, delay=0.2),
        faults=[shorten],
    )
    world.run()
    assert order == list(range(5))
    times = times_of(world, "send")
    assert times == sorted(times)


def test_links_to_different_peers_do_not_share_rate():
    async def send_to_both(device: Device):
        message = Message("m", padding=100_000)
        await asyncio.gather(device.send("b", message), device.send("c", message))

    world = make_world(
        {"coordinator": send_to_both, "b": receive_forever, "c": receive_forever}
    )
    world.run()
    first, second = events_of(world, "receive")
    assert first["time"] == second["time"]


def test_message_on_link_without_rate_takes_only_delay():
    # Half a gigabyte, so that any rate would add to the time.
    world = make_world(
        {"coordinator": send_one("b", padding=5 * 10**8 - 1000), "b": receive_forever},
        link=Link(delay=0.25),
    )
    world.run()
    assert events_of(world, "receive")[0]["time"] == 0.25
    assert events_of(world, "send")[0]["time"] == 0.5


def test_messages_of_different_sizes_arrive_in_send_order_despite_loss():
    numbers = []

    async def send_numbered(device: Device):
        sends = []
        for number in range(200):
            message = Message("m", {"number": number}, padding=number % 7 * 900)
            sends.append(asyncio.create_task(device.send("b", message)))
        await asyncio.gather(*sends)

    make_world(
        {"coordinator": send_numbered, "b": collect_field("number", numbers)},
        link=Link(rate=1e6, delay=0.02, loss=0.05),
    ).run()
    assert numbers == list(range(200))


def test_received_message_is_independent_of_later_changes_by_sender():
    import torch

    received = []

    async def send_and_change(device: Device):
        weights, fields = torch.zeros(3), {"list": [1]}
        message = Message("m", fields, {"w": weights})
        sending = asyncio.create_task(device.send("b", message))
        # The send begins, and copies the message, before the sender changes the values.
        await asyncio.sleep(0)
        weights += 1
        fields["list"].append(2)
        await sending

    async def receive_one(device: Device):
        received.append(await device.receive())

    make_world({"coordinator": send_and_change, "b": receive_one}).run()
    (message,) = received
    assert message.tensors["w"].tolist() == [0, 0, 0]
    assert message["list"] == [1]


def test_loss_costs_time_and_depends_only_on_seed():
    # The delay of only 20 messages varies by a quarter of its mean from seed to seed.
    count = 200

    def duration(loss):
        world = make_world(
            {
                "coordinator": send_sequentially("b", count, padding=100_000),
                "b": receive_forever,
            },
            link=Link(rate=8e6, delay=0.01, loss=loss),
        )
        world.run()
        return world.event_queue.now

    lossless, lossy = duration(0.0), duration(0.02)
    # 70 segments a message: about three of four messages lose some, each time for a round trip of 20 ms.
    assert count * 0.005 < lossy - lossless < count * 0.1
    assert duration(0.02) == lossy


def test_lost_message_of_one_packet_waits_for_timeout():
    world = make_world(
        {"coordinator": send_sequentially("b", 100), "b": receive_forever},
        link=Link(rate=8e6, delay=0.01, loss=0.2),
    )
    world.run()
    durations = values_of(world, "send", "duration")
    delayed = [duration for duration in durations if duration > 0.2]
    # Each message and each acknowledgement is lost in one case of five: 36 of 100, within 3 standard deviations.
    assert 22 < len(delayed) < 52
    assert min(durations) < 0.03


def test_cancelled_send_to_dead_peer_is_withdrawn():
    kinds = []

    async def cancel_first_send(device: Device):
        await device.sleep(1)
        first = asyncio.create_task(
            asyncio.wait_for(device.send("b", Message("withdrawn")), 0.5)
        )
        second = asyncio.create_task(device.send("b", Message("kept")))
        with pytest.raises(TimeoutError):
            await first
        assert device.now() == 1.5
        await second

    world = make_world(
        {"coordinator": cancel_first_send, "b": collect_kinds(kinds)},
        faults=[{"kill": "b", "at": "0.9s", "for": "2s"}],
    )
    world.run()
    assert kinds == ["kept"]


def test_withdrawn_message_is_not_sent_to_restarted_peer():
    kinds = []

    async def cancel_first_send(device: Device):
        first = asyncio.create_task(device.send("b", Message("withdrawn")))
        await device.sleep(0.3)
        first.cancel()
        await device.send("b", Message("kept"))

    # The first message is on its way, for 0.5 s, when its send is cancelled and the peer is killed.
    world = make_world(
        {"coordinator": cancel_first_send, "b": collect_kinds(kinds)},
        link=Link(delay=0.5),
        faults=[{"kill": "b", "at": "0.4s", "for": "1s"}],
    )
    world.run()
    assert kinds == ["kept"]


def test_message_of_killed_sender_is_not_sent_again():
    boot_times = []

    async def send_boot_time(device: Device):
        await device.send("c", Message("m", {"boot": device.now()}))

    faults = [
        {"kill": "b", "at": "0.2s", "for": "1s"},
        {"kill": "c", "at": "0.3s", "for": "1s"},
    ]
    world = make_world(
        {
            "coordinator": sleep_for(6),
            "b": send_boot_time,
            "c": collect_field("boot", boot_times),
        },
        link=Link(delay=0.5),
        faults=faults,
    )
    world.run()
    # Killed at 0.2 s for 1 s, b boots in 2 s.
    assert boot_times == [3.2]


def test_next_message_starts_when_send_under_way_is_cancelled():
    async def cancel_large_send(device: Device):
        large = asyncio.create_task(
            device.send("b", Message("large", padding=10_000_000))
        )
        small = asyncio.create_task(device.send("b", Message("small")))
        await device.sleep(1)
        large.cancel()
        await small

    world = make_world({"coordinator": cancel_large_send, "b": receive_forever})
    world.run()
    (received,) = events_of(world, "receive")
    assert received["message"] == "small"
    assert received["time"] == pytest.approx(
        1 + transmission_time(world, "small") + LINK.delay
    )


def test_cancelled_receive_loses_no_message():
    numbers = []

    async def send_every_tenth_second(device: Device):
        for number in range(10):
            await device.sleep(0.1)
            await device.send("b", Message("m", {"number": number}))

    async def receive_with_timeouts(device: Device):
        while True:
            try:
                # A time-out that never coincides with an arrival.
                message = await asyncio.wait_for(device.receive(), 0.0131)
            except TimeoutError:
                continue
            numbers.append(message["number"])

    make_world(
        {"coordinator": send_every_tenth_second, "b": receive_with_timeouts}
    ).run()
    assert numbers == list(range(10))


def test_send_to_unlinked_peer_is_error_that_names_both_devices():
    world = make_world({"coordinator": send_one("nobody"), "b": receive_forever})
    with pytest.raises(Exception, match="the program of coordinator failed") as raised:
        world.run()
    assert "no link from coordinator to nobody" in str(raised.value.__cause__)


# Time-outs of 0.22 s (TCP's minimum of 0.2 s and a round trip of 0.02 s) that double, until the sender reconnects
# after 2 s of silence and then every second.
@pytest.mark.parametrize(
    ("waited", "attempt"),
    [
        (0.0, 0.22),
        (0.22, 0.22),
        (0.23, 0.66),
        (0.7, 1.54),
        (1.6, 2.0),
        (2.5, 3.0),
        (7.01, 8.0),
    ],
)
def test_retransmissions_double_until_sender_reconnects(waited, attempt):
    round_trip = 2 * LINK.delay
    assert next_attempt(10.0, 10.0 + waited, round_trip) == pytest.approx(
        10.0 + attempt
    )
