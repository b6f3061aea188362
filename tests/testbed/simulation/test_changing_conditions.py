"""Speeds and links that change during a computation or transmission, against times computed by hand."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, make_world, receive_forever
from tests.testbed.simulation.observations import (
    send_one,
    sleep_for,
    times_of,
    transmission_time,
    values_of,
)


def compute_once(flops=4e6):
    """Make a program with one computation, by default 4 s at the speed of 1 MFLOPS."""

    async def program(device: Device):
        await device.compute(lambda: None, Cost(flops), Span("forward"))

    return program


def first_duration(world, device=None):
    return events_of(world, "compute", device)[0]["duration"]


def test_throttle_slows_running_computation():
    throttle = {"device": "a", "slowdown": 4}
    world = make_world(
        {"a": compute_once()},
        faults=[{"throttle": throttle, "at": "1s", "for": "2s"}],
    )
    world.run()
    # 4 s of work: 1 s at full speed, 2 s at a quarter, which do 0.5 s of work, the rest at full speed.
    assert first_duration(world) == pytest.approx(1 + 2 + (4 - 1 - 0.5))
    assert values_of(world, "speed", "time", "factor", "speed") == [
        (1, 0.25, 0.25e6),
        (3, 1, 1e6),
    ]


def test_throttles_multiply_and_unthrottle_ends_all():
    faults = [
        {"throttle": {"device": "a", "speed": "500kflops"}, "at": "1s"},
        {"throttle": {"device": "a", "slowdown": 2}, "at": "2s"},
        {"unthrottle": "a", "at": "4s"},
    ]
    world = make_world({"a": compute_once()}, faults=faults)
    world.run()
    # Until 4 s: 1 s at full speed, 1 s at a half and 2 s at a quarter, which do 0.5 s of work each.
    assert first_duration(world) == pytest.approx(4 + (4 - 1 - 0.5 - 0.5))


def test_throttle_applies_to_device_that_resumes():
    faults = [
        {"pause": "a", "at": "1s", "for": "5s"},
        {"throttle": {"device": "a", "slowdown": 2}, "at": "2s", "for": "6s"},
    ]
    world = make_world({"a": compute_once()}, faults=faults)
    world.run()
    # 1 s of work before the pause, from 6 s half the speed until 8 s, then 2 s at full speed.
    assert first_duration(world) == pytest.approx(10)


def test_throttle_triggered_by_span_applies_once_and_to_that_span():
    async def compute_four_spans(device: Device):
        for _ in range(3):
            await device.compute(lambda: None, Cost(0), Span("nothing"))
        await device.compute(lambda: None, Cost(1e6), Span("forward"))

    throttle = {"device": "a", "slowdown": 2}
    faults = [
        {"throttle": throttle, "when": {"device": "a", "begins": "nothing"}},
        {"throttle": throttle, "when": {"device": "a", "begins": "forward"}},
    ]
    world = make_world({"a": compute_four_spans}, faults=faults)
    world.run()
    # The first throttle strikes at the first of three spans only: 1 s of work takes 4 s, not 16.
    assert values_of(world, "compute", "duration") == pytest.approx([0, 0, 0, 4])


def test_throttle_persists_across_restart():
    faults = [
        {"throttle": {"device": "b", "slowdown": 4}, "at": 0},
        {"kill": "b", "at": "1s", "for": "1s"},
    ]
    world = make_world(
        {"a": sleep_for(20), "b": compute_once(flops=1e6)}, faults=faults
    )
    world.run()
    assert first_duration(world, "b") == pytest.approx(4)


def test_flap_interrupts_transmission_each_time():
    flap = {"between": ["a", "b"], "down": "100ms", "up": "5s", "times": 2}
    world = make_world(
        {"a": send_one("b", padding=10_000_000, start=0.05), "b": receive_forever},
        faults=[{"flap": flap, "at": "1s"}],
    )
    world.run()
    undisturbed = transmission_time(world, "m")
    assert 5 < undisturbed < 11, "both interruptions fall into the transmission"
    # Down at 1.0 and 6.1 s, and up again each time when TCP sends again: 0.22 s after the link went down.
    (received,) = events_of(world, "receive")
    assert received["time"] == pytest.approx(0.05 + undisturbed + LINK.delay + 2 * 0.22)
    changes = [
        (event["time"], event["up"])
        for event in events_of(world, "link")
        if event["source"] == "a"
    ]
    assert changes == [
        (1.0, False),
        (1.1, True),
        (pytest.approx(6.1), False),
        (pytest.approx(6.2), True),
    ]


def test_flap_of_one_device_does_not_affect_links_of_others():
    async def send_to_both(device: Device):
        message = Message("m", padding=2_000_000)
        await asyncio.gather(device.send("b", message), device.send("c", message))

    flap = {"device": "b", "down": "1s", "up": "9s"}
    world = make_world(
        {"a": send_to_both, "b": receive_forever, "c": receive_forever},
        faults=[{"flap": flap, "at": 0}],
    )
    world.run()
    changed_links = values_of(world, "link", "source", "destination")
    assert {destination for _, destination in changed_links} == {"a", "b", "c"}
    assert all("b" in ends for ends in changed_links)
    arrival_at_c = events_of(world, "receive", "c")[0]["time"]
    assert arrival_at_c == pytest.approx(transmission_time(world, "m") + LINK.delay)
    assert events_of(world, "receive", "b")[0]["time"] > arrival_at_c + 1


def test_link_trace_changes_rate_of_message_under_way():
    world = make_world(
        {"a": send_one("b", padding=4_000_000), "b": receive_forever},
        trace=["1,link a->b rate,4mbit", "3,link a->b rate,8mbit"],
    )
    world.run()
    # Half of the rate for 2 s costs 1 s.
    assert events_of(world, "receive")[0]["time"] == pytest.approx(
        transmission_time(world, "m") + 1 + LINK.delay
    )
    assert values_of(world, "trace", "time", "what", "value") == [
        (1, "link a->b rate", "4mbit"),
        (3, "link a->b rate", "8mbit"),
    ]
    assert values_of(world, "link", "rate") == [4e6, 8e6]


def test_trace_entry_at_start_applies_before_programs_begin():
    async def compute_and_send(device: Device):
        await device.compute(lambda: None, Cost(1e6), Span("forward"))
        await device.send("b", Message("m"))

    world = make_world(
        {"a": compute_and_send, "b": receive_forever},
        trace=["0,device a speed,2mflops", "0,link a<->b delay,1s"],
    )
    world.run()
    assert first_duration(world) == pytest.approx(0.5)
    # The delay applies to both directions.
    assert events_of(world, "send")[0]["duration"] == pytest.approx(
        2 + transmission_time(world, "m")
    )
    assert times_of(world, "trace") == [0, 0]


def test_trace_changes_speed_of_throttled_computation():
    trace = ["1,device a speed,500kflops", "3,device a slowdown,1"]
    faults = [{"throttle": {"device": "a", "slowdown": 2}, "at": "2s", "for": "2s"}]
    world = make_world({"a": compute_once()}, trace=trace, faults=faults)
    world.run()
    # Seconds of work done until 1, 2, 3 and 4 s: 1, 1.5, 1.75, 2.25; the remaining 1.75 s at full speed.
    assert first_duration(world) == pytest.approx(4 + 1.75)
