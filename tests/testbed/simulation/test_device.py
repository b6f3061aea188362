"""Devices on the virtual clock: messages, processors, listeners and failing programs."""

import asyncio

import pytest

from testbed.device import Cost, Device, Span
from testbed.simulation.event_queue import EmptySchedule
from testbed.simulation.world import ProgramError
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, make_world
from tests.testbed.simulation.observations import times_of, transmission_time

TWO_PROCESSORS = {"coordinator": {"processors": 2}}


async def receive_once(device: Device):
    await device.receive()


def test_message_takes_transmission_and_delay_and_acknowledgement_another_delay():
    observed = {}

    async def send_one(device: Device):
        await device.send("sink", Message("x", padding=999))
        observed["acknowledged"] = device.now()

    async def receive_one(device: Device):
        message = await device.receive()
        observed["arrived"] = device.now()
        observed["sender"] = message.sender

    world = make_world({"source": send_one, "sink": receive_one})
    world.run()
    assert 1000 < events_of(world, "receive")[0]["bytes"] < 1200
    arrival = transmission_time(world, "x") + LINK.delay
    assert observed["arrived"] == pytest.approx(arrival, abs=1e-12)
    assert observed["acknowledged"] == pytest.approx(arrival + LINK.delay, abs=1e-12)
    assert observed["sender"] == "source"


def poll_receiving(count: int, answers: list):
    """Make a program to ask every 0.1 s whether a message from the sink is being received."""

    async def program(device: Device):
        for _ in range(count):
            await device.sleep(0.1)
            answers.append(device.receives("sink"))

    return program


def test_message_is_being_received_from_first_to_last_byte():
    answers = []

    async def send_late(device: Device):
        await device.sleep(0.145)
        await device.send("source", Message("x", padding=800_000))

    world = make_world({"source": poll_receiving(12, answers), "sink": send_late})
    world.run()
    # The message takes 0.8 s, from 0.155 to about 0.96 s.
    assert answers == [False, *[True] * 8, *[False] * 3]


def test_message_of_killed_sender_is_no_longer_being_received():
    answers = []

    async def send_immediately(device: Device):
        await device.send("source", Message("x", padding=800_000))

    make_world(
        {"source": poll_receiving(5, answers), "sink": send_immediately},
        faults=[{"kill": "sink", "at": "250ms"}],
    ).run()
    assert answers == [True, True, False, False, False]


def test_single_processor_computes_tasks_sequentially():
    results = []

    async def compute_three(device: Device):
        async def compute_one(number):
            value = await device.compute(
                lambda: number, Cost(1e6), Span("w", batch=number)
            )
            results.append((value, device.now()))

        await asyncio.gather(*(compute_one(number) for number in range(3)))

    make_world({"coordinator": compute_three}).run()
    assert results == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_two_processors_start_tasks_in_order_and_compute_concurrently():
    ends = []

    async def compute_four(device: Device):
        async def compute_one(number, flops):
            await device.compute(lambda: None, Cost(flops), Span("w", batch=number))
            ends.append((number, device.now()))

        works = enumerate((2e6, 1e6, 2e6, 1e6))
        await asyncio.gather(*(compute_one(number, flops) for number, flops in works))

    make_world({"coordinator": compute_four}, access=TWO_PROCESSORS).run()
    # Task 2 begins at 1 s on the processor of task 1, task 3 at 2 s on that of task 0.
    assert ends == [(1, 1.0), (0, 2.0), (2, 3.0), (3, 3.0)]


def test_pause_and_throttle_affect_all_processors():
    ends = []

    async def compute_two(device: Device):
        async def compute_one(number):
            await device.compute(lambda: None, Cost(4e6), Span("w", batch=number))
            ends.append(device.now())

        await asyncio.gather(compute_one(0), compute_one(1))

    faults = [
        {"pause": "coordinator", "at": "1s", "for": "1s"},
        {"throttle": {"device": "coordinator", "slowdown": 2}, "at": "3s"},
    ]
    make_world({"coordinator": compute_two}, access=TWO_PROCESSORS, faults=faults).run()
    # 1 s of work, 1 s of pause, 1 s of work, and the remaining 2 s at half the speed.
    assert ends == [7.0, 7.0]


def test_message_delivered_at_instant_of_cancelled_receive_is_kept():
    kinds = []

    async def cancel_and_receive_again(device):
        receiving = asyncio.ensure_future(device.receive())
        await device.sleep(1)
        receiving.cancel()
        device.deliver(Message("x"), 1, device.now(), 0.0)
        with pytest.raises(asyncio.CancelledError):
            await receiving
        message = await device.receive()
        kinds.append(message.kind)

    make_world({"coordinator": cancel_and_receive_again}).run()
    assert kinds == ["x"]


def test_deadlock_error_describes_waits_of_all_devices():
    world = make_world({"a": receive_once, "b": receive_once})
    with pytest.raises(EmptySchedule):
        world.run()
    assert "a waits for a message; b waits for a message" in world.describe_waits()


def test_program_error_preserves_cause_and_is_recorded():
    async def fail_later(device: Device):
        await device.sleep(1)
        raise KeyError("lost")

    world = make_world({"coordinator": receive_once, "b": fail_later})
    with pytest.raises(ProgramError) as raised:
        world.run()
    assert isinstance(raised.value.__cause__, KeyError)
    errors = [
        event["error"]
        for event in events_of(world, "state", "b")
        if event["state"] == "failed"
    ]
    assert errors == ["KeyError: 'lost'"]


def test_hashes_of_tasks_are_distinct_and_reproducible() -> None:
    # Hashes determine the order of sets of tasks, which must not depend on addresses in memory.
    def hashes_of_run() -> list[int]:
        hashes: list[int] = []

        async def create_three_tasks(device) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    hashes.append(hash(group.create_task(device.sleep(1.0))))

        make_world({f"device{n}": create_three_tasks for n in range(50)}).run()
        return hashes

    assert len(set(hashes_of_run())) == 50 * 3
    assert hashes_of_run() == hashes_of_run()


def test_listener_receives_queued_and_later_messages():
    received = []

    async def send_three(device: Device):
        for number in range(3):
            await device.send("sink", Message("x", {"number": number}))
            await device.sleep(0.1)

    async def listen_late(device: Device):
        # The first message arrives before the listener is registered.
        await device.sleep(0.05)
        await device.listen(
            lambda message: received.append((message["number"], device.now()))
        )

    world = make_world({"source": send_three, "sink": listen_late})
    world.run()
    arrivals = times_of(world, "receive")
    assert received == [(0, 0.05), (1, arrivals[1]), (2, arrivals[2])]


def test_exception_in_listener_fails_program():
    def reject_message(message):
        raise ValueError("not for me")

    async def send_two(device: Device):
        await device.send("sink", Message("x"))
        await device.send("sink", Message("x"))
        await device.sleep(10)

    async def listen(device: Device):
        await device.listen(reject_message)

    with pytest.raises(ProgramError) as raised:
        make_world({"source": send_two, "sink": listen}).run()
    assert "not for me" in str(raised.value.__cause__)
