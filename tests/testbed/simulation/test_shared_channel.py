"""Messages that share uplinks, downlinks and radio cells, against times computed by hand."""

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
UPLINK_OF_A = {"a": {"uplink": 8e6}}
"""A megabyte a second."""
wait_for_others = sleep_for(60)
"""The coordinator's program: the run ends when it returns."""


def send_to(*peers: str, padding: int = 1_000_000, start: float = 0.0):
    """Make a program to send a message to each peer concurrently."""

    async def program(device: Device):
        await device.sleep(start)
        message = Message("m", padding=padding)
        await asyncio.gather(*(device.send(peer, message) for peer in peers))

    return program


def run_concurrently(*programs):
    async def program(device: Device):
        await asyncio.gather(*(start(device) for start in programs))

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


def message_seconds(world, rate=8e6) -> float:
    """Return the seconds for the first message at a rate in bit/s."""
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
    assert times["a", "b"] == pytest.approx(0.5 + 2 * (seconds - 0.5) + 0.01)
    assert times["a", "c"] == pytest.approx(2 * seconds + 0.01)


def test_slow_link_leaves_remainder_of_downlink_to_others():
    world = make_world(
        {
            "coordinator": receive_count(2),
            "b": send_to("coordinator"),
            "c": send_to("coordinator"),
        },
        link=UNLIMITED,
        access={"coordinator": {"downlink": 8e6}},
        trace=["0,link b->coordinator rate,2mbit"],
    )
    world.run()
    times = arrivals(world)
    assert times["c", "coordinator"] == pytest.approx(
        message_seconds(world, 8e6 - 2e6) + 0.01
    )
    assert times["b", "coordinator"] == pytest.approx(
        message_seconds(world, 2e6) + 0.01
    )


def test_access_faster_than_link_does_not_change_times():
    programs = {"a": send_to("b", padding=300_000), "b": receive_forever}
    plain = make_world(programs)
    limited = make_world(programs, access={"a": {"uplink": 1e9}})
    plain.run()
    limited.run()
    assert arrivals(limited)["a", "b"] == pytest.approx(arrivals(plain)["a", "b"])
    send_of_plain = events_of(plain, "send")[0]
    send_of_limited = events_of(limited, "send")[0]
    assert send_of_plain == pytest.approx(send_of_limited)


def test_cell_members_share_one_channel_and_other_links_are_unaffected():
    cells = [Cell(("a", "b", "c"), rate=8e6)]
    programs = {
        "coordinator": wait_for_others,
        "a": send_to("b", "d"),
        "b": run_concurrently(send_to("c"), receive_forever),
        "c": receive_forever,
        "d": receive_forever,
    }
    world = make_world(programs, link=Link(rate=80e6, delay=0.01), cells=cells)
    world.run()
    times = arrivals(world)
    # Two messages alternate in the cell; d is not a member, and its link is ten times as fast.
    assert times["a", "b"] == pytest.approx(2 * message_seconds(world) + 0.01)
    assert times["b", "c"] == times["a", "b"]
    assert times["a", "d"] == pytest.approx(message_seconds(world, 80e6) + 0.01)


def test_slow_link_in_cell_occupies_channel_longer():
    world = make_world(
        {
            "coordinator": wait_for_others,
            "a": send_to("b"),
            "b": run_concurrently(send_to("c"), receive_forever),
            "c": receive_forever,
        },
        link=UNLIMITED,
        cells=[Cell(("a", "b", "c"), rate=8e6)],
        trace=["0,link a->b rate,2mbit"],
    )
    world.run()
    # Packets alternate, and each packet of the slow link takes four times as long as one of the other link.
    expected = pytest.approx((1 + 4) * message_seconds(world) + 0.01)
    assert arrivals(world)["b", "c"] == expected
    assert arrivals(world)["a", "b"] == expected


def test_cast_precedes_message_under_way_in_cell():
    async def cast_later(device: Device):
        await device.sleep(0.5)
        await device.cast(["a"], Message("c", padding=50_000))

    world = make_world(
        {"a": send_to("b"), "b": receive_forever, "c": cast_later},
        link=UNLIMITED,
        cells=[Cell(("a", "b", "c"), rate=8e6)],
    )
    world.run()
    (cast,) = events_of(world, "cast")
    airtime = cast_wire_bytes(cast["bytes"]) * 8 / 8e6
    assert cast["duration"] == pytest.approx(airtime)
    # The message pauses during the cast.
    assert arrivals(world)["a", "b"] == pytest.approx(
        message_seconds(world) + airtime + 0.01
    )


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
    seconds = first_message_bytes(world, "m0") * 8 / 8e6
    ends = [(number + 1) * seconds + 0.01 for number in range(5)]
    assert times_of(world, "receive") == pytest.approx(ends)


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
    # From 0.4 s: 0.5 s at 8 Mbit/s until the partition, silence until TCP sends again at 1.12 s, 0.08 s at 8 Mbit/s
    # until the degradation, and the remainder at 4 Mbit/s.
    remainder = first_message_bytes(world, "kept") - 0.5e6 - 0.08e6
    assert events_of(world, "receive", "b")[0]["time"] == pytest.approx(
        1.2 + remainder / 0.5e6 + 0.01
    )


def test_events_of_shared_channels_are_reproducible():
    def simulate_events():
        programs = {}
        for name in "abcd":
            peers = [peer for peer in "abcd" if peer != name]
            programs[name] = send_to(*peers, padding=40_000)
        flap = {"device": "b", "down": "50ms", "up": "200ms", "times": 3}
        limits = {"uplink": 8e6, "downlink": 16e6}
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
