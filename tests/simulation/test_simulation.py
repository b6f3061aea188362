"""Whole programs on the virtual clock."""

import asyncio

import pytest
from worlds import events, on_wire, world

from testbed.device import Cost, Device, Span
from testbed.simulation.loop import Stillness
from testbed.simulation.world import ProgramError
from testbed.wire import Message


def test_message_takes_transmission_delay_and_acknowledgement():
    seen = {}

    async def source(device: Device):
        await device.send("sink", Message("x", padding=999))
        seen["acknowledged"] = device.now()

    async def sink(device: Device):
        message = await device.receive()
        seen["arrived"], seen["sender"] = device.now(), message.sender

    run = world({"source": source, "sink": sink})
    run.run()
    assert 1000 < events(run, "receive")[0]["bytes"] < 1200
    transmission = on_wire(run, "x") * 8 / 8e6
    assert seen["arrived"] == pytest.approx(transmission + 0.01, abs=1e-12)
    assert seen["acknowledged"] == pytest.approx(transmission + 0.02, abs=1e-12)
    assert seen["sender"] == "source"


def test_processor_is_serial():
    ends = []

    async def lead(device: Device):
        async def work(i):
            ends.append((await device.compute(lambda: i, Cost(1e6), Span("w", batch=i)), device.now()))

        await asyncio.gather(*(work(i) for i in range(3)))

    world({"lead": lead}).run()
    assert ends == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_deadlock_is_named():
    async def waits(device: Device):
        await device.receive()

    run = world({"a": waits, "b": waits})
    with pytest.raises(Stillness):
        run.run()
    assert "a waits for a message; b waits for a message" in run.why_still()


def test_program_error_keeps_its_cause():
    async def lead(device: Device):
        await device.receive()

    async def fails(device: Device):
        await device.sleep(1)
        raise KeyError("lost")

    run = world({"lead": lead, "b": fails})
    with pytest.raises(ProgramError) as caught:
        run.run()
    assert isinstance(caught.value.__cause__, KeyError)
    failed = [event["error"] for event in events(run, "state", "b") if event["state"] == "failed"]
    assert failed == ["KeyError: 'lost'"]
