"""Speeds and links that change while something is under way, against times computed by hand."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, first_message_bytes, idle, make_world


def computing(flops=4e6):
    async def program(device: Device):
        await device.compute(lambda: None, Cost(flops), Span("forward"))

    return program


def test_throttle_slows_running_work():
    # 4 s of work: 1 s at full speed, 2 s at a quarter, the rest at full speed.
    run = make_world(
        {"a": computing()},
        faults=[{"throttle": {"device": "a", "slowdown": 4}, "at": "1s", "for": "2s"}],
    )
    run.run()
    (compute,) = events_of(run, "compute")
    assert compute["duration"] == pytest.approx(1 + 2 + (4 - 1 - 0.5))
    speeds = events_of(run, "speed")
    assert [(event["time"], event["factor"], event["speed"]) for event in speeds] == [
        (1, 0.25, 0.25e6),
        (3, 1, 1e6),
    ]


def test_throttles_pile_up_and_all_end_at_once():
    faults = [
        {"throttle": {"device": "a", "speed": "500kflops"}, "at": "1s"},
        {"throttle": {"device": "a", "slowdown": 2}, "at": "2s"},
        {"unthrottle": "a", "at": "4s"},
    ]
    run = make_world({"a": computing()}, faults=faults)
    run.run()
    assert events_of(run, "compute")[0]["duration"] == pytest.approx(
        4 + (4 - 1 - 0.5 - 0.5)
    )


def test_speed_changes_while_a_device_is_paused():
    faults = [
        {"pause": "a", "at": "1s", "for": "5s"},
        {"throttle": {"device": "a", "slowdown": 2}, "at": "2s", "for": "6s"},
    ]
    run = make_world({"a": computing()}, faults=faults)
    run.run()
    # 1 s of work before the pause, 2 s at half speed until 8 s, then 2 s at full speed.
    assert events_of(run, "compute")[0]["duration"] == pytest.approx(10)


def test_throttle_as_work_begins_counts_once():
    async def program(device: Device):
        for _ in range(3):
            await device.compute(lambda: None, Cost(0), Span("nothing"))
        await device.compute(lambda: None, Cost(1e6), Span("forward"))

    when = {"device": "a", "begins": "nothing"}
    faults = [
        {"throttle": {"device": "a", "slowdown": 2}, "when": when},
        {
            "throttle": {"device": "a", "slowdown": 2},
            "when": {"device": "a", "begins": "forward"},
        },
    ]
    run = make_world({"a": program}, faults=faults)
    run.run()
    assert [event["duration"] for event in events_of(run, "compute")] == pytest.approx(
        [0, 0, 0, 4]
    )


def test_device_that_boots_again_is_as_slow_as_before():
    async def worker(device: Device):
        await device.compute(lambda: None, Cost(1e6), Span("forward"))

    async def lead(device: Device):
        await device.sleep(20)

    faults = [
        {"throttle": {"device": "b", "slowdown": 4}, "at": 0},
        {"kill": "b", "at": "1s", "for": "1s"},
    ]
    run = make_world({"a": lead, "b": worker}, faults=faults)
    run.run()
    assert events_of(run, "compute", "b")[0]["duration"] == pytest.approx(4)


def test_flap_interrupts_transmissions_each_time():
    async def lead(device: Device):
        await device.sleep(0.05)
        await device.send("b", Message("m", padding=10_000_000))

    flap = {"between": ["a", "b"], "down": "100ms", "up": "5s", "times": 2}
    run = make_world({"a": lead, "b": idle}, faults=[{"flap": flap, "at": "1s"}])
    run.run()
    alone = first_message_bytes(run, "m") * 8 / LINK.rate
    assert 5 < alone < 11
    # Down at 1.0 and 6.1 s, each time found to be up again as TCP next tries: 0.22 s after it went down.
    (received,) = events_of(run, "receive")
    assert received["time"] == pytest.approx(0.05 + alone + LINK.delay + 2 * 0.22)
    ups = [
        (event["time"], event["up"])
        for event in events_of(run, "link")
        if event["source"] == "a"
    ]
    assert ups == [
        (1.0, False),
        (1.1, True),
        (pytest.approx(6.1), False),
        (pytest.approx(6.2), True),
    ]


def test_flap_of_a_device_leaves_others_alone():
    async def lead(device: Device):
        await asyncio.gather(
            *(device.send(peer, Message("m", padding=2_000_000)) for peer in "bc")
        )

    run = make_world(
        {"a": lead, "b": idle, "c": idle},
        faults=[{"flap": {"device": "b", "down": "1s", "up": "9s"}, "at": 0}],
    )
    run.run()
    assert {event["destination"] for event in events_of(run, "link")} == {"a", "b", "c"}
    assert all(
        "b" in (event["source"], event["destination"])
        for event in events_of(run, "link")
    )
    at_c = events_of(run, "receive", "c")[0]["time"]
    assert at_c == pytest.approx(
        first_message_bytes(run, "m") * 8 / LINK.rate + LINK.delay
    )
    assert events_of(run, "receive", "b")[0]["time"] > at_c + 1


def test_rate_of_a_trace_counts_from_its_very_instant():
    async def lead(device: Device):
        await device.send("b", Message("m", padding=4_000_000))

    run = make_world(
        {"a": lead, "b": idle},
        trace=["1,link a->b rate,4mbit", "3,link a->b rate,8mbit"],
    )
    run.run()
    # Half as fast for 2 s.
    assert events_of(run, "receive")[0]["time"] == pytest.approx(
        first_message_bytes(run, "m") * 8 / LINK.rate + 1 + LINK.delay
    )
    assert [
        (event["time"], event["what"], event["value"])
        for event in events_of(run, "trace")
    ] == [
        (1, "link a->b rate", "4mbit"),
        (3, "link a->b rate", "8mbit"),
    ]
    assert [event["rate"] for event in events_of(run, "link")] == [4e6, 8e6]


def test_trace_begins_before_any_device_does():
    async def lead(device: Device):
        await device.compute(lambda: None, Cost(1e6), Span("forward"))
        await device.send("b", Message("m"))

    run = make_world(
        {"a": lead, "b": idle},
        trace=["0,device a speed,2mflops", "0,link a<->b delay,1s"],
    )
    run.run()
    assert events_of(run, "compute")[0]["duration"] == pytest.approx(0.5)
    assert events_of(run, "send")[0]["duration"] == pytest.approx(
        2 + first_message_bytes(run, "m") * 8 / LINK.rate
    )
    assert [event["time"] for event in events_of(run, "trace")] == [0, 0]


def test_trace_changes_the_speed_of_throttled_work():
    trace = ["1,device a speed,500kflops", "3,device a slowdown,1"]
    faults = [{"throttle": {"device": "a", "slowdown": 2}, "at": "2s", "for": "2s"}]
    run = make_world({"a": computing()}, trace=trace, faults=faults)
    run.run()
    # Seconds of work done until 1, 2, 3 and 4 s: 1, 1.5, 1.75, 2.25; the rest at full speed.
    assert events_of(run, "compute")[0]["duration"] == pytest.approx(4 + 1.75)
