"""Programs and event fields shared by the tests of the simulator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from testbed.device import Device
from testbed.simulation.world import World
from testbed.wire.message import Message
from tests.helpers.worlds import LINK, events_of, first_message_bytes

Program = Callable[[Device], Awaitable[None]]


def values_of(
    world: World, event_name: str, *keys: str, device: str | None = None
) -> list[Any]:
    """Return fields of all events of one name: a value per event for one key, a tuple for several keys."""
    values = []
    for event in events_of(world, event_name, device):
        fields = tuple(event[key] for key in keys)
        values.append(fields if len(keys) > 1 else fields[0])
    return values


def times_of(world: World, event_name: str, device: str | None = None) -> list[float]:
    """Return the times of all events of one name."""
    return values_of(world, event_name, "time", device=device)


def transmission_time(world: World, message: str, rate: float = LINK.rate) -> float:
    """Return the seconds for the first message of a kind at a rate in bit/s."""
    return first_message_bytes(world, message) * 8 / rate


def sleep_for(seconds: float) -> Program:
    """Make a program to wait and return, which ends the run on the coordinator."""

    async def program(device: Device) -> None:
        await device.sleep(seconds)

    return program


def send_one(
    peer: str, kind: str = "m", padding: int = 0, start: float = 0.0
) -> Program:
    """Make a program to send one message and wait for the acknowledgement."""

    async def program(device: Device) -> None:
        if start:
            await device.sleep(start)
        await device.send(peer, Message(kind, padding=padding))

    return program
