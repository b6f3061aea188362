"""The devices and links of one simulated run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.seeds import derive
from testbed.simulation.channel import Channel
from testbed.simulation.device import Host, SimulatedDevice
from testbed.simulation.loop import OWNER, Stillness, TimeLimit, VirtualLoop
from testbed.trace.events import Event

DEVICES_TOLD = 16
"""Devices named in the report of a deadlock."""

Program = Callable[[SimulatedDevice], Coroutine[Any, Any, None]]


class ProgramError(Exception):
    """A program raised; the cause is what it raised."""

    def __init__(self, device: str) -> None:
        super().__init__(f"the program of {device} failed")
        self.device = device


class World:
    """Hosts, the channels between them, and the log of what happens."""

    def __init__(
        self,
        devices: Iterable[DeviceSpec],
        links: Mapping[Pair, Link],
        seed: int,
        time_limit: float = float("inf"),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.loop = VirtualLoop(time_limit)
        self.loop.set_task_factory(_own)  # type: ignore[arg-type]  # typeshed knows no options
        self.hosts = {spec.name: Host(spec.name, spec) for spec in devices}
        self.events: list[Event] = []
        self._links = links
        self._seed = seed
        self._on_event = on_event
        self._channels: dict[Pair, Channel] = {}
        self._end: asyncio.Future[None] = self.loop.create_future()

    def write(self, event: Event) -> None:
        """Append to the log."""
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def channel(self, source: str, target: str) -> Channel:
        """Return the way between two devices; raise ValueError where there is no link."""
        known = self._channels.get((source, target))
        if known is not None:
            return known
        for pair in ((source, target), (target, source)):
            if pair not in self._links:
                raise ValueError(f"there is no link from {pair[0]} to {pair[1]}")
        there, back = (
            Channel(self.loop, self.hosts[a], self.hosts[b], self._links[a, b], derive(self._seed, "link", a, b))
            for a, b in ((source, target), (target, source))
        )
        there.back, back.back = back, there
        self._channels[source, target], self._channels[target, source] = there, back
        return there

    def boot(self, name: str, program: Program, lead: bool) -> None:
        """Start a device and its program."""
        host = self.hosts[name]
        device = host.device = SimulatedDevice(self, host)
        device.record("state", state="up")

        async def run() -> None:
            OWNER.set(device)
            device.tasks[_current()] = None
            device.record("state", state="started")
            await program(device)

        def over(task: asyncio.Task[None]) -> None:
            if task.cancelled() or not device.alive:
                return
            error = task.exception()
            if error is not None:
                device.record("state", state="failed", error=f"{type(error).__name__}: {error}")
                failure = ProgramError(name)
                failure.__cause__ = error
                if not self._end.done():
                    self._end.set_exception(failure)
                return
            device.record("state", state="finished")
            if lead and not self._end.done():
                self._end.set_result(None)

        self.loop.create_task(run()).add_done_callback(over)

    def run(self) -> None:
        """Run until the lead's program returns; raise `ProgramError`, `Stillness` or `TimeLimit` otherwise."""
        self.loop.run_until_complete(self._end)

    def why_still(self) -> str:
        """Say what each device waits for."""
        told = [f"{name} {host.device.waits_for() if host.device else 'is off'}" for name, host in self.hosts.items()]
        rest = f"; and {len(told) - DEVICES_TOLD} more" if len(told) > DEVICES_TOLD else ""
        return f"at {self.loop.time():.6g} s " + "; ".join(told[:DEVICES_TOLD]) + rest

    def close(self) -> None:
        """Cancel what still runs."""
        for host in self.hosts.values():
            if host.device is not None:
                host.device.alive = False
                for task in list(host.device.tasks):
                    task.cancel()
        self.loop.limit = self.loop.time()
        try:
            self.loop.run_forever()
        except (Stillness, TimeLimit):
            self.loop.close()


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _own(loop: asyncio.AbstractEventLoop, program: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """Make a task, and note it with the device whose code starts it."""
    task: asyncio.Task[Any] = asyncio.Task(program, loop=loop, **options)
    owner = OWNER.get()
    if isinstance(owner, SimulatedDevice):
        owner.tasks[task] = None
        task.add_done_callback(lambda done: owner.tasks.pop(done, None))
    return task
