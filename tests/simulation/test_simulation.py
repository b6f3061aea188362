"""Whole programs on the virtual clock."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.hardware import DeviceSpec
from testbed.network.framing import wire_bytes
from testbed.network.link import Link
from testbed.simulation.loop import Stillness
from testbed.simulation.world import ProgramError, World
from testbed.wire import Message

LINK = Link(rate=8e6, delay=0.01)


def world(programs, link=LINK, speed=1e6, **options):
    """Give each device its program on a mesh; the first is the lead."""
    names = list(programs)
    links = {(a, b): link for a in names for b in names if a != b}
    specs = [DeviceSpec(name, speed, 1e9) for name in names]
    made = World(specs, links, lambda device: programs[device.name](device), names[0], seed=1, **options)
    made.start()
    return made


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
    size = next(event.fields["bytes"] for event in run.events if event.event == "receive")
    assert 1000 < size < 1200
    transmission = wire_bytes(size) * 8 / 8e6
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
    run.close()


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
    assert run.events[-1].fields["error"] == "KeyError: 'lost'"
    run.close()
