"""The schedules of a scenario's faults and link trace, shared by both runtimes. They neither wait nor apply anything.

A runtime waits until `FaultScript.next_deadline`, takes the due operations with `pop_due`, and passes the events of the
run to `observe`, which returns the operations that they trigger. The runtime applies each `FaultOperation` and then
calls `complete`, which schedules the operations that depend on it: times relative to another fault (``after``, ``for``)
count from the instant at which that fault took effect. The changes of a `LinkTraceScript` all count from the start of
the workload, so a late change does not delay the next one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.faults.conditions import FaultAction, FaultPhase, SystemState
from testbed.faults.device_actions import ThrottlePart
from testbed.faults.parts import FaultPart, TriggerPart
from testbed.network.link import Link, Pair
from testbed.network.parts import LinkPart, overlay

SCRIPTED = "fault-"
"""Prefix of the handles of a scenario's faults."""


@dataclass(frozen=True)
class FaultOperation:
    """An action to apply or to undo."""

    action: FaultAction[Any]
    handle: str
    """Unique name of the action, used to undo it."""
    phase: FaultPhase = "strike"
    intended: float | None = None
    """Seconds since the start of the workload; None for unplanned operations."""

    def __str__(self) -> str:
        """Return the operation as text."""
        undo = "" if self.phase == "strike" else "undo "
        return f"the fault '{undo}{self.action.name} {self.action.target}'"

    @property
    def switches(self) -> bool:
        """Whether the operation only changes the state of a device, as in `FaultAction.switches`."""
        return self.action.switches

    def apply(self, state: SystemState) -> SystemState:
        """Return the state after the operation. Raises ValueError for a handle in use."""
        if self.phase == "strike":
            return self.action.apply(state, self.handle)
        return self.action.undo(state, self.handle)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the ``fault`` event of the operation."""
        fields: dict[str, Any] = {
            "action": self.action.name,
            "target": self.action.target,
            "phase": self.phase,
        }
        if self.intended is not None:
            fields["intended"] = self.intended
        return [("fault", fields)]


def _matches_event(trigger: TriggerPart, event: str, fields: Mapping[str, Any]) -> bool:
    if event != trigger.recorded:
        return False
    if trigger.begins is not None and fields.get("span") != trigger.begins:
        return False
    if trigger.batch is not None and trigger.batch != _batch_of_event(fields):
        return False
    return trigger.micro is None or trigger.micro == fields.get("micro")


def _batch_of_event(fields: Mapping[str, Any]) -> Any:
    """Return the value matched by ``batch``: the batch, else the training step or the request."""
    for key in ("batch", "step", "request"):
        if key in fields:
            return fields[key]
    return None


class FaultScript:
    """The faults of a scenario and their progress; an index is the position of a fault in the file."""

    def __init__(self, faults: Sequence[FaultPart] = ()) -> None:
        self._faults = [(part, part.action) for part in faults]
        self._index_of_handle = {
            _handle_of(index): index for index in range(len(faults))
        }
        self._struck: set[int] = set()
        """Indices of the faults that have struck at least once."""
        self._deadlines: list[tuple[float, int, bool, FaultOperation]] = []
        """Heap of (time, index, whether the operation is a reversal, operation)."""
        self._under_way: list[FaultOperation] = []
        """Operations returned by `pop_due` or `observe`, and not yet passed to `complete`."""
        self._triggers: dict[int, TriggerPart] = {}
        """Triggers that have not fired, by index."""
        self._turns: dict[int, Iterator[tuple[FaultPhase, float]]] = {}
        """Remaining turns, by index, of repeating actions that have struck; see `FaultAction.turns`."""
        for index, part in enumerate(faults):
            if part.when is not None:
                self._triggers[index] = part.when
            elif part.at is not None:
                self._schedule_operation(index, "strike", part.at)

    def next_deadline(self) -> float | None:
        """Return the time of the next scheduled operation in seconds; None without one."""
        return self._deadlines[0][0] if self._deadlines else None

    def pop_due(self, now: float) -> list[FaultOperation]:
        """Remove and return all operations up to ``now``, by intended time and then by the order of the file."""
        operations = []
        while self._deadlines and self._deadlines[0][0] <= now:
            operations.append(heapq.heappop(self._deadlines)[-1])
        self._under_way += operations
        return operations

    @property
    def watched_devices(self) -> frozenset[str]:
        """Devices whose events can fire a trigger; `observe` ignores all others."""
        return frozenset(trigger.device for trigger in self._triggers.values())

    @property
    def watched_events(self) -> frozenset[str]:
        """Names of the events watched by triggers."""
        return frozenset(trigger.recorded for trigger in self._triggers.values())

    def observe(
        self, time: float, device: str, event: str, fields: Mapping[str, Any]
    ) -> list[FaultOperation]:
        """Return the operations triggered by an event. Each trigger fires once."""
        # Most runs have no triggers, and a run has millions of events.
        if not self._triggers:
            return []
        fired = []
        for index, trigger in self._triggers.items():
            if trigger.device == device and _matches_event(trigger, event, fields):
                fired.append(index)
        for index in fired:
            del self._triggers[index]
        operations = [self._make_operation(index, "strike", time) for index in fired]
        self._under_way += operations
        return operations

    def has_pending_start(self, device: str) -> bool:
        """Return whether an incomplete operation will start a stopped device."""
        pending = [*self._under_way, *(deadline[-1] for deadline in self._deadlines)]
        for index, (part, _) in enumerate(self._faults):
            if index not in self._struck:
                # Only the effect matters here, not the time.
                pending.append(self._make_operation(index, "strike", math.inf))
                if part.for_ is not None:
                    pending.append(self._make_operation(index, "undo", math.inf))
        # The names of actions do not suffice, because packages can register further actions that start devices.
        down = SystemState({device: "down"}, {}, {})
        for operation in pending:
            if not operation.switches or operation.action.target != device:
                continue
            if operation.apply(down).devices[device] != "down":
                return True
        return False

    def complete(self, operation: FaultOperation, actual: float) -> None:
        """Record that an operation took effect at ``actual`` seconds, and schedule all dependent operations."""
        self._under_way.remove(operation)
        index = self._index_of_handle[operation.handle]
        part, action = self._faults[index]
        # A repeating action strikes several times; `for` and `after` count from its first strike.
        is_first_strike = operation.phase == "strike" and index not in self._struck
        if action.turns(0.0, 0.0) is not None:
            self._schedule_turn(index, operation.phase, actual)
        elif is_first_strike and part.for_ is not None:
            self._schedule_operation(index, "undo", actual + part.for_)
        if not is_first_strike:
            return
        self._struck.add(index)
        self._end_turns(action)
        next_index = index + 1
        if next_index < len(self._faults):
            wait = self._faults[next_index][0].after
            if wait is not None:
                self._schedule_operation(next_index, "strike", actual + wait)

    def _make_operation(
        self, index: int, phase: FaultPhase, intended: float
    ) -> FaultOperation:
        action = self._faults[index][1]
        return FaultOperation(action, _handle_of(index), phase, intended)

    def _schedule_operation(
        self, index: int, phase: FaultPhase, intended: float
    ) -> None:
        operation = self._make_operation(index, phase, intended)
        # Simultaneous operations are in the order of the file, and a fault strikes before its reversal.
        heapq.heappush(self._deadlines, (intended, index, phase == "undo", operation))

    def _end_turns(self, repair: FaultAction[Any]) -> None:
        """Cancel the remaining turns of all repeating actions undone by ``repair``."""
        ended = set()
        for index in self._turns:
            repeating = self._faults[index][1]
            if repair.mends(type(repeating), repeating.target):
                ended.add(index)
        if ended:
            self._turns |= dict.fromkeys(ended, iter(()))
            self._deadlines = [each for each in self._deadlines if each[1] not in ended]
            heapq.heapify(self._deadlines)

    def _schedule_turn(self, index: int, phase: FaultPhase, actual: float) -> None:
        """Schedule the next turn of a repeating action, whose latest turn took effect at ``actual`` seconds."""
        if index not in self._turns:
            part, action = self._faults[index]
            end = math.inf if part.for_ is None else actual + part.for_
            turns = action.turns(actual, end)
            assert turns is not None, "`complete` has checked that the action repeats"
            self._turns[index] = turns
            # The first turn is the strike that is already complete.
            next(turns, None)
        next_turn = next(self._turns[index], None)
        if next_turn is None and phase == "strike":
            # A repair ended the turns during this strike, which must not last.
            next_turn = ("undo", actual)
        if next_turn is not None:
            self._schedule_operation(index, *next_turn)


def _handle_of(index: int) -> str:
    return f"{SCRIPTED}{index}"


@dataclass(frozen=True)
class Change:
    """One line of a link trace: a new value of a link property or of a device's speed."""

    time: float
    """Seconds since the start of the workload."""
    what: str
    """Changed property as written in the link trace: ``link a->b rate``, ``device a speed``."""
    value: str
    """New value as written in the link trace, such as ``10mbit``."""
    pairs: tuple[Pair, ...] = ()
    """Changed links, one for each direction; empty for a change of speed."""
    link: LinkPart | None = None
    """The property and its new value, which override those of the links; None for a change of speed."""
    speed: ThrottlePart | None = None
    """The device and its new speed, or slowdown relative to full speed; None for a change of links."""

    def apply(self, state: SystemState) -> SystemState:
        """Return the state after the change."""
        if self.link is not None:
            links = {}
            for pair in self.pairs:
                is_from_first = state.is_from_first(pair)
                links[pair] = overlay(state.own_link(pair), self.link, is_from_first)
            state = state.with_links(links)
        if self.speed is not None:
            device = self.speed.device
            state = state.set_speed(
                device, self.speed.slowed(1.0, state.speeds[device])
            )
        return state


@dataclass(frozen=True)
class Changes:
    """Simultaneous changes, applied as one step."""

    changes: Sequence[Change]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        """Return the targets as text."""
        targets = ", ".join(change.what for change in self.changes)
        return f"the trace's '{targets}'"

    @property
    def switches(self) -> bool:
        """Whether the step only changes the state of a device: always false."""
        return False

    def apply(self, state: SystemState) -> SystemState:
        """Return the state after all changes."""
        for change in self.changes:
            state = change.apply(state)
        return state

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return a ``trace`` event for each change."""
        events = []
        for change in self.changes:
            fields = {
                "what": change.what,
                "value": change.value,
                "intended": change.time,
            }
            events.append(("trace", fields))
        return events


class LinkTraceScript:
    """The changes of a link trace in the order of time, and their progress."""

    def __init__(self, changes: Sequence[Change] = ()) -> None:
        self._changes = changes
        self._next = 0
        """Index of the first change that is not yet due."""

    def next_deadline(self) -> float | None:
        """Return the time of the next change in seconds; None after the last one."""
        if self._next == len(self._changes):
            return None
        return self._changes[self._next].time

    def pop_due(self, now: float) -> Changes:
        """Remove and return all changes up to ``now``, in the order of the link trace."""
        first = self._next
        while self._next < len(self._changes) and self._changes[self._next].time <= now:
            self._next += 1
        return Changes(self._changes[first : self._next])


def traced_links(
    links: Mapping[Pair, Link], changes: Iterable[Change], first_device: str
) -> Iterator[tuple[int, Pair, Link]]:
    """Yield the index of each change of a link, the pair of devices, and the link after the change.

    ``links`` are those of the scenario, and ``first_device`` is its first device.
    """
    changed: dict[Pair, Link] = {}
    for index, change in enumerate(changes):
        for pair in change.pairs:
            if pair in links and change.link is not None:
                before = changed.get(pair) or links[pair]
                is_from_first = pair[0] == first_device
                changed[pair] = overlay(before, change.link, is_from_first)
                yield index, pair, changed[pair]
