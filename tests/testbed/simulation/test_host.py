"""Reported states of simulated devices, and their storage across restarts."""

from __future__ import annotations

import asyncio

from testbed.hardware import DeviceSpec
from testbed.simulation.host import Host
from testbed.wire.message import Message
from tests.helpers.worlds import make_world, receive_forever
from tests.testbed.simulation.observations import sleep_for


def test_device_is_down_before_boot_and_up_while_booting() -> None:
    host = Host("a", DeviceSpec("a", speed=1.0, memory=1.0), 0)
    assert (host.state(), host.condition()) == ("down", "is off")
    host.pending_boot = 1
    assert (host.state(), host.condition()) == ("up", "boots")


def test_reported_state_follows_faults() -> None:
    states, conditions = [], []

    async def watch_b(device):
        for _ in range(6):
            host = world.hosts["b"]
            states.append((device.now(), host.state()))
            conditions.append(host.condition())
            await device.sleep(1.0)

    # Paused from 0.5 to 1.5 s, killed at 2.5 s and booting from 3.5 s.
    faults = [
        {"pause": "b", "at": "500ms", "for": "1s"},
        {"kill": "b", "at": "2500ms", "for": "1s"},
    ]
    world = make_world({"a": watch_b, "b": receive_forever}, faults=faults)
    world.run()
    assert states == [
        (0.0, "up"),
        (1.0, "paused"),
        (2.0, "up"),
        (3.0, "down"),
        (4.0, "up"),
        (5.0, "up"),
    ]
    assert conditions[1:4] == ["is paused", "waits for a message", "is off"]


def test_saved_message_survives_restart() -> None:
    saved_steps = []

    async def load_and_save(device):
        saved = device.saved("state")
        saved_steps.append(None if saved is None else saved["step"])
        await device.save("state", Message("state", {"step": len(saved_steps)}))
        # Wait for ever.
        await asyncio.get_running_loop().create_future()

    world = make_world(
        {"a": sleep_for(10.0), "b": load_and_save},
        faults=[{"kill": "b", "at": "1s", "for": "1s"}],
    )
    world.run()
    assert saved_steps == [None, 1]
    assert world.hosts["b"].boots == 1, "the first boot does not count"
