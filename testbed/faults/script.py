"""When which fault strikes and is undone: a pure state machine that either runtime executes.

The runtime asks `FaultScript.next_deadline`, takes what is `due`, shows it every event (`observe`), does what each
`Strike` says and reports it `done`. Whatever counts from another fault (``after``, ``for``) counts from the
instant at which that one really took effect.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from testbed.faults.parts import FaultPart, FlapPart, TriggerPart

Phase = Literal["strike", "undo"]
UNDOING = {"kill": "restart", "pause": "resume"}
"""What takes back a fault of a device; partitions, degradations, flaps and throttles are undone by their handle."""


def target(part: FaultPart) -> str:
    """Say what a fault strikes: a device, the groups of a partition, a link, or all."""
    if part.partition is not None:
        return " | ".join(",".join(group) for group in part.partition)
    if (links := part.degrade or part.flap) is not None:
        return links.target()
    return part.throttle.device if part.throttle is not None else str(getattr(part, part.action))


@dataclass(frozen=True)
class Strike:
    """One thing for the runtime to do now."""

    index: int
    """Position of the fault in the script."""
    part: FaultPart
    phase: Phase
    intended: float
    """Seconds since the workload started."""

    @property
    def handle(self) -> str:
        """Name of the fault, by which its partition, degradation, outage or throttle is undone."""
        return f"fault-{self.index}"

    @property
    def action(self) -> str:
        """The fault's action as the scenario calls it, also when it is being undone."""
        return self.part.action

    @property
    def operation(self) -> str:
        """What to do: kill, restart, pause, resume, partition, degrade, flap (the links go down), heal, throttle,
        unthrottle (all throttles of the device), or undo (by the handle; for a flap the links come up).
        """
        return self.action if self.phase == "strike" else UNDOING.get(self.action, "undo")

    def fields(self, detail: str | None = None) -> dict[str, Any]:
        """Return the fields of the ``fault`` event."""
        fields = {"action": self.action, "target": target(self.part), "phase": self.phase, "intended": self.intended}
        return fields if detail is None else {**fields, "detail": detail}


@dataclass(frozen=True)
class FaultRecord:
    """What became of one fault; instants are None where it did not come to it."""

    index: int
    action: str
    target: str
    intended: float | None = None
    actual: float | None = None
    undo_intended: float | None = None
    undo_actual: float | None = None


@dataclass(frozen=True)
class _Flap:
    """How far a flap has come. Its turns count from its first, so they do not drift."""

    part: FlapPart
    began: float
    ends: float
    turns: int = 0

    def comes_up(self) -> float:
        return min(self.ends, self.began + self.turns * (self.part.down + self.part.up) + self.part.down)

    def goes_down(self) -> float | None:
        """Return when the present turn begins; None when there are no more."""
        when = self.began + self.turns * (self.part.down + self.part.up)
        over = when >= self.ends or (self.part.times is not None and self.turns >= self.part.times)
        return None if over else when


def _matches(trigger: TriggerPart, event: str, fields: Mapping[str, Any]) -> bool:
    if trigger.begins is not None:
        if event != "begin" or fields.get("span") != trigger.begins:
            return False
    elif event != trigger.event:
        return False
    if trigger.batch is not None and trigger.batch != _batch(fields):
        return False
    return trigger.micro is None or trigger.micro == fields.get("micro")


def _batch(fields: Mapping[str, Any]) -> Any:
    """Return what ``batch`` means for an event: its batch, else its training step or its request."""
    return next((fields[key] for key in ("batch", "step", "request") if key in fields), None)


class FaultScript:
    """The faults of a scenario, in the order of its file, and how far they have come."""

    def __init__(self, faults: Sequence[FaultPart] = ()) -> None:
        self._parts: list[FaultPart] = []
        self._records: list[FaultRecord] = []
        self._deadlines: list[tuple[float, int, int, Strike]] = []
        self._triggers: dict[int, TriggerPart] = {}
        self._flaps: dict[int, _Flap] = {}
        for part in faults:
            self.append(part)

    def append(self, part: FaultPart) -> int:
        """Add a fault at the end, as somebody at a running lab does; return its index."""
        index = len(self._parts)
        self._parts.append(part)
        self._records.append(FaultRecord(index, part.action, target(part)))
        if part.when is not None:
            self._triggers[index] = part.when
        elif part.at is not None:
            self._schedule(index, "strike", part.at)
        elif index == 0:
            self._schedule(index, "strike", part.after or 0.0)
        elif (before := self._records[index - 1].actual) is not None:
            self._schedule(index, "strike", before + (part.after or 0.0))
        return index

    def _schedule(self, index: int, phase: Phase, when: float) -> None:
        strike = Strike(index, self._parts[index], phase, when)
        heapq.heappush(self._deadlines, (when, index, phase == "undo", strike))
        self._intend(strike)

    def _intend(self, strike: Strike) -> None:
        record = self._records[strike.index]
        if strike.phase == "strike":
            if record.actual is None:
                self._records[strike.index] = replace(record, intended=strike.intended)
        else:
            self._records[strike.index] = replace(record, undo_intended=strike.intended)

    def next_deadline(self) -> float | None:
        """Return the next instant at which something is due, as far as is known by now."""
        return self._deadlines[0][0] if self._deadlines else None

    def due(self, now: float) -> list[Strike]:
        """Take what is due: in the order of intended instants, equal ones in the order of the file."""
        strikes = []
        while self._deadlines and self._deadlines[0][0] <= now:
            strikes.append(heapq.heappop(self._deadlines)[-1])
        return strikes

    @property
    def watched(self) -> frozenset[str]:
        """Devices whose events still matter: `observe` ignores those of others."""
        return frozenset(trigger.device for trigger in self._triggers.values())

    def observe(self, time: float, device: str, event: str, fields: Mapping[str, Any]) -> list[Strike]:
        """Take what an event triggers, to be done at once; each trigger fires once."""
        if not self._triggers:
            return []
        fired = [
            index
            for index, trigger in self._triggers.items()
            if trigger.device == device and _matches(trigger, event, fields)
        ]
        strikes = []
        for index in fired:
            del self._triggers[index]
            strike = Strike(index, self._parts[index], "strike", time)
            self._intend(strike)
            strikes.append(strike)
        return strikes

    def done(self, strike: Strike, actual: float) -> None:
        """Note that a strike has taken effect, and schedule what counts from it."""
        index = strike.index
        if strike.part.flap is not None:
            self._turn(strike, strike.part.flap, actual)
        if strike.phase == "undo":
            self._records[index] = replace(self._records[index], undo_actual=actual)
            return
        if self._records[index].actual is not None:
            return  # a further turn of a flap
        self._records[index] = replace(self._records[index], actual=actual)
        if strike.part.for_ is not None and strike.part.flap is None:
            self._schedule(index, "undo", actual + strike.part.for_)
        if strike.part.heal is not None:
            self._flaps = {key: replace(flap, ends=actual) for key, flap in self._flaps.items()}
            self._deadlines = [each for each in self._deadlines if each[1] not in self._flaps]
            heapq.heapify(self._deadlines)
        if index + 1 < len(self._parts) and (wait := self._parts[index + 1].after) is not None:
            self._schedule(index + 1, "strike", actual + wait)

    def _turn(self, strike: Strike, part: FlapPart, actual: float) -> None:
        """Schedule what follows as the links of a flap have gone down or come up."""
        index = strike.index
        if index not in self._flaps:
            ends = float("inf") if strike.part.for_ is None else actual + strike.part.for_
            self._flaps[index] = _Flap(part, actual, ends)
        flap = self._flaps[index]
        if strike.phase == "strike":
            self._schedule(index, "undo", flap.comes_up())
            return
        flap = self._flaps[index] = replace(flap, turns=flap.turns + 1)
        if (when := flap.goes_down()) is not None:
            self._schedule(index, "strike", when)

    def records(self) -> list[FaultRecord]:
        """Return what was intended and what happened, in the order of the file."""
        return list(self._records)
