"""Whole programs on the virtual clock."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.simulation.event_queue import EmptySchedule
from testbed.simulation.world import ProgramError
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, first_message_bytes, make_world


def test_message_takes_transmission_delay_and_acknowledgement():
    seen = {}

    async def source(device: Device):
        await device.send("sink", Message("x", padding=999))
        seen["acknowledged"] = device.now()

    async def sink(device: Device):
        message = await device.receive()
        seen["arrived"], seen["sender"] = device.now(), message.sender

    run = make_world({"source": source, "sink": sink})
    run.run()
    assert 1000 < events_of(run, "receive")[0]["bytes"] < 1200
    transmission = first_message_bytes(run, "x") * 8 / 8e6
    assert seen["arrived"] == pytest.approx(transmission + 0.01, abs=1e-12)
    assert seen["acknowledged"] == pytest.approx(transmission + 0.02, abs=1e-12)
    assert seen["sender"] == "source"


def test_a_message_is_being_received_from_its_first_byte_to_its_last():
    seen = []

    async def source(device: Device):
        for _ in range(12):
            await device.sleep(0.1)
            seen.append(device.receives("sink"))

    async def sink(device: Device):
        await device.sleep(0.145)
        await device.send("source", Message("x", padding=800_000))

    run = make_world({"source": source, "sink": sink})
    run.run()
    assert seen == [False, *[True] * 8, *[False] * 3]


def test_nothing_is_received_from_a_device_that_died_while_it_sent():
    seen = []

    async def source(device: Device):
        for _ in range(5):
            await device.sleep(0.1)
            seen.append(device.receives("sink"))

    async def sink(device: Device):
        await device.send("source", Message("x", padding=800_000))

    make_world(
        {"source": source, "sink": sink}, faults=[{"kill": "sink", "at": "250ms"}]
    ).run()
    assert seen == [True, True, False, False, False]


def test_processor_is_serial():
    ends = []

    async def lead(device: Device):
        async def work(i):
            ends.append(
                (
                    await device.compute(lambda: i, Cost(1e6), Span("w", batch=i)),
                    device.now(),
                )
            )

        await asyncio.gather(*(work(i) for i in range(3)))

    make_world({"lead": lead}).run()
    assert ends == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_several_processors_begin_work_in_its_order_and_compute_at_once():
    ends = []

    async def lead(device: Device):
        async def work(i, flops):
            await device.compute(lambda: None, Cost(flops), Span("w", batch=i))
            ends.append((i, device.now()))

        await asyncio.gather(
            *(work(i, flops) for i, flops in enumerate((2e6, 1e6, 2e6, 1e6)))
        )

    make_world({"lead": lead}, access={"lead": {"processors": 2}}).run()
    assert ends == [(1, 1.0), (0, 2.0), (2, 3.0), (3, 3.0)]


def test_a_pause_and_a_throttle_hit_all_processors():
    ends = []

    async def lead(device: Device):
        async def work(i):
            await device.compute(lambda: None, Cost(4e6), Span("w", batch=i))
            ends.append(device.now())

        await asyncio.gather(*(work(i) for i in range(2)))

    faults = [
        {"pause": "lead", "at": "1s", "for": "1s"},
        {"throttle": {"device": "lead", "slowdown": 2}, "at": "3s"},
    ]
    make_world({"lead": lead}, access={"lead": {"processors": 2}}, faults=faults).run()
    # A second of work, a pause, another second, and the two that are left at half the speed.
    assert ends == [7.0, 7.0]


def test_a_message_may_come_in_the_instant_in_which_its_receiver_is_cancelled():
    seen = []

    async def lead(device):
        receiving = asyncio.ensure_future(device.receive())
        await device.sleep(1)
        receiving.cancel()
        device.deliver(Message("x"), 1, device.now(), 0.0)
        with pytest.raises(asyncio.CancelledError):
            await receiving
        seen.append((await device.receive()).kind)

    make_world({"lead": lead}).run()
    assert seen == ["x"]


def test_deadlock_is_named():
    async def waits(device: Device):
        await device.receive()

    run = make_world({"a": waits, "b": waits})
    with pytest.raises(EmptySchedule):
        run.run()
    assert "a waits for a message; b waits for a message" in run.describe_waits()


def test_program_error_keeps_its_cause():
    async def lead(device: Device):
        await device.receive()

    async def fails(device: Device):
        await device.sleep(1)
        raise KeyError("lost")

    run = make_world({"lead": lead, "b": fails})
    with pytest.raises(ProgramError) as caught:
        run.run()
    assert isinstance(caught.value.__cause__, KeyError)
    failed = [
        event["error"]
        for event in events_of(run, "state", "b")
        if event["state"] == "failed"
    ]
    assert failed == ["KeyError: 'lost'"]


def test_tasks_of_many_devices_hash_apart_and_alike_in_each_run() -> None:
    def hashes() -> list[int]:
        found: list[int] = []

        async def program(device) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    found.append(hash(group.create_task(device.sleep(1.0))))

        make_world({f"device{number}": program for number in range(50)}).run()
        return found

    assert len(set(hashes())) == 150
    assert hashes() == hashes()


def test_listener_receives_earlier_and_arriving_messages():
    heard = []

    async def source(device: Device):
        for number in range(3):
            await device.send("sink", Message("x", {"number": number}))
            await device.sleep(0.1)

    async def sink(device: Device):
        await device.sleep(0.05)
        await device.listen(
            lambda message: heard.append((message["number"], device.now()))
        )

    run = make_world({"source": source, "sink": sink})
    run.run()
    arrivals = [event.time for event in run.events if event.event == "receive"]
    assert heard == [(0, 0.05), (1, arrivals[1]), (2, arrivals[2])]


def test_exception_of_a_listener_fails_its_program():
    def take(message):
        raise ValueError("not for me")

    async def source(device: Device):
        await device.send("sink", Message("x"))
        await device.send("sink", Message("x"))
        await device.sleep(10)

    async def sink(device: Device):
        await device.listen(take)

    with pytest.raises(ProgramError) as raised:
        make_world({"source": source, "sink": sink}).run()
    assert "not for me" in str(raised.value.__cause__)
