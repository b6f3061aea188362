"""Any moment that a scenario can name may be struck by any action: nothing breaks, and what is undone is made good."""

import asyncio
import gc
import logging
from collections import Counter
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.device import Cost, Device, Span
from testbed.simulation.world import BOOT_SECONDS
from testbed.wire.message import Message
from tests.helpers.worlds import events_of, idle, make_world

ROUNDS = 3
DEVICES = ("lead", "b", "c")
MOMENTS = [
    *(
        {"event": name}
        for name in (
            "state",
            "step",
            "send",
            "receive",
            "cast",
            "begin",
            "compute",
            "log",
        )
    ),
    *({"begins": "forward", "batch": batch} for batch in range(ROUNDS)),
]
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


async def lead(device: Device) -> None:
    """Have each round's work done by ``b`` and checked by ``c``, again where no answer comes."""
    saved = device.saved("round")
    for number in range(0 if saved is None else saved["number"] + 1, ROUNDS):
        while not await answered(device, number):
            device.record("log", text=f"again {number}")
        device.record("step", step=number)
        await device.cast(["b", "c"], Message("news", padding=3000))
        await device.save("round", Message("round", {"number": number}))


async def answered(device: Device, number: int) -> bool:
    try:
        async with asyncio.timeout(2):
            async with asyncio.TaskGroup() as group:
                for batch in range(2):
                    group.create_task(
                        device.send(
                            "b",
                            Message("work", {"number": number}, padding=5000 * batch),
                        )
                    )
                group.create_task(
                    device.compute(lambda: None, Cost(1e4), Span("forward", number))
                )
            while (await device.receive()).fields.get("number") != number:
                pass
    except TimeoutError:
        return False
    return True


async def worker(device: Device) -> None:
    """Compute whatever comes, several at once, and pass it on: ``b`` to ``c``, ``c`` to the lead."""
    target = {"b": "c", "c": "lead"}[device.name]

    async def work(message: Message) -> None:
        await device.compute(
            lambda: None, Cost(2e4), Span("forward", message["number"])
        )
        device.record("log", text="done")
        await device.send(target, message)

    tasks = set()
    while not device.leaving:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                message = await device.receive()
                if message.kind == "work":
                    tasks.add(asyncio.create_task(work(message)))


def run(faults, access=None):
    made = make_world(
        {"lead": lead, "b": worker, "c": worker},
        faults=faults,
        access=access,
        time_limit=1000,
    )
    made.run()
    return made


def assert_sound(faults, logged, **options):
    """The run ends with every round, without any error, the same each time; who is off or paused does nothing."""
    logged.clear()
    made = run(faults, **options)
    assert not logged
    assert {event["step"] for event in events_of(made, "step")} == set(range(ROUNDS))
    assert made.events == run(faults, **options).events
    state = dict.fromkeys(DEVICES, "up")
    since = dict.fromkeys(DEVICES, -1.0)
    for event in made.events:
        if event.event == "fault" and event.fields["target"] in state:
            name, on = event.fields["target"], event.fields["phase"] == "undo"
            if event.fields["action"] in ("kill", "pause"):
                state[name], since[name] = (
                    "up" if on else event.fields["action"],
                    event.time,
                )
        elif event.device in state and event.event != "state":
            struck = (
                state[event.device] in ("kill", "pause")
                and event.time > since[event.device]
            )
            assert not struck, event
    counted = Counter(
        (event.device, event.time) for event in made.events if event.event == "step"
    )
    assert max(counted.values()) == 1


@pytest.mark.parametrize(
    "moment", MOMENTS, ids=lambda moment: "-".join(map(str, moment.values()))
)
def test_any_action_at_any_moment(moment, logged):
    for action, device in product(ACTIONS, DEVICES):
        fault = {
            **ACTIONS[action](device),
            "when": {"device": device, **moment},
            "for": "1s",
        }
        assert_sound([fault], logged)


drawn = st.fixed_dictionaries(
    {
        # Not "retire": a device that is to join again before it has left leaves for good.
        "action": st.sampled_from(sorted(set(ACTIONS) - {"retire"})),
        "victim": st.sampled_from(DEVICES),
        "when": st.one_of(
            st.tuples(st.sampled_from(DEVICES), st.sampled_from(MOMENTS)),
            st.floats(0, 0.2),
        ),
        "for": st.sampled_from(
            ["0s", "1ms", "20ms", "300ms", "1s", f"{BOOT_SECONDS}s", "5s"]
        ),
    }
)


@given(
    st.lists(drawn, min_size=1, max_size=5),
    st.sampled_from(
        [None, {"lead": {"uplink": 1e6}}, {"b": {"uplink": 1e6, "downlink": 5e5}}]
    ),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_actions_at_any_moments(logged, drawn, access):
    faults = []
    for each in drawn:
        when = each["when"]
        moment = (
            {"at": f"{when:.6f}s"}
            if isinstance(when, float)
            else {"when": {"device": when[0], **when[1]}}
        )
        faults.append(
            {**ACTIONS[each["action"]](each["victim"]), **moment, "for": each["for"]}
        )
    assert_sound(faults, logged, access=access)


def test_device_killed_while_it_receives_held_messages(logged):
    async def sender(device: Device) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(device.send("b", Message("m", {"number": number})))

    heard = []

    async def receiver(device: Device) -> None:
        while True:
            heard.append((device.now(), (await device.receive())["number"]))

    faults = [
        {"pause": "b", "at": "1ms", "for": "1s"},
        {"kill": "b", "when": {"device": "b", "event": "receive"}, "for": "0s"},
    ]
    made = make_world({"lead": sender, "b": receiver}, faults=faults)
    made.run()
    assert [number for _, number in heard] == [1, 2], (
        "the first was heard as it died; the others are sent again"
    )
    assert min(time for time, _ in heard) > 1 + BOOT_SECONDS
    assert not logged


def test_device_killed_during_a_pause_sends_after_its_restart():
    async def sender(device: Device) -> None:
        await device.sleep(0 if device.saved("sent") else 0.5)
        await device.save("sent", Message("sent"))
        await device.send("b", Message("m"))
        await device.sleep(5)

    faults = [{"pause": "lead", "at": "1s"}, {"kill": "lead", "at": "2s", "for": "1s"}]
    made = make_world({"lead": sender, "b": idle}, faults=faults, time_limit=100)
    made.run()
    assert len(events_of(made, "send", "lead")) == 2


def test_device_that_boots_can_be_paused():
    async def program(device: Device) -> None:
        await device.sleep(2)

    faults = [
        {"kill": "lead", "at": "1s", "for": "0s"},
        {"pause": "lead", "at": "2s", "for": "10s"},
    ]
    made = make_world({"lead": program}, faults=faults)
    made.run()
    assert [
        event["time"]
        for event in events_of(made, "state")
        if event["state"] == "started"
    ] == [0, 12]


def test_task_that_a_dead_device_starts_never_runs():
    ran = []

    async def late(device: Device) -> None:
        while True:
            ran.append(device.now())
            await device.sleep(1)

    async def victim(device: Device) -> None:
        try:
            await device.sleep(100)
        finally:
            asyncio.create_task(late(device))  # noqa: RUF006 - it must not run at all

    async def sleeper(device: Device) -> None:
        await device.sleep(10)

    make_world({"lead": sleeper, "b": victim}, faults=[{"kill": "b", "at": "1s"}]).run()
    assert ran == []


def test_sets_of_tasks_have_the_same_order_each_time():
    async def program(device: Device) -> None:
        tasks = [
            asyncio.create_task(device.sleep(1), name=str(number))
            for number in range(20)
        ]
        for done in (await asyncio.wait(tasks))[0]:
            device.record("log", text=done.get_name())

    def order():
        made = make_world({"lead": program})
        made.run()
        return [event["text"] for event in events_of(made, "log")]

    assert order() == order() == [str(number) for number in range(20)]


@pytest.fixture(scope="module")
def logged():
    """Return what asyncio logs; pytest's own fixture lasts for one example of hypothesis only."""
    gc.collect()  # of tests before these, whose loops ended with tasks in them
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(logging.Formatter().format(record))
    logging.getLogger("asyncio").addHandler(handler)
    yield records
    logging.getLogger("asyncio").removeHandler(handler)
