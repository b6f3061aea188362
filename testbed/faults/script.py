"""The schedule of faults and link traces, shared by both runtimes. Pure.

The runtime waits for `FaultScript.next_deadline`, takes the due operations with `pop_due`, passes every event to
`observe`, applies each `FaultOperation` and reports it `done`. Times relative to another fault (``after``, ``for``)
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
        """Whether the operation only changes the state of a device."""
        return self.action.switches

    def apply(self, now: SystemState) -> SystemState:
        """Return the state after the operation. Raises ValueError for a handle in use."""
        change = self.action.apply if self.phase == "strike" else self.action.undo
        return change(now, self.handle)

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
    """The faults of a scenario in the order of the file, and their progress."""

    def __init__(self, faults: Sequence[FaultPart] = ()) -> None:
        self._faults = [(part, part.action) for part in faults]
        self._index = {_handle_of(index): index for index in range(len(faults))}
        """Place in the file of each fault, by its handle."""
        self._struck: set[int] = set()
        """Places of the faults that have struck at least once."""
        self._deadlines: list[tuple[float, int, bool, FaultOperation]] = []
        """Heap of (time, place in the file, whether it is a reversal, operation)."""
        self._under_way: list[FaultOperation] = []
        """Operations handed out by `pop_due` or `observe`, and not yet reported `done`."""
        self._triggers: dict[int, TriggerPart] = {}
        """Triggers that have not fired, by the places of their faults."""
        self._turns: dict[int, Iterator[tuple[FaultPhase, float]]] = {}
        """Remaining turns of started repeating actions."""
        for index, part in enumerate(faults):
            if part.when is not None:
                self._triggers[index] = part.when
            elif part.at is not None:
                self._schedule_operation(index, "strike", part.at)

    def next_deadline(self) -> float | None:
        """Return the time of the next known operation; None without one."""
        return self._deadlines[0][0] if self._deadlines else None

    def pop_due(self, now: float) -> list[FaultOperation]:
        """Remove and return due operations, by intended time and then by the order of the file."""
        operations = []
        while self._deadlines and self._deadlines[0][0] <= now:
            operations.append(heapq.heappop(self._deadlines)[-1])
        self._under_way += operations
        return operations

    @property
    def watched(self) -> frozenset[str]:
        """Devices with pending triggers; `observe` ignores all others."""
        return frozenset(trigger.device for trigger in self._triggers.values())

    @property
    def events(self) -> frozenset[str]:
        """Names of events with pending triggers."""
        return frozenset(trigger.recorded for trigger in self._triggers.values())

    def observe(
        self, time: float, device: str, event: str, fields: Mapping[str, Any]
    ) -> list[FaultOperation]:
        """Return the operations triggered by an event. Each trigger fires once."""
        # Most runs have no triggers, and each event of a run comes here.
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
        """Return whether a pending or running operation starts a stopped device."""
        coming = [*self._under_way, *(deadline[-1] for deadline in self._deadlines)]
        for index, (part, _) in enumerate(self._faults):
            if index not in self._struck:
                # Only the effect matters here, not the time.
                coming.append(self._make_operation(index, "strike", math.inf))
                if part.for_ is not None:
                    coming.append(self._make_operation(index, "undo", math.inf))
        # Asking the operations themselves keeps this true of actions that packages bring.
        down = SystemState({device: "down"}, {}, {})
        for operation in coming:
            if not operation.switches or operation.action.target != device:
                continue
            if operation.apply(down).devices[device] != "down":
                return True
        return False

    def done(self, operation: FaultOperation, actual: float) -> None:
        """Mark an operation as effective and schedule all dependent ones."""
        self._under_way.remove(operation)
        index = self._index[operation.handle]
        part, action = self._faults[index]
        # A repeating action strikes again and again; `for` and `after` count from its first strike.
        first = operation.phase == "strike" and index not in self._struck
        if action.turns(0.0, 0.0) is not None:
            self._schedule_turn(index, operation.phase, actual)
        elif first and part.for_ is not None:
            self._schedule_operation(index, "undo", actual + part.for_)
        if not first:
            return
        self._struck.add(index)
        self._end_turns(action)
        following = index + 1
        if following < len(self._faults):
            wait = self._faults[following][0].after
            if wait is not None:
                self._schedule_operation(following, "strike", actual + wait)

    def _make_operation(
        self, index: int, phase: FaultPhase, when: float
    ) -> FaultOperation:
        return FaultOperation(self._faults[index][1], _handle_of(index), phase, when)

    def _schedule_operation(self, index: int, phase: FaultPhase, when: float) -> None:
        operation = self._make_operation(index, phase, when)
        # At one instant the order of the file holds, and a fault strikes before it is undone.
        heapq.heappush(self._deadlines, (when, index, phase == "undo", operation))

    def _end_turns(self, action: FaultAction[Any]) -> None:
        """Cancel the remaining turns of repeating actions undone by this action."""
        ended = set()
        for index in self._turns:
            broken = self._faults[index][1]
            if action.mends(type(broken), broken.target):
                ended.add(index)
        if ended:
            self._turns |= dict.fromkeys(ended, iter(()))
            self._deadlines = [each for each in self._deadlines if each[1] not in ended]
            heapq.heapify(self._deadlines)

    def _schedule_turn(self, index: int, phase: FaultPhase, actual: float) -> None:
        """Schedule the next turn of a repeating action."""
        if index not in self._turns:
            part, action = self._faults[index]
            ends = math.inf if part.for_ is None else actual + part.for_
            turns = action.turns(actual, ends)
            assert turns is not None
            self._turns[index] = turns
            # The first turn is the strike that has just been done.
            next(turns, None)
        following = next(self._turns[index], None)
        if following is None and phase == "strike":
            # An action that struck while another one ended it is undone at once.
            following = ("undo", actual)
        if following is not None:
            self._schedule_operation(index, *following)


def _handle_of(index: int) -> str:
    return f"{SCRIPTED}{index}"


@dataclass(frozen=True)
class Change:
    """One entry of a trace: a new value of a link property or of a device's speed."""

    time: float
    """Seconds since the start of the workload."""
    what: str
    """Target as in the trace: ``link a->b rate``, ``device a speed``."""
    value: str
    pairs: tuple[Pair, ...] = ()
    """Changed links, one for each direction; empty for a change of speed."""
    link: LinkPart | None = None
    """Properties that override those of the links."""
    speed: ThrottlePart | None = None
    """The device and its new speed, or slowdown relative to full speed."""

    def apply(self, now: SystemState) -> SystemState:
        """Return the state after the change."""
        if self.link is not None:
            links = {}
            for pair in self.pairs:
                is_from_first = now.is_from_first(pair)
                links[pair] = overlay(now.own_link(pair), self.link, is_from_first)
            now = now.with_links(links)
        if self.speed is not None:
            device = self.speed.device
            now = now.set_speed(device, self.speed.slowed(1.0, now.speeds[device]))
        return now


@dataclass(frozen=True)
class Changes:
    """Simultaneous changes, applied as one step."""

    changes: Sequence[Change]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        """Return the targets as text."""
        return f"the trace's '{', '.join(change.what for change in self.changes)}'"

    @property
    def switches(self) -> bool:
        """Whether the step only changes the state of a device: always false."""
        return False

    def apply(self, now: SystemState) -> SystemState:
        """Return the state after all changes."""
        for change in self.changes:
            now = change.apply(now)
        return now

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
    """The changes of a trace in the order of time, and their progress."""

    def __init__(self, changes: Sequence[Change] = ()) -> None:
        self._changes = changes
        self._next = 0
        """Index of the first change that is not yet due."""

    def next_deadline(self) -> float | None:
        """Return the instant of the next change; None after the last one."""
        if self._next == len(self._changes):
            return None
        return self._changes[self._next].time

    def pop_due(self, now: float) -> Changes:
        """Remove and return due changes in the order of the trace."""
        first = self._next
        while self._next < len(self._changes) and self._changes[self._next].time <= now:
            self._next += 1
        return Changes(self._changes[first : self._next])


def traced_links(
    links: Mapping[Pair, Link], changes: Iterable[Change], first: str
) -> Iterator[tuple[int, Pair, Link]]:
    """Yield (index, pair, link) after each change; ``first`` is the first device of the scenario."""
    now: dict[Pair, Link] = {}
    for index, change in enumerate(changes):
        for pair in change.pairs:
            if pair in links and change.link is not None:
                before = now.get(pair) or links[pair]
                now[pair] = overlay(before, change.link, is_from_first=pair[0] == first)
                yield index, pair, now[pair]
