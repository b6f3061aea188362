"""Strikes of a `FaultScript` on a simulated world."""

from __future__ import annotations

from collections.abc import Callable

from testbed.faults.script import FaultScript, Strike
from testbed.simulation.world import World
from testbed.trace.events import Event


class FaultExecution:
    """Does what the script says, at the very instant that it says it."""

    def __init__(self, world: World, script: FaultScript) -> None:
        self._world = world
        self._script = script
        self._watched = script.watched

    def start(self) -> None:
        """Schedule what is known already, and watch for what triggers the rest."""
        if self._watched:
            self._world.watch = self._observe
        self._schedule()

    def _schedule(self) -> None:
        deadline = self._script.next_deadline()
        if deadline is not None:
            self._world.loop.at(deadline, self._strike_due, None)

    def _strike_due(self, _nothing: None) -> None:
        for strike in self._script.due(self._world.loop.now):
            self._strike(strike)

    def _observe(self, event: Event) -> None:
        if event.device not in self._watched:
            return
        for strike in self._script.observe(event.time, event.device, event.event, event.fields):
            self._watched = self._script.watched
            self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        self._world.record("fault", **strike.fields())
        self._operate(strike)
        self._script.done(strike, self._world.loop.now)
        self._schedule()

    def _operate(self, strike: Strike) -> None:
        world, part = self._world, strike.part
        on_device: dict[str, Callable[[str], None]] = {
            "kill": world.kill,
            "restart": world.restart,
            "pause": world.pause,
            "resume": world.resume,
        }
        if strike.operation in on_device:
            on_device[strike.operation](str(getattr(part, part.action)))
        elif strike.operation == "partition" and part.partition is not None:
            world.set_network(world.network.partition(part.partition, strike.handle))
        elif strike.operation == "degrade" and part.degrade is not None:
            world.set_network(world.network.degrade(part.degrade, strike.handle))
        elif strike.operation == "flap" and part.flap is not None:
            world.set_network(world.network.cut(part.flap, strike.handle))
        elif strike.operation == "heal":
            world.set_network(world.network.heal())
        elif strike.operation == "throttle" and part.throttle is not None:
            world.set_speeds(world.speeds.throttle(part.throttle, strike.handle))
        elif strike.operation == "unthrottle" and part.unthrottle is not None:
            world.set_speeds(world.speeds.unthrottle(part.unthrottle))
        elif part.throttle is not None:
            world.set_speeds(world.speeds.undo(strike.handle))
        else:
            world.set_network(world.network.undo(strike.handle))
