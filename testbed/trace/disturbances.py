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
    def mends(self) -> bool:
        """Whether the action is a repair."""
        return repair_action(self.action, self.target) is not None

    @property
    def end(self) -> float | None:
        """Time when the disturbance ended: fault undone and, if detected by the method, recovered from. None
        if never."""
        known = [
            moment for moment in (self.undone, self.recovered) if moment is not None
        ]
        return max(known) if known else None

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
    if event.fields.get("phase") == "undo":
        return (
            event.fields.get("action") == action
            and str(event.fields.get("target")) == target
        )
    mends = repair_action(
        str(event.fields.get("action")), str(event.fields.get("target"))
    )
    return (
        mends is not None and action in ACTIONS and mends.mends(ACTIONS[action], target)
    )


def _bare_strikes(events: Sequence[Event]) -> list[Strike]:
    faults = list(EventLog.made_of(events).of("fault"))
    strikes = []
    for index, event in enumerate(faults):
        if event.fields.get("phase") == "undo":
            continue
        action, target = (
            str(event.fields.get("action")),
            str(event.fields.get("target")),
        )
        undone = next(
            (
                later.time
                for later in faults[index + 1 :]
                if _is_undone_by(later, action, target)
            ),
            None,
        )
        struck = float(event.fields.get("began", event.time))
        strikes.append(
            Strike(
                action,
                target,
                float(event.fields.get("intended", struck)),
                struck,
                undone,
            )
        )
    return strikes


def _find_cause(
    strikes: Collection[Strike], detected: float, since: float, missing: Collection[str]
) -> Strike | None:
    """Return the most likely fault behind a detection: one on a missing device, else the first since ``since``."""
    known = [
        strike for strike in strikes if not strike.mends and strike.struck <= detected
    ]
    # A fault whose effect the method has already outlived explains nothing new, unless it lasts.
    recent = [strike for strike in known if strike.struck >= since]
    lasting = [
        strike for strike in known if strike.undone is None or strike.undone > detected
    ]
    on_missing = [strike for strike in (*recent, *lasting) if strike.target in missing]
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
    return tuple(
        strike
        for strike in strikes
        if cause is not None
        and (
            strike == cause
            or (
                strike.target in missing
                and since <= strike.struck <= until
                # In containers, faults of one instant strike one after another.
                and (strike.action == cause.action or strike.intended == cause.intended)
            )
        )
    )


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """Return the recoveries in order; several detections before one resumption are one recovery."""
    strikes = _bare_strikes(events)
    detected_faults: list[Recovery] = []
    detected: Event | None = None
    missing: tuple[str, ...] = ()
    phases: dict[str, Event] = {}
    since = float("-inf")

    def recovery(first: Event, last: Event | None) -> Recovery:
        cause = _find_cause(strikes, first.time, since, missing)
        return Recovery(
            detected=first.time,
            struck=cause.struck if cause else None,
            resumed=last.time if last else None,
            step=(last or first).fields.get("step"),
            missing=missing,
            phases=phases,
            causes=_find_causes(
                strikes, cause, since, last.time if last else math.inf, missing
            ),
        )

    for event in EventLog.made_of(events).of("recovery"):
        phase = str(event.fields.get("phase"))
        missing = tuple(
            dict.fromkeys((*missing, *_device_names(event.fields.get("missing"))))
        )
        if phase == "detected":
            detected = detected or event
            phases = {}
        elif phase == "resumed":
            detected_faults.append(recovery(detected or event, event))
            detected, missing, phases, since = None, (), {}, event.time
        elif detected is not None:
            phases[phase] = event
        elif detected_faults:
            detected_faults[-1] = replace(
                detected_faults[-1], phases={**detected_faults[-1].phases, phase: event}
            )
    if detected is not None:
        detected_faults.append(recovery(detected, None))
    return detected_faults


def strikes(events: Sequence[Event]) -> list[Strike]:
    """Return all injected faults in order, with the times of their reversal and of the method's recovery."""
    outlived = recoveries(events)
    return [
        replace(
            strike,
            recovered=next(
                (item.resumed for item in outlived if strike in item.causes), None
            ),
        )
        for strike in _bare_strikes(events)
    ]
