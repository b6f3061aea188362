"""Messages that share uplinks, downlinks and radio cells, against times computed by hand.

A world is a small simulation (`tests.helpers.worlds`). It ends when the program of its first device returns.
"""

import asyncio

import pytest

from testbed.device import Device
from testbed.network.link import Cell, Link
from testbed.simulation.shared_channel import SharedChannel
from testbed.wire.framing import cast_wire_bytes
from testbed.wire.message import Message
from tests.helpers.worlds import (
    LINK,
    events_of,
    first_message_bytes,
    make_world,
    receive_forever,
)
from tests.testbed.simulation.observations import sleep_for, times_of, values_of

UNLIMITED = Link(delay=0.01)
"""A link without a rate of its own, so that only shared media limit it."""
SHARED_RATE = 8e6
"""Rate in bit/s of most shared media; a megabyte per second."""
UPLINK_OF_A = {"a": {"uplink": SHARED_RATE}}
wait_for_others = sleep_for(60)
"""The coordinator's program, which outlasts the messages of all other programs."""


def send_to(*peers: str, padding: int = 1_000_000, start: float = 0.0):
    """Make a program to send a message to each peer concurrently."""

    async def program(device: Device):
        await device.sleep(start)
        message = Message("m", padding=padding)
        await asyncio.gather(*(device.send(peer, message) for peer in peers))

    return program


def run_concurrently(*parts):
    """Make a program that consists of several concurrent programs."""

    async def program(device: Device):
        await asyncio.gather(*(part(device) for part in parts))

    return program


def receive_count(count: int):
    """Make a program to receive a number of messages and return."""

    async def program(device: Device):
        for _ in range(count):
            await device.receive()

    return program


def arrivals(world) -> dict[tuple[str, str], float]:
    """Return the arrival time of each message by sender and receiver."""
    times = {}
    for event in world.events:
        if event.event == "receive":
            times[event.fields["peer"], event.device] = event.time
    return times


def message_seconds(world, rate=SHARED_RATE) -> float:
    """Return the seconds for one message at a rate in bit/s; all messages of a test have the same size."""
    return first_message_bytes(world, "m") * 8 / rate


def test_concurrent_messages_share_uplink_of_sender():
    world = make_world(
        {
            "coordinator": wait_for_others,
            "a": send_to("b", "c"),
            "b": receive_forever,
            "c": receive_forever,
        },
        link=UNLIMITED,
        access=UPLINK_OF_A,
    )
    world.run()
    half_rate = pytest.approx(message_seconds(world, rate=4e6) + UNLIMITED.delay)
    assert arrivals(world) == {("a", "b"): half_rate, ("a", "c"): half_rate}


def test_message_that_starts_later_shares_uplink():
    send_twice = run_concurrently(send_to("b"), send_to("c", start=0.5))
    world = make_world(
        {
            "coordinator": wait_for_others,
            "a": send_twice,
            "b": receive_forever,
            "c": receive_forever,
        },
        link=UNLIMITED,
        access=UPLINK_OF_A,
    )
    world.run()
    seconds = message_seconds(world)
    times = arrivals(world)
    # The first message is alone for 0.5 s; then each has half of the rate until the first one ends.
    expected = 0.5 + 2 * (seconds - 0.5) + UNLIMITED.delay
    assert times["a", "b"] == pytest.approx(expected)
    # The uplink is never idle until both messages are sent.
    assert times["a", "c"] == pytest.approx(2 * seconds + UNLIMITED.delay)


def test_slow_link_leaves_remainder_of_downlink_to_others():
    world = make_world(
        {
            "coordinator": receive_count(2),
            "b": send_to("coordinator"),
            "c": send_to("coordinator"),
        },
        link=UNLIMITED,
        access={"coordinator": {"downlink": SHARED_RATE}},
        # From time 0 on, the link from b to the coordinator has 2 Mbit/s.
        trace=["0,link b->coordinator rate,2mbit"],
    )
    world.run()
    times = arrivals(world)
    fast = message_seconds(world, SHARED_RATE - 2e6) + UNLIMITED.delay
    slow = message_seconds(world, 2e6) + UNLIMITED.delay
    assert times["c", "coordinator"] == pytest.approx(fast)
    assert times["b", "coordinator"] == pytest.approx(slow)


def test_access_faster_than_link_does_not_change_times():
    programs = {"a": send_to("b", padding=300_000), "b": receive_forever}
    plain = make_world(programs)
    limited = make_world(programs, access={"a": {"uplink": 1e9}})
    plain.run()
    limited.run()
    assert arrivals(limited)["a", "b"] == pytest.approx(arrivals(plain)["a", "b"])
    # The fields of the events contain the time until the acknowledgement.
    send_of_plain = events_of(plain, "send")[0]
    send_of_limited = events_of(limited, "send")[0]
    assert send_of_plain == pytest.approx(send_of_limited)


def test_cell_members_share_one_channel_and_other_links_are_unaffected():
    cells = [Cell(("a", "b", "c"), rate=SHARED_RATE)]
    programs = {
        "coordinator": wait_for_others,
        "a": send_to("b", "d"),
        "b": run_concurrently(send_to("c"), receive_forever),
        "c": receive_forever,
        "d": receive_forever,
    }
    link = Link(rate=80e6, delay=0.01)
    world = make_world(programs, link=link, cells=cells)
    world.run()
    times = arrivals(world)
    # Two messages alternate in the cell; d is not a member, and its link is ten times as fast.
    assert times["a", "b"] == pytest.approx(2 * message_seconds(world) + link.delay)
    assert times["b", "c"] == times["a", "b"]
    expected = message_seconds(world, link.rate) + link.delay
    assert times["a", "d"] == pytest.approx(expected)


def test_slow_link_in_cell_occupies_channel_longer():
    world = make_world(
        {
            "coordinator": wait_for_others,
            "a": send_to("b"),
            "b": run_concurrently(send_to("c"), receive_forever),
            "c": receive_forever,
        },
        link=UNLIMITED,
        cells=[Cell(("a", "b", "c"), rate=SHARED_RATE)],
        trace=["0,link a->b rate,2mbit"],
    )
    world.run()
    # Packets alternate, and each packet of the slow link takes four times as long as one of the other link.
    expected = pytest.approx((1 + 4) * message_seconds(world) + UNLIMITED.delay)
    assert arrivals(world)["b", "c"] == expected
    assert arrivals(world)["a", "b"] == expected


def test_cast_precedes_message_under_way_in_cell():
    # A cast is one transmission without acknowledgements, which no packet of a message interrupts.
    async def cast_later(device: Device):
        await device.sleep(0.5)
        await device.cast(["a"], Message("c", padding=50_000))

    world = make_world(
        {"a": send_to("b"), "b": receive_forever, "c": cast_later},
        link=UNLIMITED,
        cells=[Cell(("a", "b", "c"), rate=SHARED_RATE)],
    )
    world.run()
    (cast,) = events_of(world, "cast")
    airtime = cast_wire_bytes(cast["bytes"]) * 8 / SHARED_RATE
    assert cast["duration"] == pytest.approx(airtime)
    # The message pauses during the cast.
    expected = message_seconds(world) + airtime + UNLIMITED.delay
    assert arrivals(world)["a", "b"] == pytest.approx(expected)


def test_messages_to_one_peer_are_sequential_on_shared_uplink():
    kinds = [f"m{number}" for number in range(5)]

    async def send_five(device: Device):
        messages = [Message(kind, padding=10_000) for kind in kinds]
        await asyncio.gather(*(device.send("b", message) for message in messages))

    world = make_world(
        {"a": send_five, "b": receive_forever}, link=UNLIMITED, access=UPLINK_OF_A
    )
    world.run()
    assert values_of(world, "receive", "message") == kinds
    seconds = first_message_bytes(world, "m0") * 8 / SHARED_RATE
    expected = [number * seconds + UNLIMITED.delay for number in range(1, 6)]
    assert times_of(world, "receive") == pytest.approx(expected)


def test_kill_partition_and_degradation_apply_to_shared_channel():
    async def send_lost_and_kept(device: Device):
        lost, kept = Message("lost", padding=1000), Message("kept", padding=1_000_000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(device.send("c", lost), 0.4)
        await device.send("b", kept)

    faults = [
        {"kill": "c", "at": 0},
        {"partition": [["a"], ["b"]], "at": "900ms", "for": "100ms"},
        {"degrade": {"between": ["a", "b"], "rate": "4mbit"}, "at": "1200ms"},
    ]
    world = make_world(
        {"a": send_lost_and_kept, "b": receive_forever, "c": receive_forever},
        link=UNLIMITED,
        faults=faults,
        access=UPLINK_OF_A,
    )
    world.run()
    # The message starts at 0.4 s, when a gives up the lost one, with 1 MB/s until the partition at 0.9 s.
    bytes_before_partition = 0.5e6
    # TCP sends again 0.2 s and a round trip of 0.02 s after the loss, at 1.12 s, until the degradation at 1.2 s.
    bytes_before_degradation = 0.08e6
    remainder = first_message_bytes(world, "kept")
    remainder -= bytes_before_partition + bytes_before_degradation
    # The degraded link transmits 0.5 MB/s.
    expected = 1.2 + remainder / 0.5e6 + UNLIMITED.delay
    arrival = events_of(world, "receive", "b")[0]["time"]
    assert arrival == pytest.approx(expected)


def test_events_of_shared_channels_are_reproducible():
    def simulate_events():
        programs = {}
        for name in "abcd":
            peers = [peer for peer in "abcd" if peer != name]
            programs[name] = send_to(*peers, padding=40_000)
        flap = {"device": "b", "down": "50ms", "up": "200ms", "times": 3}
        limits = {"uplink": SHARED_RATE, "downlink": 2 * SHARED_RATE}
        world = make_world(
            programs,
            link=Link(rate=20e6, delay=0.01, jitter=0.002, loss=0.02),
            faults=[{"flap": flap, "at": "20ms"}],
            access={"a": limits, "b": limits},
            cells=[Cell(("c", "d", "a"), rate=5e6)],
        )
        world.run()
        return world.events

    assert simulate_events() == simulate_events()


def test_link_outside_cells_and_access_limits_uses_plain_channel():
    world = make_world(
        {"a": send_to("b"), "b": receive_forever},
        link=LINK,
        cells=[Cell(("b", "c"), rate=1e6)],
    )
    world.run()
    assert not isinstance(world.channel("a", "b"), SharedChannel)
