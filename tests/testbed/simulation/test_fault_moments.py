"""Faults of every kind at every event: runs finish without errors, and reverted faults leave no trace."""

import asyncio
import gc
import logging
import math
from collections import Counter
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.device import Cost, Device, Span
from testbed.simulation.world import BOOT_SECONDS
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, make_world, receive_forever
from tests.testbed.simulation.observations import sleep_for, values_of

ROUNDS = 3
DEVICES = ("coordinator", "b", "c")
EVENT_NAMES = ("state", "step", "send", "receive", "cast", "begin", "compute", "log")
MOMENTS = [{"event": name} for name in EVENT_NAMES]
MOMENTS += [{"begins": "forward", "batch": batch} for batch in range(ROUNDS)]
"""Triggers of faults, as `when` in a scenario has them."""
ACTIONS = {
    "kill": lambda device: {"kill": device},
    "pause": lambda device: {"pause": device},
    "retire": lambda device: {"retire": device},
    "partition": lambda device: {"partition": [[device]]},
    "degrade": lambda device: {
        "degrade": {"device": device, "rate": "8kbit", "delay": "50ms", "loss": "20%"}
    },
    "flap": lambda device: {"flap": {"device": device, "down": "100ms", "up": "10ms"}},
    "throttle": lambda device: {"throttle": {"device": device, "slowdown": 10}},
}


async def coordinate_rounds(device: Device) -> None:
    """Have each round computed by ``b`` and forwarded by ``c``, repeating rounds without an answer."""
    saved = device.saved("round")
    first = 0 if saved is None else saved["number"] + 1
    for number in range(first, ROUNDS):
        while not await is_round_answered(device, number):
            device.record("log", text=f"again {number}")
        device.record("step", step=number)
        await device.cast(["b", "c"], Message("news", padding=3000))
        await device.save("round", Message("round", {"number": number}))


async def is_round_answered(device: Device, number: int) -> bool:
    """Send a round's two messages of work, compute, and report whether an answer arrives within 2 s."""
    try:
        async with asyncio.timeout(2):
            async with asyncio.TaskGroup() as group:
                for batch in range(2):
                    work = Message("work", {"number": number}, padding=5000 * batch)
                    group.create_task(device.send("b", work))
                group.create_task(
                    device.compute(lambda: None, Cost(1e4), Span("forward", number))
                )
            # Answers of earlier, repeated rounds are skipped.
            while (await device.receive()).fields.get("number") != number:
                pass
    except TimeoutError:
        return False
    return True


async def compute_and_forward(device: Device) -> None:
    """Compute and forward all work concurrently: ``b`` to ``c``, ``c`` to the coordinator."""
    target = {"b": "c", "c": "coordinator"}[device.name]

    async def handle_work(message: Message) -> None:
        span = Span("forward", message["number"])
        await device.compute(lambda: None, Cost(2e4), span)
        device.record("log", text="done")
        await device.send(target, message)

    tasks = set()
    while not device.leaving:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                message = await device.receive()
                if message.kind == "work":
                    tasks.add(asyncio.create_task(handle_work(message)))


def simulate_rounds(faults, access=None):
    world = make_world(
        {
            "coordinator": coordinate_rounds,
            "b": compute_and_forward,
            "c": compute_and_forward,
        },
        faults=faults,
        access=access,
        time_limit=1000,
    )
    world.run()
    return world


def assert_run_is_sound(faults, asyncio_log, **options):
    """Check for a reproducible run with all rounds and no logged error."""
    asyncio_log.clear()
    world = simulate_rounds(faults, **options)
    assert not asyncio_log
    assert set(values_of(world, "step", "step")) == set(range(ROUNDS))
    assert world.events == simulate_rounds(faults, **options).events
    assert_stopped_devices_are_silent(world.events)
    completed = Counter()
    for event in world.events:
        if event.event == "step":
            completed[event.device, event.time] += 1
    assert max(completed.values()) == 1


def assert_stopped_devices_are_silent(events):
    """Check for the absence of events of killed and paused devices."""
    stopped_since = {}
    for event in events:
        fields = event.fields
        if event.event == "fault" and fields["action"] in ("kill", "pause"):
            if fields["phase"] == "undo":
                stopped_since.pop(fields["target"], None)
            else:
                stopped_since[fields["target"]] = event.time
        elif event.event != "state":
            # Events at the instant of the fault itself may precede it.
            assert event.time <= stopped_since.get(event.device, math.inf), event


@pytest.mark.parametrize(
    "moment", MOMENTS, ids=lambda moment: "-".join(map(str, moment.values()))
)
def test_run_survives_each_fault_at_each_event(moment, asyncio_log):
    for action, device in product(ACTIONS, DEVICES):
        fault = {
            **ACTIONS[action](device),
            "when": {"device": device, **moment},
            "for": "1s",
        }
        assert_run_is_sound([fault], asyncio_log)


random_faults = st.fixed_dictionaries(
    {
        # Not "retire": a device that rejoins before it has left leaves for good.
        "action": st.sampled_from(sorted(set(ACTIONS) - {"retire"})),
        "victim": st.sampled_from(DEVICES),
        # An event of a device, or a time in seconds.
        "when": st.one_of(
            st.tuples(st.sampled_from(DEVICES), st.sampled_from(MOMENTS)),
            st.floats(0, 0.2),
        ),
        "for": st.sampled_from(
            ["0s", "1ms", "20ms", "300ms", "1s", f"{BOOT_SECONDS}s", "5s"]
        ),
    }
)


def fault_keys(choice):
    """Return a random fault as the scenario file has it."""
    when = choice["when"]
    if isinstance(when, float):
        moment = {"at": f"{when:.6f}s"}
    else:
        device, event = when
        moment = {"when": {"device": device, **event}}
    effect = ACTIONS[choice["action"]](choice["victim"])
    return {**effect, **moment, "for": choice["for"]}


@given(
    st.lists(random_faults, min_size=1, max_size=5),
    st.sampled_from(
        [
            None,
            {"coordinator": {"uplink": 1e6}},
            {"b": {"uplink": 1e6, "downlink": 5e5}},
        ]
    ),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_run_survives_random_combinations_of_faults(asyncio_log, choices, access):
    faults = [fault_keys(choice) for choice in choices]
    assert_run_is_sound(faults, asyncio_log, access=access)


def test_device_killed_while_receiving_gets_unacknowledged_messages_again(asyncio_log):
    async def send_three(device: Device) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(device.send("b", Message("m", {"number": number})))

    times, numbers = [], []

    async def collect_messages(device: Device) -> None:
        while True:
            message = await device.receive()
            times.append(device.now())
            numbers.append(message["number"])

    # All three messages arrive during the pause; the first event after it triggers the kill.
    faults = [
        {"pause": "b", "at": "1ms", "for": "1s"},
        {"kill": "b", "when": {"device": "b", "event": "receive"}, "for": "0s"},
    ]
    world = make_world(
        {"coordinator": send_three, "b": collect_messages}, faults=faults
    )
    world.run()
    assert numbers == [1, 2], "the first was received as b was killed"
    assert min(times) > 1 + BOOT_SECONDS
    assert not asyncio_log


def test_device_killed_during_pause_sends_after_restart():
    async def send_after_each_boot(device: Device) -> None:
        await device.sleep(0 if device.saved("sent") else 0.5)
        await device.save("sent", Message("sent"))
        await device.send("b", Message("m"))
        await device.sleep(5)

    faults = [
        {"pause": "coordinator", "at": "1s"},
        {"kill": "coordinator", "at": "2s", "for": "1s"},
    ]
    world = make_world(
        {"coordinator": send_after_each_boot, "b": receive_forever},
        faults=faults,
        time_limit=100,
    )
    world.run()
    # One message before the pause and one after the restart.
    assert len(events_of(world, "send", "coordinator")) == 2


def test_booting_device_can_be_paused():
    faults = [
        {"kill": "coordinator", "at": "1s", "for": "0s"},
        {"pause": "coordinator", "at": "2s", "for": "10s"},
    ]
    world = make_world({"coordinator": sleep_for(2)}, faults=faults)
    world.run()
    start_times = [
        event["time"]
        for event in events_of(world, "state")
        if event["state"] == "started"
    ]
    # The boot would have ended at 3 s; the program starts when the pause ends at 12 s.
    assert start_times == [0, 12]


def test_task_created_by_killed_program_never_runs():
    run_times = []

    async def record_each_second(device: Device) -> None:
        while True:
            run_times.append(device.now())
            await device.sleep(1)

    async def start_task_when_killed(device: Device) -> None:
        try:
            await device.sleep(100)
        finally:
            asyncio.create_task(record_each_second(device))  # noqa: RUF006 - it must not run at all

    make_world(
        {"coordinator": sleep_for(10), "b": start_task_when_killed},
        faults=[{"kill": "b", "at": "1s"}],
    ).run()
    assert run_times == []


def test_sets_of_tasks_have_reproducible_order():
    async def record_finished_tasks(device: Device) -> None:
        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(device.sleep(1), name=str(number)))
        finished, _ = await asyncio.wait(tasks)
        for task in finished:
            device.record("log", text=task.get_name())

    def order_of_run():
        world = make_world({"coordinator": record_finished_tasks})
        world.run()
        return values_of(world, "log", "text")

    expected = [str(number) for number in range(20)]
    assert order_of_run() == expected
    assert order_of_run() == expected


@pytest.fixture(scope="module")
def asyncio_log():
    """Collect asyncio's log messages; pytest's own fixture covers only one example of hypothesis."""
    # Loops of earlier tests may have ended with pending tasks, which log when they are collected.
    gc.collect()
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(logging.Formatter().format(record))
    logging.getLogger("asyncio").addHandler(handler)
    yield records
    logging.getLogger("asyncio").removeHandler(handler)
