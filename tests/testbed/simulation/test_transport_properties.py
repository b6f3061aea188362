"""Guarantees of `send` under random combinations of faults: order, delivery and minimum time."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.device import Device
from testbed.network.link import Cell, Link
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, make_world

NAMES = ("coordinator", "b", "c")
RECEIVERS = NAMES[1:]
start_times = st.integers(0, 6000).map(lambda ms: f"{ms}ms")
durations = st.integers(0, 4000).map(lambda ms: f"{ms}ms")
links = st.builds(
    Link,
    rate=st.sampled_from([None, 1e5, 1e6, 1e8]),
    delay=st.sampled_from([0.0, 0.001, 0.2]),
    # Twice zero, so that most links are lossless.
    loss=st.sampled_from([0.0, 0.0, 0.05]),
)
shared_media = st.sampled_from(
    [
        {},
        {"access": {"coordinator": {"uplink": 4e5}, "b": {"downlink": 1e6}}},
        {"cells": [Cell(NAMES, rate=1e6)]},
        {
            "access": {"c": {"downlink": 3e5}},
            "cells": [Cell(("coordinator", "b"), rate=5e5)],
        },
    ]
)
"""Options of a world by which links share rates, beside the links' own rates."""
message_sizes = st.lists(st.integers(0, 30_000), min_size=1, max_size=8)


def partition_of(name):
    return {"partition": [[name]]}


def degradation_of(name, rate, loss):
    return {"degrade": {"device": name, "rate": rate, "loss": loss}}


def device_fault(action, name):
    return {action: name}


def limited_fault(fault, at, duration):
    return {**fault, "at": at, "for": duration}


def fault_lists(actions):
    """Return a strategy for lists of network faults and of some actions on receivers."""
    effects = st.one_of(
        st.builds(partition_of, st.sampled_from(NAMES)),
        st.builds(
            degradation_of,
            st.sampled_from(NAMES),
            st.sampled_from(["50kbit", "10mbit"]),
            st.sampled_from(["0", "10%", "100%"]),
        ),
        st.builds(device_fault, st.sampled_from(actions), st.sampled_from(RECEIVERS)),
    )
    faults = st.builds(limited_fault, effects, start_times, durations)
    return st.lists(faults, max_size=5)


def simulate_messages(link, sizes, faults, media):
    """Send numbered messages to both receivers.

    Returns the world, and for each receiver the numbers received by its program after each boot.
    """
    received = {name: [] for name in RECEIVERS}

    async def send_numbered(device: Device):
        sends = []
        for number, size in enumerate(sizes):
            for peer in RECEIVERS:
                message = Message("m", {"number": number}, padding=size)
                sends.append(asyncio.create_task(device.send(peer, message)))
            await device.sleep(0.3)
        await asyncio.gather(*sends)

    async def collect_numbers(device: Device):
        numbers = []
        received[device.name].append(numbers)
        while True:
            message = await device.receive()
            numbers.append(message["number"])

    world = make_world(
        {"coordinator": send_numbered, "b": collect_numbers, "c": collect_numbers},
        link=link,
        faults=faults,
        **media,
    )
    world.run()
    return world, received


@settings(max_examples=150, deadline=None, derandomize=True)
@given(links, message_sizes, fault_lists(["pause"]), shared_media)
def test_without_kills_each_message_arrives_once_in_order(link, sizes, faults, media):
    world, received = simulate_messages(link, sizes, faults, media)
    for boots in received.values():
        assert boots == [list(range(len(sizes)))]
    assert len(events_of(world, "send")) == 2 * len(sizes)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(links, message_sizes, fault_lists(["kill", "pause"]), shared_media)
def test_with_kills_messages_arrive_in_order_after_each_boot(
    link, sizes, faults, media
):
    world, received = simulate_messages(link, sizes, faults, media)
    for name, boots in received.items():
        for numbers in boots:
            assert numbers == sorted(set(numbers))
            assert set(numbers) <= set(range(len(sizes)))
        # A message whose acknowledgement a kill prevented arrives twice.
        assert len(events_of(world, "receive", name)) >= len(sizes)
    assert len(events_of(world, "send")) == 2 * len(sizes)
    times = [event.time for event in world.events]
    assert times == sorted(times)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(links, message_sizes, fault_lists(["kill", "pause"]), shared_media)
def test_events_are_reproducible(link, sizes, faults, media):
    first, _ = simulate_messages(link, sizes, faults, media)
    second, _ = simulate_messages(link, sizes, faults, media)
    assert json_lines(first) == json_lines(second)


def json_lines(world):
    return [event.to_json() for event in world.events]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(links, message_sizes, fault_lists(["kill", "pause"]), shared_media)
def test_message_takes_at_least_transmission_and_round_trip(link, sizes, faults, media):
    # A degradation may also raise the rate of a link.
    faults = [fault for fault in faults if "degrade" not in fault]
    world, _ = simulate_messages(link, sizes, faults, media)
    for event in events_of(world, "send"):
        transmission = event["bytes"] * 8 / link.rate if link.rate else 0.0
        assert event["duration"] >= transmission + 2 * link.delay - 1e-9
