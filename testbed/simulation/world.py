"""The devices and links of one simulated run.

A `World` has a `Host` for each device of the scenario and a `Channel` for each pair of devices that has exchanged a
message. A `SimulatedDevice` exists from a boot of its host to the next kill. The world is also the target of faults:
`kill`, `restart`, `pause`, `apply` and similar methods implement `testbed.faults.conditions.FaultTarget`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

from testbed.common.collector import rare_collection
from testbed.faults.conditions import DeviceState, StateDiff, SystemState
from testbed.hardware import DeviceSpec, Machine
from testbed.network.broadcast import broadcast_rate
from testbed.network.link import Cell, Link, Pair
from testbed.network.radio import Radio
from testbed.simulation.channel import Channel
from testbed.simulation.device import SimulatedDevice
from testbed.simulation.event_queue import OWNER, EmptySchedule, TimeLimit
from testbed.simulation.host import Guest, Host
from testbed.simulation.loop import VirtualLoop
from testbed.simulation.medium import Medium
from testbed.simulation.recorder import Recorder
from testbed.simulation.shared_channel import SharedChannel
from testbed.simulation.sharing import Shared, Sharing
from testbed.trace.events import TESTBED, Event, link_fields
from testbed.trace.outcome import without_coordinator

BOOT_SECONDS = 2.0
"""Seconds from the restart of a device to the start of its program: kernel or container, Python, torch."""
DEVICES_NAMED = 16
"""Maximum number of devices named in the report of a deadlock."""

Program = Callable[[SimulatedDevice], Coroutine[Any, Any, None]]


class CoordinatorGoneError(Exception):
    """Raised when the coordinator is off and no pending operation restarts the device."""


class ProgramError(Exception):
    """Raised with the cause when a program fails."""


class _SharedCell:
    """A radio cell: a medium for broadcasts, one at a time, and a shared rate for all other traffic."""

    def __init__(self, cell: Cell, sharing: Sharing) -> None:
        self.spec = cell
        self.rate = Shared(cell.rate)
        self.medium = Medium(lambda start, end: sharing.reserve(self.rate, start, end))


class World:
    """Hosts, the channels between them, and the event log::

        world = World(experiment.devices, experiment.links, program, coordinator="source")
        world.start()
        world.run()
        world.close()

    The parts of an experiment are separate arguments, so that a test or a benchmark can make a world without a
    scenario. ``program`` is called with each `SimulatedDevice` at its boot.
    """

    def __init__(
        self,
        devices: Iterable[DeviceSpec],
        links: Mapping[Pair, Link],
        program: Program,
        coordinator: str,
        *,
        cells: Iterable[Cell] = (),
        machines: Iterable[Machine] = (),
        radio: Radio | None = None,
        seed: int = 0,
        time_limit: float = float("inf"),
        recorder: Recorder | None = None,
    ) -> None:
        # The loop lacks the abstract methods that need sockets or threads.
        self.loop = VirtualLoop(time_limit)  # type: ignore[abstract]
        self.event_queue = self.loop.event_queue
        self.loop.set_task_factory(_create_owned_task)
        self.loop.set_exception_handler(self._handle_unawaited_error)
        specs = list(devices)
        self.hosts: dict[str, Host] = {}
        for number, spec in enumerate(specs):
            self.hosts[spec.name] = Host(spec.name, spec, number)
        self.current = SystemState.of(specs, links, radio)
        """Links and speeds in force; the present states of the devices are those of `states`."""
        self.recorder = recorder or Recorder()
        self.events = self.recorder.events
        self._program = program
        self._coordinator = coordinator
        self._seed = seed
        self._channels: dict[Pair, Channel] = {}
        """Channels used so far, by (source, destination)."""
        self.sharing = Sharing(self.event_queue)
        for machine in machines:
            cores = Shared(machine.cores)
            for name in machine.devices:
                self.hosts[name].cores = cores
        self._cells = [_SharedCell(cell, self.sharing) for cell in cells]
        self._uplinks: dict[str, Shared] = {}
        self._downlinks: dict[str, Shared] = {}
        for name, host in self.hosts.items():
            if host.spec.uplink:
                self._uplinks[name] = Shared(host.spec.uplink)
            if host.spec.downlink:
                self._downlinks[name] = Shared(host.spec.downlink)
        self._cast_media: dict[str, list[Medium]] = {}
        """Cached results of `cast_media`."""
        self._cast_rates: dict[str, float | None] = {}
        """Cached results of `cast_rate`, until a link changes."""
        self._end: asyncio.Future[None] = self.loop.create_future()
        """Done at the end of the run: when the coordinator's program returns, or with the error of a failed run."""
        _WORLDS.add(self)

    def record(self, event: str, **fields: Any) -> None:
        """Write an event of the testbed itself."""
        self.recorder.write(Event(self.event_queue.now, TESTBED, event, fields))

    def channel(self, source: str, target: str) -> Channel:
        """Return the channel between two devices. Raises ValueError without a link."""
        # Checked for each message, so the common case comes first.
        existing = self._channels.get((source, target))
        if existing is not None:
            return existing
        # Made on first use: most pairs of a large mesh never exchange a message.
        for pair in ((source, target), (target, source)):
            if pair not in self.current.links:
                raise ValueError(f"there is no link from {pair[0]} to {pair[1]}")
        forward = self._make_channel(source, target)
        backward = self._make_channel(target, source)
        Channel.connect(forward, backward)
        self._channels[source, target] = forward
        self._channels[target, source] = backward
        return forward

    def _make_channel(self, source: str, target: str) -> Channel:
        pair = (source, target)
        hosts = (self.hosts[source], self.hosts[target])
        link = self.current.link(pair)
        limits = (self._uplinks.get(source), self._downlinks.get(target))
        access_rates = [limit for limit in limits if limit is not None]
        cell_rate = None
        for candidate in self._cells:
            if candidate.spec.carries(pair):
                cell_rate = candidate.rate
                break
        if not access_rates and cell_rate is None:
            return Channel(self.event_queue, *hosts, link, self._seed)
        return SharedChannel(
            self.event_queue,
            *hosts,
            link,
            self._seed,
            self.sharing,
            access_rates,
            cell_rate,
        )

    def _cells_of(self, name: str) -> list[_SharedCell]:
        return [cell for cell in self._cells if name in cell.spec.devices]

    def cast_media(self, name: str) -> list[Medium]:
        """Return the media occupied by a device's broadcast: its cells' channels, or its own transmitter."""
        if name not in self._cast_media:
            media = [cell.medium for cell in self._cells_of(name)]
            self._cast_media[name] = media or [Medium()]
        return self._cast_media[name]

    def cast_rate(self, name: str) -> float | None:
        """Return the present rate of a device's broadcasts in bit/s; None if unlimited."""
        if name not in self._cast_rates:
            pairs = [pair for pair in self.current.links if pair[0] == name]
            links = [self.current.link(pair) for pair in pairs]
            cell_rates = [cell.spec.rate for cell in self._cells_of(name)]
            uplink = self.hosts[name].spec.uplink
            self._cast_rates[name] = broadcast_rate(links, uplink, *cell_rates)
        return self._cast_rates[name]

    def start(self) -> None:
        """Switch on every device."""
        for host in self.hosts.values():
            host.pending_boot = host.boots
            self._boot_device((host, host.boots))

    def run(self) -> None:
        """Run until the coordinator's program returns.

        Raises `ProgramError`, `CoordinatorGoneError`, `EmptySchedule` or `TimeLimit` if the run ends otherwise.
        """
        with rare_collection():
            self.loop.run_until_complete(self._end)

    def close(self) -> None:
        """Stop all running programs and the injection of faults."""
        self.recorder.observe(None)
        for host in self.hosts.values():
            device = host.device
            if device is not None:
                if device.running:
                    device.write("state", {"state": "stopped"})
                device.kill()
        # Cancelled tasks run their `finally` blocks, but no time passes for them.
        self.event_queue.limit = self.event_queue.now
        with suppress(EmptySchedule, TimeLimit):
            while True:
                # Ctrl-C ends one task with KeyboardInterrupt, which is raised again in each task that waits for it.
                with suppress(KeyboardInterrupt):
                    self.loop.run_forever()
        with suppress(EmptySchedule, TimeLimit):
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self.events.close()

    def kill(self, name: str) -> None:
        """Switch off a device: program, inbox and unsent messages are lost."""
        host = self.hosts[name]
        host.pending_boot = None
        host.paused = False
        host.deferred_calls.clear()
        device, host.device = host.device, None
        if device is not None:
            device.kill()
        for (source, target), channel in list(self._channels.items()):
            if source == name:
                channel.abandon()
            elif target == name:
                channel.refresh()

    def restart(self, name: str) -> None:
        """Switch on a device; its program starts from scratch after `BOOT_SECONDS`. No effect on a running device."""
        host = self.hosts[name]
        if host.device is None and host.pending_boot is None:
            host.boots += 1
            host.pending_boot = host.boots
            booted = self.event_queue.now + BOOT_SECONDS
            self.event_queue.at(booted, self._boot_device, (host, host.boots))

    def retire(self, name: str) -> None:
        """Ask a device to leave; the device stops when the program returns. No effect on a stopped device."""
        device = self.hosts[name].device
        if device is not None:
            device.leaving = True
            if not device.running:
                self.kill(name)

    def pause(self, name: str) -> None:
        """Suspend a device: program, processors and transmissions stop, and arrivals are deferred."""
        host = self.hosts[name]
        if host.state() != "up":
            return
        host.paused = True
        if host.device is not None:
            host.device.pause()
            self._refresh_from(name)

    def resume(self, name: str) -> None:
        """Resume a paused device; messages received meanwhile are available at once."""
        host = self.hosts[name]
        if not host.paused:
            return
        host.paused = False
        # An arrival may trigger a fault that pauses the host again, or kills it.
        while host.deferred_calls and not host.paused:
            action, argument = host.deferred_calls.popleft()
            action(argument)
        if host.device is not None and not host.paused:
            host.device.resume()
            self._refresh_from(name)

    def _refresh_from(self, name: str) -> None:
        for (source, _), channel in list(self._channels.items()):
            if source == name:
                channel.refresh()

    def states(self) -> dict[str, DeviceState]:
        """Return the state of every device."""
        return {name: host.state() for name, host in self.hosts.items()}

    def lock(self) -> AbstractContextManager[None]:
        """Return a context without effect, since a simulation has a single thread."""
        return nullcontext()

    def apply(self, state: SystemState, changed: StateDiff) -> None:
        """Apply and log changed links and speeds at once, including for ongoing transfers and work."""
        self.current = state
        self._cast_rates.clear()
        for (source, target), link in changed.links.items():
            self.record("link", **link_fields(source, target, link))
            # A channel that is opened later starts with the new properties.
            if (source, target) in self._channels:
                self._channels[source, target].refresh(link)
        for name, factor in changed.speeds.items():
            self.record("speed", target=name, factor=factor, speed=state.speed(name))
            host = self.hosts[name]
            previous_factor = host.factor
            host.factor = factor
            if host.device is not None:
                host.device.change_speed(factor / previous_factor)

    def describe_missing_coordinator(self) -> str | None:
        """Describe the end of the run if the coordinator is off, because all others wait for the coordinator."""
        if self.hosts[self._coordinator].state() != "down":
            return None
        return without_coordinator(self._coordinator)

    def end_without_coordinator(self, has_pending_start: Callable[[str], bool]) -> None:
        """End the run if the coordinator is off and ``has_pending_start`` finds no operation to restart the device."""
        reason = self.describe_missing_coordinator()
        if reason and not has_pending_start(self._coordinator) and not self._end.done():
            self._end.set_exception(CoordinatorGoneError(reason))

    def describe_waits(self) -> str:
        """Describe the awaited event of each device."""
        conditions = [f"{host.name} {host.condition()}" for host in self.hosts.values()]
        texts = conditions[:DEVICES_NAMED]
        if len(conditions) > DEVICES_NAMED:
            texts.append(f"and {len(conditions) - DEVICES_NAMED} more")
        return f"at {self.event_queue.now:.6g} s {'; '.join(texts)}"

    def _boot_device(self, boot: tuple[Host, int]) -> None:
        host, number = boot
        # The host was switched off meanwhile, so this boot is void.
        if host.pending_boot != number:
            return
        # A pause during the boot delays the rest of the boot.
        if host.paused:
            host.deferred_calls.append((self._boot_device, boot))
            return
        host.pending_boot = None
        device = host.device = SimulatedDevice(self, host)
        for (_, target), channel in list(self._channels.items()):
            if target == host.name:
                channel.refresh()
        device.record("state", state="up")
        self.loop.create_task(self._run_program(device)).add_done_callback(
            lambda task: self._program_ended(device, task)
        )

    async def _run_program(self, device: SimulatedDevice) -> None:
        # All tasks and timers that the program starts inherit the owner.
        OWNER.set(device)
        task = asyncio.current_task()
        assert task is not None
        device.tasks[task] = None
        if device.alive:
            device.record("state", state="started")
            await self._program(device)

    def _program_ended(self, device: SimulatedDevice, task: asyncio.Task[None]) -> None:
        device.running = False
        device.tasks.pop(task, None)
        if not device.alive:
            return
        # `exception` of a cancelled task would raise the cancellation instead of returning an error.
        cancellation = asyncio.CancelledError("the program cancelled itself")
        error = cancellation if task.cancelled() else task.exception()
        if error is not None:
            self._fail_run(device, error)
            return
        if device.name == self._coordinator and not self._end.done():
            self._end.set_result(None)
        device.record("state", state="finished")
        # A fault that waits for this event may have killed the device.
        if device.leaving and device.alive and device.name != self._coordinator:
            self.kill(device.name)

    def _fail_run(self, device: Guest, error: BaseException) -> None:
        # The first failure is the cause; others usually follow from it.
        if not self._end.done():
            failure = ProgramError(f"the program of {device.name} failed")
            failure.__cause__ = error
            self._end.set_exception(failure)
        device.write(
            "state", {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        )

    def _handle_unawaited_error(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        """Fail the run for an error in an unawaited task."""
        task, error = context.get("future"), context.get("exception")
        if isinstance(task, _OwnedTask) and task.owner.alive and error is not None:
            self._fail_run(task.owner, error)
        else:
            loop.default_exception_handler(context)


_WORLDS: WeakSet[World] = WeakSet()
"""Worlds in memory, for `drop_finished`."""


def drop_finished() -> None:
    """Free finished simulations, which are reference cycles of devices, tasks and events."""
    if _WORLDS:
        gc.collect()


class _OwnedTask(asyncio.Task[Any]):
    """A task with the device whose code started the task.

    The hash is the task's number on its device, not an address: `asyncio.TaskGroup` and `asyncio.wait` keep tasks in
    sets, whose order is therefore the same in each run. The device's own number avoids collisions between thousands of
    devices in asyncio's set of all tasks.
    """

    def __init__(
        self, owner: SimulatedDevice, program: Coroutine[Any, Any, Any], **options: Any
    ) -> None:
        self.owner = owner
        owner.started_tasks += 1
        self._number = owner.started_tasks + (owner.host.number << 16)
        super().__init__(program, **options)
        owner.tasks[self] = None
        self.add_done_callback(owner.forget)
        if not owner.alive:
            self.cancel()

    def __hash__(self) -> int:
        return self._number


def _create_owned_task(
    loop: VirtualLoop, program: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Create a task owned by the device whose code starts the task."""
    owner = OWNER.get()
    if isinstance(owner, SimulatedDevice):
        return _OwnedTask(owner, program, loop=loop, **options)
    return asyncio.Task(program, loop=loop, **options)
