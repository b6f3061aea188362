"""A small world for tests: one program a device, a mesh of equal links, the first device leads."""

from collections.abc import Mapping
from typing import Any

from testbed.faults.parts import FaultPart
from testbed.faults.script import FaultScript, TraceScript
from testbed.hardware import DeviceSpec
from testbed.network.link import Link
from testbed.scenario.link_trace import parse
from testbed.simulation.faults import FaultExecution, TraceExecution
from testbed.simulation.world import World
from testbed.wire.framing import wire_bytes

LINK = Link(rate=8e6, delay=0.01)
"""A megabyte a second."""


class ClosingWorld(World):
    """Stops all programs at the end of its run, remembering what each waited for."""

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._waited = super().describe_waits()
            self.close()

    def describe_waits(self) -> str:
        return self._waited


def make_world(
    programs: Mapping[str, Any],
    link: Link = LINK,
    faults=(),
    trace=(),
    access: Mapping[str, Mapping[str, float]] | None = None,
    speed: float = 1e6,
    **options: Any,
) -> World:
    """Make a world and switch it on, with its faults and its trace scheduled; ``access`` limits some devices."""
    names = list(programs)
    links = {(a, b): link for a in names for b in names if a != b}
    specs = [
        DeviceSpec(name, speed, 1e9, **(access or {}).get(name, {})) for name in names
    ]
    made = ClosingWorld(
        specs,
        links,
        lambda device: programs[device.name](device),
        names[0],
        seed=1,
        **options,
    )
    TraceExecution(made, TraceScript([parse(line) for line in trace])).start()
    made.start()
    FaultExecution(
        made, FaultScript([FaultPart.model_validate(fault) for fault in faults])
    ).start()
    return made


def events_of(
    made: World, name: str, device: str | None = None
) -> list[dict[str, Any]]:
    """Return time and fields of the events of that name."""
    return [
        {"time": event.time, **event.fields}
        for event in made.events
        if event.event == name and device in (None, event.device)
    ]


def first_message_bytes(made: World, message: str) -> float:
    """Return the bytes on the wire of the first message of a kind."""
    return wire_bytes(
        next(
            event["bytes"]
            for event in events_of(made, "receive")
            if event["message"] == message
        )
    )


async def receive_forever(device: Any) -> None:
    """Take in messages for ever."""
    while True:
        await device.receive()
