"""Execution of faults and link traces on a simulated world, exactly at their scheduled times.

The scripts of `testbed.faults.script` know which operations follow at which time; this module applies the operations to
the world. Methods with the parameter ``_argument`` are entries of the event queue, which passes one argument to each.
"""

from __future__ import annotations

from testbed.faults.conditions import RecordedStep, apply_step
from testbed.faults.script import (
    Changes,
    FaultOperation,
    FaultScript,
    LinkTraceScript,
)
from testbed.simulation.world import World
from testbed.trace.events import Event


class LinkTraceExecution:
    """Executor of a scenario's link trace: changes links and speeds at the times of the trace."""

    def __init__(self, world: World, script: LinkTraceScript) -> None:
        self._world = world
        self._script = script

    def start(self) -> None:
        """Apply the changes at 0 s before any device starts, and schedule the others."""
        self._apply_due_changes(None)

    def _apply_due_changes(self, _argument: None) -> None:
        # One by one: on this clock each is exactly on time, and each has its own events.
        for change in self._script.pop_due(self._world.event_queue.now).changes:
            _record_and_apply(Changes([change]), self._world)
        deadline = self._script.next_deadline()
        if deadline is not None:
            self._world.event_queue.at(deadline, self._apply_due_changes, None)


class FaultExecution:
    """Executor of a scenario's faults: applies each at the given time, or at the triggering event."""

    def __init__(self, world: World, script: FaultScript) -> None:
        self._world = world
        self._script = script
        self._watched_devices = script.watched_devices
        """Devices whose events may trigger a fault."""

    def start(self) -> None:
        """Schedule all faults of known time and watch for the triggers of the others."""
        if self._watched_devices:
            self._world.recorder.observe(
                self._observe_event, self._script.watched_events
            )
        self._schedule_next()

    def _schedule_next(self) -> None:
        deadline = self._script.next_deadline()
        if deadline is not None:
            self._world.event_queue.at(deadline, self._apply_due_operations, None)

    def _apply_due_operations(self, _argument: None) -> None:
        for operation in self._script.pop_due(self._world.event_queue.now):
            self._apply_operation(operation)

    def _observe_event(self, event: Event) -> None:
        if event.device not in self._watched_devices:
            return
        operations = self._script.observe(
            event.time, event.device, event.event, event.fields
        )
        for operation in operations:
            # Applying an operation records events, which call this method again.
            self._watched_devices = self._script.watched_devices
            self._apply_operation(operation)

    def _apply_operation(self, operation: FaultOperation) -> None:
        _record_and_apply(operation, self._world)
        self._script.complete(operation, self._world.event_queue.now)
        self._world.end_without_coordinator(self._script.has_pending_start)
        self._schedule_next()


def _record_and_apply(step: RecordedStep, world: World) -> None:
    # The event of the fault comes before those of its consequences at the same instant.
    for event, fields in step.events():
        world.record(event, **fields)
    apply_step(step, world)
