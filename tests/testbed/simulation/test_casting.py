"""Casts in the simulator: what one transmission costs its sender, and who hears it."""

import asyncio
import math

import pytest

from testbed.device import Device
from testbed.network.broadcast import broadcast_rate, is_received
from testbed.network.link import Cell, Link
from testbed.network.radio import Propagation, Radio
from testbed.wire.framing import CAST_CHUNK, cast_wire_bytes
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, idle, make_world

RADIO = Link(rate=250e3, delay=0.01)
DEVICES = ("b", "c", "d")


def casting(count: int, padding: int = 100, peers=DEVICES):
    """Return a program that casts so many messages."""

    async def lead(device: Device):
        for number in range(count):
            await device.cast(peers, Message("m", {"number": number}, padding=padding))
        await device.sleep(1)

    return lead


def lay(made, pair, link):
    """Give one link of a world figures of its own before anything is sent."""
    made.shown.links[pair] = link


def interval(count: int, chance: float) -> float:
    """Return half the width of the 99 % interval of a count."""
    return 2.58 * math.sqrt(count * chance * (1 - chance))


def test_one_transmission_is_charged_however_many_hear_it():
    run = make_world(
        {"a": casting(3, padding=3000), **dict.fromkeys(DEVICES, idle)}, link=RADIO
    )
    run.run()
    casts = events_of(run, "cast")
    seconds = cast_wire_bytes(casts[0]["bytes"]) * 8 / 250e3
    for number, cast in enumerate(casts):
        assert cast["start"] == pytest.approx(number * seconds)
        assert cast["duration"] == pytest.approx(seconds)
    for name in DEVICES:
        assert [
            each["time"] for each in events_of(run, "receive", name)
        ] == pytest.approx([number * seconds + seconds + 0.01 for number in range(3)])


def test_the_slowest_link_sets_the_pace_whomever_the_cast_is_for():
    run = make_world(
        {"a": casting(1, peers=["b"]), **dict.fromkeys(DEVICES, idle)},
        link=Link(rate=8e6),
    )
    lay(run, ("a", "d"), RADIO)
    run.run()
    [cast] = events_of(run, "cast")
    assert cast["duration"] == pytest.approx(cast_wire_bytes(cast["bytes"]) * 8 / 250e3)
    assert not events_of(run, "receive", "c")


def test_each_receiver_loses_whole_casts_by_its_own_luck():
    run = make_world(
        {"a": casting(2000), **dict.fromkeys(DEVICES, idle)},
        link=Link(message_loss=0.191),
    )
    lay(run, ("a", "d"), Link(message_loss=0.5))
    run.run()
    got = {}
    for name, chance in (("b", 0.191), ("c", 0.191), ("d", 0.5)):
        got[name] = len(events_of(run, "receive", name))
        assert abs(got[name] - 2000 * (1 - chance)) < interval(2000, chance)
    assert [cast["number"] for cast in events_of(run, "cast")] == list(range(2000))
    heard_by_b = [
        number for number in range(2000) if is_received(1, "a", "b", number, 0.191)
    ]
    assert [each["cast"] for each in events_of(run, "receive", "b")] == heard_by_b
    both = sum(
        is_received(1, "a", "b", number, 0.191)
        and is_received(1, "a", "c", number, 0.191)
        for number in range(2000)
    )
    assert abs(both - 2000 * 0.809**2) < interval(2000, 0.809**2)


def test_a_cast_of_many_packets_is_lost_with_any_of_them():
    run = make_world(
        {"a": casting(1000, padding=5 * CAST_CHUNK), **dict.fromkeys(DEVICES, idle)},
        link=Link(loss=0.05),
    )
    run.run()
    for name in DEVICES:
        chance = 0.95**6
        assert abs(len(events_of(run, "receive", name)) - 1000 * chance) < interval(
            1000, chance
        )


def test_a_partition_and_a_degradation_hold_for_casts():
    faults = [
        {"partition": [["a", "b"], ["c"]], "at": "0s", "for": "1s"},
        {
            "degrade": {"from": "a", "to": "b", "delay": "100ms"},
            "at": "0s",
            "for": "1s",
        },
    ]
    run = make_world(
        {"a": casting(1), **dict.fromkeys(DEVICES, idle)}, link=RADIO, faults=faults
    )
    run.run()
    assert not events_of(run, "receive", "c")
    assert not events_of(run, "receive", "d")
    [heard_by_b] = events_of(run, "receive", "b")
    [cast] = events_of(run, "cast")
    assert heard_by_b["time"] == pytest.approx(cast["duration"] + 0.1)


def test_an_obstruction_and_a_trace_change_who_hears_a_cast_by_the_same_draws():
    radio = Radio(
        Propagation(0, -80, 2, 40, 8),
        {name: (0, 100.0 if name == "b" else 0) for name in "abcd"},
        None,
        1,
    )
    run = make_world(
        {"a": casting(600), **dict.fromkeys(DEVICES, idle)},
        link=RADIO,
        radio=radio,
        faults=[
            {
                "obstruct": {"between": ["a", "b"], "path_loss_exponent": 2.2},
                "at": "1s",
                "for": "1s",
            }
        ],
        trace=["2,link a->c message_loss,30%"],
    )
    run.run()
    # Positions are what an obstruction reckons with: 100 m lose half with the radio's own exponent of 2, 69 % with 2.2.
    chance = 1 - radio.reception_ratio(("a", "b"), 2.2)
    assert chance == pytest.approx(0.69146, abs=1e-5)
    for name, begin, end, loss in (("b", 1, 2, chance), ("c", 2, math.inf, 0.3)):
        casts = [
            (each["number"], begin < each["time"] + RADIO.delay < end)
            for each in events_of(run, "cast")
        ]
        assert any(struck for _, struck in casts)
        wanted = [
            number
            for number, struck in casts
            if not struck or is_received(1, "a", name, number, loss)
        ]
        assert [each["cast"] for each in events_of(run, "receive", name)] == wanted
    assert len(events_of(run, "receive", "d")) == 600


def test_a_sender_that_dies_in_the_middle_of_a_cast_is_not_heard():
    async def lead(device: Device):
        await device.sleep(1)

    run = make_world(
        {"lead": lead, "a": casting(1, padding=3000, peers=["lead"])},
        link=RADIO,
        faults=[{"kill": "a", "at": "50ms"}],
    )
    run.run()
    assert not events_of(run, "receive")
    assert not events_of(run, "cast")


def test_casts_of_one_device_follow_each_other_and_what_is_heard_is_each_receivers_own():
    import torch

    found = []

    async def lead(device: Device):
        tensor = torch.zeros(2)
        pending = asyncio.gather(
            *(
                device.cast(["b", "c"], Message("m", {}, {"x": tensor}))
                for _ in range(2)
            )
        )
        await asyncio.sleep(0)
        tensor.fill_(7)
        await pending
        await device.sleep(1)

    async def change(device: Device):
        found.append((await device.receive()).tensors["x"].add_(1))

    run = make_world({"lead": lead, "b": change, "c": change}, link=RADIO)
    run.run()
    first, second = events_of(run, "cast")
    assert second["start"] == pytest.approx(first["start"] + first["duration"])
    assert [each.tolist() for each in found] == [[1, 1], [1, 1]]


def test_the_devices_of_a_cell_take_turns_and_a_gateway_waits_for_both_of_its_cells():
    async def lead(device: Device):
        await device.cast(["gate"], Message("m", padding=3000))
        await device.sleep(9)

    async def other(device: Device):
        await device.sleep(0.001)
        await device.cast(["gate"], Message("m", padding=3000))

    async def gate(device: Device):
        await device.sleep(0.002)
        await device.cast(["a", "b", "x"], Message("m", padding=3000))

    cells = [Cell(("a", "b", "gate"), 250e3), Cell(("x", "gate"), 500e3)]
    run = make_world(
        {"a": lead, "b": other, "x": other, "gate": gate},
        link=Link(delay=0.01),
        cells=cells,
    )
    run.run()
    found = {
        event.device: event.fields for event in run.events if event.event == "cast"
    }
    seconds = {
        name: cast_wire_bytes(cast["bytes"]) * 8 / 250e3 for name, cast in found.items()
    }
    left = {name: cast["start"] + cast["duration"] for name, cast in found.items()}
    assert {name: cast["start"] for name, cast in found.items()} == {
        "a": 0,
        "b": 0.001,
        "x": 0.001,
        "gate": 0.002,
    }
    assert left["a"] == pytest.approx(seconds["a"])
    assert left["b"] == pytest.approx(seconds["a"] + seconds["b"])
    assert left["x"] == pytest.approx(0.001 + seconds["x"] / 2)
    assert left["gate"] == pytest.approx(seconds["a"] + seconds["b"] + seconds["gate"])


def test_message_without_a_link_is_refused():
    async def lead(device: Device):
        with pytest.raises(ValueError, match="no link from a to nobody"):
            await device.cast(["nobody"], Message("m"))

    make_world({"a": lead}).run()


def test_draws_by_hand():
    assert broadcast_rate([Link(), Link(rate=1e6)], None, 2e6) == 1e6
    assert broadcast_rate([Link()], 3e5) == 3e5
    assert broadcast_rate([]) is None
    assert all(is_received(1, "a", "b", number, 0.0) for number in range(50))
    assert not any(is_received(1, "a", "b", number, 1.0) for number in range(50))
