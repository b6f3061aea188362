"""A small simulated world: one program per device, a mesh of equal links, and the first device as coordinator."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript, LinkTraceScript
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.scenario.link_trace import parse
from testbed.simulation.faults import FaultExecution, LinkTraceExecution
from testbed.simulation.world import World
from testbed.wire.framing import wire_bytes

LINK = Link(rate=8e6, delay=0.01)
"""8 Mbit/s, which is a megabyte per second."""


class ClosingWorld(World):
    """Closes itself after its run; `describe_waits` keeps the state from before."""

    def run(self) -> None:
        try:
            super().run()
        finally:
            # Closing cancels all programs, and with them their waits.
            self._waits = super().describe_waits()
            self.close()

    def describe_waits(self) -> str:
        return self._waits


def make_world(
    programs: Mapping[str, Any],
    link: Link = LINK,
    faults=(),
    trace=(),
    access: Mapping[str, Mapping[str, float]] | None = None,
    speed: float = 1e6,
    **options: Any,
) -> World:
    """Start a world with scheduled faults and a link trace; ``access`` limits some devices."""
    names = list(programs)
    links = dict.fromkeys(permutations(names, 2), link)
    specs = []
    for name in names:
        limits = (access or {}).get(name, {})
        specs.append(DeviceSpec(name, speed, 1e9, **limits))
    world = ClosingWorld(
        specs,
        links,
        lambda device: programs[device.name](device),
        names[0],
        seed=1,
        **options,
    )
    link_trace = LinkTraceScript([parse(line) for line in trace])
    script = FaultScript([FaultPart.model_validate(fault) for fault in faults])
    # Entries of the trace for time 0 apply before any program runs; faults need started devices.
    LinkTraceExecution(world, link_trace).start()
    world.start()
    FaultExecution(world, script).start()
    return world


def events_of(
    world: World, name: str, device: str | None = None
) -> list[dict[str, Any]]:
    """Return the time and the fields of each event with this name, of one device or of all."""
    return [
        {"time": event.time, **event.fields}
        for event in world.events
        if event.event == name and device in (None, event.device)
    ]


def first_message_bytes(world: World, message: str) -> float:
    """Return the wire bytes of the first message of a kind."""
    for event in events_of(world, "receive"):
        if event["message"] == message:
            return wire_bytes(event["bytes"])
    raise AssertionError(f"no message {message!r} was received")


async def receive_forever(device: Any) -> None:
    """Receive and ignore messages."""
    while True:
        await device.receive()
