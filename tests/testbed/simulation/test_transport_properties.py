"""What `send` promises, under any mixture of faults."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.device import Device
from testbed.network.link import Cell, Link
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, make_world

NAMES = ("lead", "b", "c")
instants = st.integers(0, 6000).map(lambda ms: f"{ms}ms")
durations = st.integers(0, 4000).map(lambda ms: f"{ms}ms")
links = st.builds(
    Link,
    rate=st.sampled_from([None, 1e5, 1e6, 1e8]),
    delay=st.sampled_from([0.0, 0.001, 0.2]),
    loss=st.sampled_from([0.0, 0.0, 0.05]),
)
ways = st.sampled_from(
    [
        {},
        {"access": {"lead": {"uplink": 4e5}, "b": {"downlink": 1e6}}},
        {"cells": [Cell(NAMES, 1e6)]},
        {"access": {"c": {"downlink": 3e5}}, "cells": [Cell(("lead", "b"), 5e5)]},
    ]
)
"""What messages share on their way, beside the links' own rates."""
sizes = st.lists(st.integers(0, 30_000), min_size=1, max_size=8)


def faults(actions):
    network = st.one_of(
        st.builds(lambda name: {"partition": [[name]]}, st.sampled_from(NAMES)),
        st.builds(
            lambda name, rate, loss: {
                "degrade": {"device": name, "rate": rate, "loss": loss}
            },
            st.sampled_from(NAMES),
            st.sampled_from(["50kbit", "10mbit"]),
            st.sampled_from(["0", "10%", "100%"]),
        ),
    )
    on_device = st.builds(
        lambda action, name: {action: name},
        st.sampled_from(actions),
        st.sampled_from(NAMES[1:]),
    )
    return st.lists(
        st.builds(
            lambda fault, at, lasting: {**fault, "at": at, "for": lasting},
            st.one_of(network, on_device) if actions else network,
            instants,
            durations,
        ),
        max_size=5,
    )


def talk(link, sizes, breaks, way):
    """Let the lead send numbered messages of those sizes to both others; return the run and what they took in."""
    taken = {name: [] for name in NAMES[1:]}

    async def lead(device: Device):
        sends = []
        for number, size in enumerate(sizes):
            for peer in NAMES[1:]:
                message = Message("m", {"number": number}, padding=size)
                sends.append(asyncio.create_task(device.send(peer, message)))
            await device.sleep(0.3)
        await asyncio.gather(*sends)

    async def listen(device: Device):
        taken[device.name].append([])
        while True:
            taken[device.name][-1].append((await device.receive())["number"])

    run = make_world(
        {"lead": lead, "b": listen, "c": listen}, link=link, faults=breaks, **way
    )
    run.run()
    return run, taken


@settings(max_examples=150, deadline=None, derandomize=True)
@given(links, sizes, faults(["pause"]), ways)
def test_without_kills_each_message_arrives_once_and_in_order(link, sizes, breaks, way):
    run, taken = talk(link, sizes, breaks, way)
    for lives in taken.values():
        assert lives == [list(range(len(sizes)))]
    assert len(events_of(run, "send")) == 2 * len(sizes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(links, sizes, faults(["kill", "pause"]), ways)
def test_with_kills_each_life_takes_in_an_ordered_run_and_none_is_left_out(
    link, sizes, breaks, way
):
    run, taken = talk(link, sizes, breaks, way)
    for name, lives in taken.items():
        received = {number for life in lives for number in life}
        assert received <= set(range(len(sizes)))
        for life in lives:
            assert life == sorted(set(life))
        assert len(events_of(run, "receive", name)) >= len(sizes)
    assert len(events_of(run, "send")) == 2 * len(sizes)
    times = [event.time for event in run.events]
    assert times == sorted(times)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(links, sizes, faults(["kill", "pause"]), ways)
def test_same_scenario_same_events(link, sizes, breaks, way):
    first, second = (talk(link, sizes, breaks, way)[0] for _ in range(2))
    assert [event.to_json() for event in first.events] == [
        event.to_json() for event in second.events
    ]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(links, sizes, faults(["kill", "pause"]), ways)
def test_nothing_is_faster_than_the_link(link, sizes, breaks, way):
    run, _ = talk(
        link, sizes, [fault for fault in breaks if "degrade" not in fault], way
    )
    for event in events_of(run, "send"):
        transmission = event["bytes"] * 8 / link.rate if link.rate else 0.0
        assert event["duration"] >= transmission + 2 * link.delay - 1e-9
