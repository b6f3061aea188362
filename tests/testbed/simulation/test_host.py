"""What a machine is said to be doing."""

from __future__ import annotations

import asyncio

from testbed.hardware import DeviceSpec
from testbed.simulation.host import Host
from tests.helpers.worlds import idle, make_world


def test_a_machine_is_off_until_it_boots_and_is_on_while_it_does() -> None:
    host = Host("a", DeviceSpec("a", 1.0, 1.0), 0)
    assert (host.state(), host.condition()) == ("down", "is off")
    host.booting = 1
    assert (host.state(), host.condition()) == ("up", "boots")


def test_states_follow_the_faults_that_strike() -> None:
    seen = []

    async def watch(device):
        for _ in range(6):
            host = made.hosts["b"]
            seen.append((device.now(), host.state(), host.condition()))
            await device.sleep(1.0)

    faults = [
        {"pause": "b", "at": "500ms", "for": "1s"},
        {"kill": "b", "at": "2500ms", "for": "1s"},
    ]
    made = make_world({"a": watch, "b": idle}, faults=faults)
    made.run()
    assert [(time, state) for time, state, _ in seen] == [
        (0.0, "up"),
        (1.0, "paused"),
        (2.0, "up"),
        (3.0, "down"),
        (4.0, "up"),
        (5.0, "up"),
    ]
    assert [text for *_, text in seen][1:4] == [
        "is paused",
        "waits for a message",
        "is off",
    ]


def test_saved_messages_survive_a_restart() -> None:
    from testbed.wire.message import Message

    found = []

    async def saver(device):
        kept = device.saved("state")
        found.append(None if kept is None else kept["step"])
        await device.save("state", Message("state", {"step": len(found)}))
        await asyncio.get_running_loop().create_future()

    async def lead(device):
        await device.sleep(10.0)

    made = make_world(
        {"a": lead, "b": saver}, faults=[{"kill": "b", "at": "1s", "for": "1s"}]
    )
    made.run()
    assert found == [None, 1]
    assert made.hosts["b"].boots == 1, "beside the first"
