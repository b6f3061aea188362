"""Messages that share uplinks, downlinks and radio cells, against times computed by hand."""

import asyncio

import pytest

from testbed.device import Device
from testbed.network.link import Cell, Link
from testbed.simulation.shared_channel import SharedChannel
from testbed.wire.framing import cast_wire_bytes
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, first_message_bytes, idle, make_world

FAST = Link(delay=0.01)


def sending(*peers: str, padding: int = 1_000_000, at: float = 0.0):
    async def program(device: Device):
        await device.sleep(at)
        await asyncio.gather(
            *(device.send(peer, Message("m", padding=padding)) for peer in peers)
        )

    return program


def both(*programs):
    async def program(device: Device):
        await asyncio.gather(*(each(device) for each in programs))

    return program


async def rest(device: Device):
    """Lead: the run is over when this is."""
    await device.sleep(60)


def arrivals(run) -> dict[tuple[str, str], float]:
    return {
        (event.fields["peer"], event.device): event.time
        for event in run.events
        if event.event == "receive"
    }


def test_uplink_is_shared_by_what_a_device_sends():
    run = make_world(
        {"lead": rest, "a": sending("b", "c"), "b": idle, "c": idle},
        link=FAST,
        access={"a": {"uplink": 8e6}},
    )
    run.run()
    wire = first_message_bytes(run, "m")
    assert arrivals(run) == {
        ("a", "b"): pytest.approx(wire / 0.5e6 + 0.01),
        ("a", "c"): pytest.approx(wire / 0.5e6 + 0.01),
    }


def test_who_comes_later_shares_from_then_on():
    lead = both(sending("b"), sending("c", at=0.5))
    run = make_world(
        {"lead": rest, "a": lead, "b": idle, "c": idle},
        link=FAST,
        access={"a": {"uplink": 8e6}},
    )
    run.run()
    wire = first_message_bytes(run, "m") / 1e6
    found = arrivals(run)
    # Alone for 0.5 s, then in halves until the first is through.
    assert found["a", "b"] == pytest.approx(0.5 + 2 * (wire - 0.5) + 0.01)
    assert found["a", "c"] == pytest.approx(2 * wire + 0.01)


def test_slow_link_leaves_its_rest_of_the_downlink_to_others():
    run = make_world(
        {"lead": idle_until("b", "c"), "b": sending("lead"), "c": sending("lead")},
        link=FAST,
        access={"lead": {"downlink": 8e6}},
        trace=["0,link b->lead rate,2mbit"],
    )
    run.run()
    wire = first_message_bytes(run, "m") / 1e6
    found = arrivals(run)
    assert found["c", "lead"] == pytest.approx(wire / 0.75 + 0.01)
    assert found["b", "lead"] == pytest.approx(wire / 0.25 + 0.01)


def idle_until(*peers: str):
    async def program(device: Device):
        for _ in peers:
            await device.receive()

    return program


def test_a_link_slower_than_the_access_is_as_before():
    plain = make_world({"a": sending("b", padding=300_000), "b": idle})
    limited = make_world(
        {"a": sending("b", padding=300_000), "b": idle}, access={"a": {"uplink": 1e9}}
    )
    for run in (plain, limited):
        run.run()
    assert arrivals(limited)["a", "b"] == pytest.approx(arrivals(plain)["a", "b"])
    (one, other) = (events_of(run, "send")[0] for run in (plain, limited))
    assert one == pytest.approx(other)


def test_cell_is_one_channel_for_all_pairs_and_costs_others_nothing():
    cells = [Cell(("a", "b", "c"), 8e6)]
    programs = {
        "lead": rest,
        "a": sending("b", "d"),
        "b": both(sending("c"), idle),
        "c": idle,
        "d": idle,
    }
    run = make_world(programs, link=Link(rate=80e6, delay=0.01), cells=cells)
    run.run()
    wire = first_message_bytes(run, "m") / 1e6
    found = arrivals(run)
    assert found["a", "b"] == found["b", "c"] == pytest.approx(2 * wire + 0.01)
    assert found["a", "d"] == pytest.approx(wire / 10 + 0.01)


def test_slow_member_of_a_cell_holds_the_channel_longer():
    cells = [Cell(("a", "b", "c"), 8e6)]
    run = make_world(
        {"lead": rest, "a": sending("b"), "b": both(sending("c"), idle), "c": idle},
        link=FAST,
        cells=cells,
        trace=["0,link a->b rate,2mbit"],
    )
    run.run()
    # Packets alternate: each of the slow pair's takes four times as long as the other's.
    wire = first_message_bytes(run, "m") / 1e6
    assert arrivals(run)["b", "c"] == pytest.approx(5 * wire + 0.01)
    assert arrivals(run)["a", "b"] == pytest.approx(5 * wire + 0.01)


def test_casts_have_the_channel_first():
    async def caster(device: Device):
        await device.sleep(0.5)
        await device.cast(["a"], Message("c", padding=50_000))

    run = make_world(
        {"a": sending("b"), "b": idle, "c": caster},
        link=FAST,
        cells=[Cell(("a", "b", "c"), 8e6)],
    )
    run.run()
    (cast,) = events_of(run, "cast")
    on_air = cast_wire_bytes(cast["bytes"]) / 1e6
    assert cast["duration"] == pytest.approx(on_air)
    assert arrivals(run)["a", "b"] == pytest.approx(
        first_message_bytes(run, "m") / 1e6 + on_air + 0.01
    )


def test_messages_to_one_peer_are_one_at_a_time_and_in_order():
    async def lead(device: Device):
        await asyncio.gather(
            *(
                device.send("b", Message(f"m{number}", padding=10_000))
                for number in range(5)
            )
        )

    run = make_world({"a": lead, "b": idle}, link=FAST, access={"a": {"uplink": 8e6}})
    run.run()
    received = events_of(run, "receive")
    assert [event["message"] for event in received] == [
        f"m{number}" for number in range(5)
    ]
    each = first_message_bytes(run, "m0") / 1e6
    assert [event["time"] for event in received] == pytest.approx(
        [(n + 1) * each + 0.01 for n in range(5)]
    )


def test_faults_on_shared_channels():
    async def lead(device: Device):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(device.send("c", Message("lost", padding=1000)), 0.4)
        await device.send("b", Message("kept", padding=1_000_000))

    faults = [
        {"kill": "c", "at": 0},
        {"partition": [["a"], ["b"]], "at": "900ms", "for": "100ms"},
        {"degrade": {"between": ["a", "b"], "rate": "4mbit"}, "at": "1200ms"},
    ]
    run = make_world(
        {"a": lead, "b": idle, "c": idle},
        link=FAST,
        faults=faults,
        access={"a": {"uplink": 8e6}},
    )
    run.run()
    # From 0.4 s: half a second at 8 mbit, silence until TCP tries again, 0.08 s at 8 mbit, the rest at 4 mbit.
    rest = first_message_bytes(run, "kept") - 0.5e6 - 0.08e6
    assert events_of(run, "receive", "b")[0]["time"] == pytest.approx(
        1.2 + rest / 0.5e6 + 0.01
    )


def test_same_seed_same_events_with_everything_at_once():
    def events_of():
        link = Link(rate=20e6, delay=0.01, jitter=0.002, loss=0.02)
        names = "abcd"
        programs = {
            name: sending(*(other for other in names if other != name), padding=40_000)
            for name in names
        }
        faults = [
            {
                "flap": {"device": "b", "down": "50ms", "up": "200ms", "times": 3},
                "at": "20ms",
            }
        ]
        access = {name: {"uplink": 8e6, "downlink": 16e6} for name in "ab"}
        run = make_world(
            programs,
            link=link,
            faults=faults,
            access=access,
            cells=[Cell(("c", "d", "a"), 5e6)],
        )
        run.run()
        return run.events

    assert events_of() == events_of()


def test_plain_links_are_not_shared():
    run = make_world(
        {"a": sending("b"), "b": idle}, link=LINK, cells=[Cell(("b", "c"), 1e6)]
    )
    run.run()
    assert not isinstance(run.channel("a", "b"), SharedChannel)
