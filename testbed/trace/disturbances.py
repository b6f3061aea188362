"""When faults struck and were undone, and how the method recovered, read from the events of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from testbed.faults.parts import ACTIONS, repair_action
from testbed.trace.events import Event
from testbed.trace.log import EventLog


@dataclass(frozen=True)
class Strike:
    """An injected fault; all times are seconds of the run."""

    action: str
    target: str
    intended: float
    struck: float
    undone: float | None = None
    recovered: float | None = None
    """Time when the method resumed afterwards."""

    @property
    def is_repair(self) -> bool:
        """Whether the action is a repair."""
        return repair_action(self.action, self.target) is not None

    @property
    def end(self) -> float | None:
        """Time when the disturbance ended: fault undone and, if detected by the method, recovered from. None
        if never."""
        instants = (self.undone, self.recovered)
        return max((each for each in instants if each is not None), default=None)

    def window(self, run_end: float) -> tuple[float, float]:
        """Return the time span disturbed by the fault."""
        return (self.struck, run_end if self.end is None else self.end)


@dataclass(frozen=True)
class Recovery:
    """A fault detected by the method, and recovered from unless ``resumed`` is None."""

    detected: float
    struck: float | None = None
    """Time of the underlying fault; None for a detection without a recorded fault."""
    resumed: float | None = None
    step: int | None = None
    missing: tuple[str, ...] = field(default=())
    phases: Mapping[str, Event] = field(default_factory=dict)
    """Times of further phases reported by the method, by name (the last time of each): before and after the resumption.
    """
    causes: tuple[Strike, ...] = ()
    """The underlying fault, and others of the same kind or time on missing devices."""

    @property
    def duration(self) -> float | None:
        """Seconds from the fault (or its detection for an unknown fault) to the resumption of training."""
        if self.resumed is None:
            return None
        return self.resumed - (self.detected if self.struck is None else self.struck)


def _device_names(value: Any) -> tuple[str, ...]:
    """Return the device names in an event field with one, several or no names."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(str(name) for name in value)


def _is_undone_by(event: Event, action: str, target: str) -> bool:
    own_action = str(event.fields.get("action"))
    own_target = str(event.fields.get("target"))
    if event.fields.get("phase") == "undo":
        return (own_action, own_target) == (action, target)
    repair = repair_action(own_action, own_target)
    # An unknown action comes from a package that this installation lacks.
    if repair is None or action not in ACTIONS:
        return False
    return repair.mends(ACTIONS[action], target)


def _bare_strikes(events: Sequence[Event]) -> list[Strike]:
    faults = list(EventLog.made_of(events).of("fault"))
    strikes = []
    for index, event in enumerate(faults):
        if event.fields.get("phase") == "undo":
            continue
        action = str(event.fields.get("action"))
        target = str(event.fields.get("target"))
        undone = None
        for later in faults[index + 1 :]:
            if _is_undone_by(later, action, target):
                undone = later.time
                break
        # A fault by hand has no intended time and is never late.
        struck = float(event.fields.get("began", event.time))
        intended = float(event.fields.get("intended", struck))
        strikes.append(Strike(action, target, intended, struck, undone))
    return strikes


def _find_cause(
    strikes: Collection[Strike], detected: float, since: float, missing: Collection[str]
) -> Strike | None:
    """Return the most likely fault behind a detection: one on a missing device, else the first since ``since``."""
    recent = []
    on_missing = []
    for strike in strikes:
        if strike.is_repair or strike.struck > detected:
            continue
        # A fault that the method has already recovered from explains nothing new, unless it lasts.
        is_recent = strike.struck >= since
        lasts = strike.undone is None or strike.undone > detected
        if is_recent:
            recent.append(strike)
        if strike.target in missing and (is_recent or lasts):
            on_missing.append(strike)
    if on_missing:
        return max(on_missing, key=lambda strike: strike.struck)
    return min(recent, key=lambda strike: strike.struck) if recent else None


def _find_causes(
    strikes: Collection[Strike],
    cause: Strike | None,
    since: float,
    until: float,
    missing: Collection[str],
) -> tuple[Strike, ...]:
    """Return all faults behind a recovery between ``since`` and ``until``."""
    if cause is None:
        return ()
    causes = []
    for strike in strikes:
        # By intended times: in containers, faults of one instant strike one after another.
        is_alike = strike.action == cause.action or strike.intended == cause.intended
        is_meanwhile = since <= strike.struck <= until
        is_further = strike.target in missing and is_meanwhile and is_alike
        if strike == cause or is_further:
            causes.append(strike)
    return tuple(causes)


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """Return the recoveries in order; several detections before one resumption are one recovery."""
    strikes = _bare_strikes(events)
    detected_faults: list[Recovery] = []
    detected: Event | None = None
    missing: tuple[str, ...] = ()
    phases: dict[str, Event] = {}
    since = float("-inf")

    def make_recovery(first: Event, last: Event | None) -> Recovery:
        cause = _find_cause(strikes, first.time, since, missing)
        until = last.time if last else math.inf
        return Recovery(
            detected=first.time,
            struck=cause.struck if cause else None,
            resumed=last.time if last else None,
            step=(last or first).fields.get("step"),
            missing=missing,
            phases=phases,
            causes=_find_causes(strikes, cause, since, until, missing),
        )

    # A recovery lasts from the first "detected" to the next "resumed"; other phases are the method's own.
    for event in EventLog.made_of(events).of("recovery"):
        phase = str(event.fields.get("phase"))
        names = _device_names(event.fields.get("missing"))
        missing = tuple(dict.fromkeys((*missing, *names)))
        if phase == "detected":
            # A second detection before the resumption belongs to the same recovery.
            detected = detected or event
            phases = {}
        elif phase == "resumed":
            detected_faults.append(make_recovery(detected or event, event))
            detected = None
            missing = ()
            phases = {}
            since = event.time
        elif detected is not None:
            phases[phase] = event
        elif detected_faults:
            # Some methods report phases after the resumption, such as the last weight that was moved.
            last = detected_faults[-1]
            detected_faults[-1] = replace(last, phases={**last.phases, phase: event})
    if detected is not None:
        detected_faults.append(make_recovery(detected, None))
    return detected_faults


def strikes(events: Sequence[Event]) -> list[Strike]:
    """Return all injected faults in order, with the times of their reversal and of the method's recovery."""
    recovered: dict[Strike, float | None] = {}
    for recovery in recoveries(events):
        for strike in recovery.causes:
            # The first recovery counts.
            recovered.setdefault(strike, recovery.resumed)
    return [
        replace(strike, recovered=recovered.get(strike))
        for strike in _bare_strikes(events)
    ]
