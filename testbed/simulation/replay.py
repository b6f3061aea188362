"""A trace, replayed on a simulated world."""

from __future__ import annotations

from testbed.faults.replay import TraceScript
from testbed.simulation.world import World


class Replay:
    """Makes each change at the very instant that the trace says."""

    def __init__(self, world: World, script: TraceScript) -> None:
        self._world = world
        self._script = script

    def start(self) -> None:
        """Make the changes of the first instant, before any device is on, and schedule the rest."""
        self._change(None)

    def _change(self, _nothing: None) -> None:
        world = self._world
        for change in self._script.due(world.loop.now):
            world.record("trace", **change.fields())
            world.set_network(change.on_links(world.network))
            world.set_speeds(change.on_speeds(world.speeds))
        deadline = self._script.next_deadline()
        if deadline is not None:
            world.loop.at(deadline, self._change, None)
