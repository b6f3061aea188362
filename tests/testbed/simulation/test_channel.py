"""Links of the simulator against times computed by hand, and what the transport promises."""

import asyncio

import pytest

from testbed.device import Device
from testbed.network.link import Link
from testbed.simulation.channel import next_attempt
from testbed.wire.framing import WINDOW, cast_wire_bytes, chunks, wire_bytes
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, first_message_bytes, idle, make_world


def test_framing_by_hand():
    assert wire_bytes(1000) == 1000 + 132 + 66
    assert wire_bytes(10_000) == 10_000 + 132 + 7 * 66
    assert chunks(1452) == 1
    assert cast_wire_bytes(1452) == 1452 + 20 + 8 + 20 + 14 == 1514
    assert cast_wire_bytes(1453) == 1514 + 1 + 62


@pytest.mark.parametrize("access", [{}, {"source": {"uplink": 8e6}}])
def test_messages_to_one_peer_leave_one_behind_the_other(access):
    async def source(device: Device):
        await asyncio.gather(
            *(device.send("sink", Message(f"m{i}", padding=50_000)) for i in range(3))
        )

    run = make_world({"source": source, "sink": idle}, access=access)
    run.run()
    transmission = first_message_bytes(run, "m0") * 8 / 8e6
    received, sent = events_of(run, "receive"), events_of(run, "send")
    for i in range(3):
        assert received[i]["start"] == pytest.approx(i * transmission + 0.01)
        assert received[i]["duration"] == pytest.approx(transmission)
        assert received[i]["time"] == pytest.approx((i + 1) * transmission + 0.01)
        assert sent[i]["start"] == 0
        assert sent[i]["queued"] == pytest.approx(i * transmission)
        assert (
            sent[i]["time"]
            == sent[i]["duration"]
            == pytest.approx((i + 1) * transmission + 0.02)
        )


@pytest.mark.parametrize("access", [{}, {"lead": {"uplink": 1e12}}])
def test_a_full_window_waits_for_the_first_acknowledgement(access):
    async def lead(device: Device):
        await asyncio.gather(
            *(device.send("b", Message("m", padding=WINDOW // 2 + 1)) for _ in range(5))
        )

    run = make_world({"lead": lead, "b": idle}, link=Link(delay=0.25), access=access)
    run.run()
    times = [event["time"] for event in events_of(run, "receive")]
    assert times == pytest.approx([0.25, 0.25, 0.75, 0.75, 1.25], abs=0.01)


@pytest.mark.parametrize("access", [{}, {"lead": {"uplink": 50e6}}])
def test_many_messages_fill_a_long_link(access):
    async def lead(device: Device):
        await asyncio.gather(
            *(device.send("b", Message("m", padding=100_000)) for _ in range(100))
        )

    run = make_world(
        {"lead": lead, "b": idle}, link=Link(rate=50e6, delay=0.02), access=access
    )
    run.run()
    carried = 100 * first_message_bytes(run, "m") * 8
    assert carried / (run.event_queue.now - 0.04) / 50e6 == pytest.approx(1)


def test_acknowledgements_keep_the_order_when_a_link_becomes_faster():
    order = []

    async def lead(device: Device):
        async def send(number: int):
            await device.send("b", Message("m", {"number": number}))
            order.append(number)

        await asyncio.gather(*(send(number) for number in range(5)))

    better = {"degrade": {"between": ["lead", "b"], "delay": "1ms"}, "at": "300ms"}
    run = make_world(
        {"lead": lead, "b": idle}, link=Link(rate=1e5, delay=0.2), faults=[better]
    )
    run.run()
    assert order == list(range(5))
    times = [event["time"] for event in events_of(run, "send")]
    assert times == sorted(times)


def test_directions_and_pairs_do_not_share_their_rate():
    async def lead(device: Device):
        await asyncio.gather(
            *(device.send(peer, Message("m", padding=100_000)) for peer in ("b", "c"))
        )

    run = make_world({"lead": lead, "b": idle, "c": idle})
    run.run()
    first, second = events_of(run, "receive")
    assert first["time"] == second["time"]


def test_link_without_rate_takes_its_delay_only():
    async def lead(device: Device):
        await device.send("b", Message("m", padding=5 * 10**8 - 1000))

    run = make_world({"lead": lead, "b": idle}, link=Link(delay=0.25))
    run.run()
    assert events_of(run, "receive")[0]["time"] == 0.25
    assert events_of(run, "send")[0]["time"] == 0.5


def test_many_messages_arrive_in_the_order_of_the_calls():
    got = []

    async def lead(device: Device):
        sends = [
            asyncio.create_task(
                device.send("b", Message("m", {"i": i}, padding=i % 7 * 900))
            )
            for i in range(200)
        ]
        await asyncio.gather(*sends)

    async def listen(device: Device):
        while True:
            got.append((await device.receive())["i"])

    make_world(
        {"lead": lead, "b": listen}, link=Link(rate=1e6, delay=0.02, loss=0.05)
    ).run()
    assert got == list(range(200))


def test_message_shares_nothing_with_its_sender():
    import torch

    seen = {}

    async def lead(device: Device):
        weights, fields = torch.zeros(3), {"list": [1]}
        sending = asyncio.create_task(
            device.send("b", Message("m", fields, {"w": weights}))
        )
        await asyncio.sleep(0)
        weights += 1
        fields["list"].append(2)
        await sending

    async def listen(device: Device):
        message = await device.receive()
        seen.update(weights=message.tensors["w"].tolist(), list=message["list"])

    make_world({"lead": lead, "b": listen}).run()
    assert seen == {"weights": [0, 0, 0], "list": [1]}


def test_loss_costs_time_and_depends_on_the_seed_only():
    # Of 20 messages alone, the cost varies by a quarter of its mean from seed to seed.
    messages = 200

    async def lead(device: Device):
        for _ in range(messages):
            await device.send("b", Message("m", padding=100_000))

    def duration(loss):
        run = make_world(
            {"lead": lead, "b": idle}, link=Link(rate=8e6, delay=0.01, loss=loss)
        )
        run.run()
        return run.event_queue.now

    clean, lossy = duration(0.0), duration(0.02)
    # 70 segments a message: some are lost in about three of four messages, at a round trip of 20 ms each time.
    assert messages * 0.005 < lossy - clean < messages * 0.1
    assert duration(0.02) == lossy


def test_lone_segment_waits_for_the_time_out_when_lost():
    async def lead(device: Device):
        for _ in range(100):
            await device.send("b", Message("m"))

    run = make_world(
        {"lead": lead, "b": idle}, link=Link(rate=8e6, delay=0.01, loss=0.2)
    )
    run.run()
    durations = [event["duration"] for event in events_of(run, "send")]
    late = [each for each in durations if each > 0.2]
    # Each message and each answer is lost in one case of five.
    assert 22 < len(late) < 52
    assert min(durations) < 0.03


def test_cancelled_send_to_a_stopped_peer_is_withdrawn():
    got = []

    async def lead(device: Device):
        await device.sleep(1)
        first = asyncio.create_task(
            asyncio.wait_for(device.send("b", Message("lost")), 0.5)
        )
        second = asyncio.create_task(device.send("b", Message("kept")))
        with pytest.raises(TimeoutError):
            await first
        assert device.now() == 1.5
        await second

    async def listen(device: Device):
        while True:
            got.append((await device.receive()).kind)

    run = make_world(
        {"lead": lead, "b": listen}, faults=[{"kill": "b", "at": "0.9s", "for": "2s"}]
    )
    run.run()
    assert got == ["kept"]


def test_withdrawn_message_is_not_sent_to_a_restarted_peer():
    got = []

    async def lead(device: Device):
        first = asyncio.create_task(device.send("b", Message("withdrawn")))
        await device.sleep(0.3)
        first.cancel()
        await device.send("b", Message("kept"))

    async def listen(device: Device):
        while True:
            got.append((await device.receive()).kind)

    run = make_world(
        {"lead": lead, "b": listen},
        link=Link(delay=0.5),
        faults=[{"kill": "b", "at": "0.4s", "for": "1s"}],
    )
    run.run()
    assert got == ["kept"]


def test_messages_of_a_dead_sender_are_not_repeated():
    got = []

    async def lead(device: Device):
        await device.sleep(6)

    async def sender(device: Device):
        await device.send("c", Message("m", {"boot": device.now()}))

    async def listen(device: Device):
        while True:
            got.append((await device.receive())["boot"])

    faults = [
        {"kill": "b", "at": "0.2s", "for": "1s"},
        {"kill": "c", "at": "0.3s", "for": "1s"},
    ]
    run = make_world(
        {"lead": lead, "b": sender, "c": listen}, link=Link(delay=0.5), faults=faults
    )
    run.run()
    assert got == [3.2]


def test_cancelled_send_is_withdrawn_and_the_next_moves_up():
    async def lead(device: Device):
        large = asyncio.create_task(
            device.send("b", Message("large", padding=10_000_000))
        )
        small = asyncio.create_task(device.send("b", Message("small")))
        await device.sleep(1)
        large.cancel()
        await small

    run = make_world({"lead": lead, "b": idle})
    run.run()
    (received,) = events_of(run, "receive")
    assert received["message"] == "small"
    assert received["time"] == pytest.approx(
        1 + first_message_bytes(run, "small") * 8 / 8e6 + 0.01
    )


def test_cancelled_receive_loses_no_message():
    got = []

    async def lead(device: Device):
        for i in range(10):
            await device.sleep(0.1)
            await device.send("b", Message("m", {"i": i}))

    async def listen(device: Device):
        while True:
            try:
                got.append((await asyncio.wait_for(device.receive(), 0.0131))["i"])
            except TimeoutError:
                continue

    make_world({"lead": lead, "b": listen}).run()
    assert got == list(range(10))


def test_peer_without_a_link_is_an_error_that_names_both():
    async def lead(device: Device):
        await device.send("nobody", Message("m"))

    run = make_world({"lead": lead, "b": idle})
    with pytest.raises(Exception, match="the program of lead failed") as caught:
        run.run()
    assert "no link from lead to nobody" in str(caught.value.__cause__)


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
def test_retransmissions_double_then_the_connection_is_made_anew(waited, attempt):
    assert next_attempt(10.0, 10.0 + waited, 0.02) == pytest.approx(10.0 + attempt)
    assert LINK.delay * 2 == 0.02
