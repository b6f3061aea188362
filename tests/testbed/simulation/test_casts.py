"""Casts in the simulator: the time that one transmission takes, and its receivers."""

import asyncio
import math

import pytest

from testbed.device import Device
from testbed.network.broadcast import broadcast_rate, is_received
from testbed.network.link import Cell, Link
from testbed.network.radio import Propagation, Radio
from testbed.wire.framing import CAST_CHUNK, cast_wire_bytes
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, make_world, receive_forever
from tests.testbed.simulation.observations import sleep_for, times_of, values_of

RADIO = Link(rate=250e3, delay=0.01)
"""The rate of IEEE 802.15.4."""
RECEIVERS = ("b", "c", "d")
IDLE_RECEIVERS = dict.fromkeys(RECEIVERS, receive_forever)


def cast_repeatedly(count: int, padding: int = 100, peers=RECEIVERS):
    """Make a program to cast numbered messages."""

    async def program(device: Device):
        for number in range(count):
            await device.cast(peers, Message("m", {"number": number}, padding=padding))
        await device.sleep(1)

    return program


def set_link(world, pair, link):
    """Replace the properties of one link before anything is sent."""
    world.current.links[pair] = link


def half_interval(count: int, probability: float) -> float:
    """Return half the width of the 99 % interval of a binomial count."""
    # 2.58 standard deviations of the normal approximation.
    return 2.58 * math.sqrt(count * probability * (1 - probability))


def airtime(size: int, rate: float) -> float:
    """Return the duration in seconds of a cast of ``size`` bytes at a rate in bit/s."""
    return cast_wire_bytes(size) * 8 / rate


def test_cast_takes_one_transmission_for_all_receivers():
    world = make_world(
        {"a": cast_repeatedly(3, padding=3000), **IDLE_RECEIVERS}, link=RADIO
    )
    world.run()
    casts = events_of(world, "cast")
    seconds = airtime(casts[0]["bytes"], 250e3)
    for number, cast in enumerate(casts):
        assert cast["start"] == pytest.approx(number * seconds)
        assert cast["duration"] == pytest.approx(seconds)
    arrivals = [(number + 1) * seconds + RADIO.delay for number in range(3)]
    for name in RECEIVERS:
        assert times_of(world, "receive", name) == pytest.approx(arrivals)


def test_slowest_link_limits_cast_even_to_other_receivers():
    # The slow link leads to d, and the cast is for b only.
    world = make_world(
        {"a": cast_repeatedly(1, peers=["b"]), **IDLE_RECEIVERS}, link=Link(rate=8e6)
    )
    set_link(world, ("a", "d"), RADIO)
    world.run()
    [cast] = events_of(world, "cast")
    assert cast["duration"] == pytest.approx(airtime(cast["bytes"], 250e3))
    assert not events_of(world, "receive", "c")


def test_each_receiver_loses_casts_independently():
    count = 2000
    losses = {"b": 0.191, "c": 0.191, "d": 0.5}
    world = make_world(
        {"a": cast_repeatedly(count), **IDLE_RECEIVERS}, link=Link(message_loss=0.191)
    )
    set_link(world, ("a", "d"), Link(message_loss=losses["d"]))
    world.run()
    for name, loss in losses.items():
        received = len(events_of(world, "receive", name))
        assert abs(received - count * (1 - loss)) < half_interval(count, loss)
    assert values_of(world, "cast", "number") == list(range(count))


def drawn_casts(receiver: str, count: int, loss: float) -> set[int]:
    """Return the numbers of casts from a to a receiver, drawn with seed 1."""
    numbers = set()
    for number in range(count):
        if is_received(1, "a", receiver, number, loss):
            numbers.add(number)
    return numbers


def test_received_casts_follow_seeded_draws():
    count, loss = 2000, 0.191
    world = make_world(
        {"a": cast_repeatedly(count), **IDLE_RECEIVERS}, link=Link(message_loss=loss)
    )
    world.run()
    by_b = drawn_casts("b", count, loss)
    by_c = drawn_casts("c", count, loss)
    assert values_of(world, "receive", "cast", device="b") == sorted(by_b)
    # Independent draws: both receive a cast with the product of their probabilities.
    both = (1 - loss) ** 2
    assert abs(len(by_b & by_c) - count * both) < half_interval(count, both)


def test_loss_of_any_packet_loses_whole_cast():
    count = 1000
    world = make_world(
        {"a": cast_repeatedly(count, padding=5 * CAST_CHUNK), **IDLE_RECEIVERS},
        link=Link(loss=0.05),
    )
    world.run()
    # Five packets of padding and one for the rest of the message.
    probability = 0.95**6
    for name in RECEIVERS:
        received = len(events_of(world, "receive", name))
        assert abs(received - count * probability) < half_interval(count, probability)


def test_partition_and_degradation_apply_to_casts():
    faults = [
        {"partition": [["a", "b"], ["c"]], "at": "0s", "for": "1s"},
        {
            "degrade": {"from": "a", "to": "b", "delay": "100ms"},
            "at": "0s",
            "for": "1s",
        },
    ]
    world = make_world(
        {"a": cast_repeatedly(1), **IDLE_RECEIVERS}, link=RADIO, faults=faults
    )
    world.run()
    # The devices that no group names, here d, form one more group.
    assert not events_of(world, "receive", "c")
    assert not events_of(world, "receive", "d")
    [received] = events_of(world, "receive", "b")
    [cast] = events_of(world, "cast")
    assert received["time"] == pytest.approx(cast["duration"] + 0.1)


def radio_with_distant_b() -> Radio:
    """Return a radio in which b is 100 m away from a and all others are beside a."""
    positions = dict.fromkeys("acd", (0, 0))
    positions["b"] = (0, 100.0)
    propagation = Propagation(
        transmit_power=0,
        sensitivity=-80,
        path_loss_exponent=2,
        reference_loss=40,
        shadowing=8,
    )
    return Radio(propagation, positions, packets=None, seed=1)


def receivable_casts(world, name, begin, end, loss):
    """Return the numbers of the casts received with a loss between two instants."""
    numbers = []
    for cast in events_of(world, "cast"):
        arrival = cast["time"] + RADIO.delay
        is_affected = begin < arrival < end
        if not is_affected or is_received(1, "a", name, cast["number"], loss):
            numbers.append(cast["number"])
    return numbers


def test_obstruction_and_link_trace_change_cast_loss_with_same_draws():
    count = 600
    radio = radio_with_distant_b()
    obstruction = {"between": ["a", "b"], "path_loss_exponent": 2.2}
    world = make_world(
        {"a": cast_repeatedly(count), **IDLE_RECEIVERS},
        link=RADIO,
        radio=radio,
        faults=[{"obstruct": obstruction, "at": "1s", "for": "1s"}],
        trace=["2,link a->c message_loss,30%"],
    )
    world.run()
    # 100 m lose half of the casts with the radio's own exponent of 2, and 69 % with 2.2.
    obstructed = 1 - radio.reception_ratio(("a", "b"), 2.2)
    assert obstructed == pytest.approx(0.69146, abs=1e-5)
    for name, begin, end, loss in (("b", 1, 2, obstructed), ("c", 2, math.inf, 0.3)):
        expected = receivable_casts(world, name, begin, end, loss)
        assert len(expected) < count, "some casts are lost"
        assert values_of(world, "receive", "cast", device=name) == expected
    assert len(events_of(world, "receive", "d")) == count


def test_cast_of_sender_killed_during_transmission_is_lost():
    # 3,000 bytes take about 0.1 s.
    world = make_world(
        {
            "coordinator": sleep_for(1),
            "a": cast_repeatedly(1, padding=3000, peers=["coordinator"]),
        },
        link=RADIO,
        faults=[{"kill": "a", "at": "50ms"}],
    )
    world.run()
    assert not events_of(world, "receive")
    assert not events_of(world, "cast")


def test_concurrent_casts_are_sequential_and_receivers_get_separate_tensors():
    import torch

    received = []

    async def cast_twice(device: Device):
        tensor = torch.zeros(2)
        casts = []
        for _ in range(2):
            message = Message("m", {}, {"x": tensor})
            casts.append(device.cast(["b", "c"], message))
        pending = asyncio.gather(*casts)
        # A later change by the sender must not reach the receivers, nor a change by one receiver the other.
        await asyncio.sleep(0)
        tensor.fill_(7)
        await pending
        await device.sleep(1)

    async def increment_received(device: Device):
        message = await device.receive()
        received.append(message.tensors["x"].add_(1))

    world = make_world(
        {"coordinator": cast_twice, "b": increment_received, "c": increment_received},
        link=RADIO,
    )
    world.run()
    first, second = events_of(world, "cast")
    assert second["start"] == pytest.approx(first["start"] + first["duration"])
    assert [tensor.tolist() for tensor in received] == [[1, 1], [1, 1]]


def cast_later(peers, start, wait=0.0):
    """Make a program to cast one large message and return ``wait`` seconds later."""

    async def program(device: Device):
        await device.sleep(start)
        await device.cast(peers, Message("m", padding=3000))
        await device.sleep(wait)

    return program


def test_devices_of_cell_take_turns_and_gateway_waits_for_both_cells():
    cells = [Cell(("a", "b", "gate"), rate=250e3), Cell(("x", "gate"), rate=500e3)]
    world = make_world(
        {
            "a": cast_later(["gate"], start=0.0, wait=9),
            "b": cast_later(["gate"], start=0.001),
            "x": cast_later(["gate"], start=0.001),
            "gate": cast_later(["a", "b", "x"], start=0.002),
        },
        link=Link(delay=0.01),
        cells=cells,
    )
    world.run()
    starts, ends, seconds = {}, {}, {}
    for event in world.events:
        if event.event == "cast":
            cast = event.fields
            starts[event.device] = cast["start"]
            ends[event.device] = cast["start"] + cast["duration"]
            seconds[event.device] = airtime(cast["bytes"], 250e3)
    assert starts == {"a": 0, "b": 0.001, "x": 0.001, "gate": 0.002}
    # x has a cell of twice the rate to itself; the gateway's cast follows all others of the slow cell.
    assert ends["a"] == pytest.approx(seconds["a"])
    assert ends["b"] == pytest.approx(seconds["a"] + seconds["b"])
    assert ends["x"] == pytest.approx(0.001 + seconds["x"] / 2)
    assert ends["gate"] == pytest.approx(seconds["a"] + seconds["b"] + seconds["gate"])


def test_cast_to_unlinked_device_is_rejected():
    async def cast_to_nobody(device: Device):
        with pytest.raises(ValueError, match="no link from a to nobody"):
            await device.cast(["nobody"], Message("m"))

    make_world({"a": cast_to_nobody}).run()


def test_broadcast_rate_is_minimum_of_links_access_and_cells():
    assert broadcast_rate([Link(), Link(rate=1e6)], None, 2e6) == 1e6
    assert broadcast_rate([Link()], 3e5) == 3e5
    assert broadcast_rate([]) is None


def test_casts_without_loss_arrive_and_with_total_loss_do_not():
    assert all(is_received(1, "a", "b", number, 0.0) for number in range(50))
    assert not any(is_received(1, "a", "b", number, 1.0) for number in range(50))
