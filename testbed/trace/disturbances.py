"""Times of injected faults, of their reversals and of the method's recoveries, computed from the events of a run.

A `Strike` is an injected fault (or repair), a `Recovery` a fault as the method noticed it. All times are seconds of the
run.
"""

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
    """An injected fault or repair."""

    action: str
    """Key of the action in a scenario, such as ``kill``."""
    target: str
    """Target as text: a device, a link, groups of devices, or all."""
    intended: float
    """Time by the scenario; equal to ``struck`` for a user's command."""
    struck: float
    """Time when the action took effect."""
    undone: float | None = None
    """Time of the reversal or of a repair; None if the fault lasted until the end."""
    recovered: float | None = None
    """Time when the method resumed its work afterwards; None if it noticed no fault or never resumed."""

    @property
    def is_repair(self) -> bool:
        """Whether the action is a repair."""
        return repair_action(self.action, self.target) is not None

    @property
    def end(self) -> float | None:
        """Time when the disturbance ended: the later of reversal and recovery; None without either."""
        instants = (self.undone, self.recovered)
        return max((each for each in instants if each is not None), default=None)

    def window(self, run_end: float) -> tuple[float, float]:
        """Return the time span disturbed by the fault."""
        return (self.struck, run_end if self.end is None else self.end)


@dataclass(frozen=True)
class Recovery:
    """A fault detected by the method, and recovered from unless ``resumed`` is None."""

    detected: float
    """Time of the first detection."""
    struck: float | None = None
    """Time of the underlying fault; None for a detection without a recorded fault."""
    resumed: float | None = None
    """Time when the method resumed its work; None if it never did."""
    step: int | None = None
    """Training step at which the method resumed (or at the detection)."""
    missing: tuple[str, ...] = field(default=())
    """Devices that the method reported as missing."""
    phases: Mapping[str, Event] = field(default_factory=dict)
    """Last event of each further phase that the method reported, before or after the resumption."""
    causes: tuple[Strike, ...] = ()
    """The underlying fault, and others of the same kind or time on missing devices."""

    @property
    def duration(self) -> float | None:
        """Seconds from the fault (or, if unknown, from the detection) to the resumption of training."""
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


def _undoes(event: Event, action: str, target: str) -> bool:
    """Return whether a ``fault`` event undoes an earlier action on a target."""
    event_action = str(event.fields.get("action"))
    event_target = str(event.fields.get("target"))
    if event.fields.get("phase") == "undo":
        return (event_action, event_target) == (action, target)
    repair = repair_action(event_action, event_target)
    # An unknown action comes from a package that this installation lacks.
    if repair is None or action not in ACTIONS:
        return False
    return repair.mends(ACTIONS[action], target)


def _strikes_without_recovery(events: Sequence[Event]) -> list[Strike]:
    """Return all injected faults in order, without the times of recoveries."""
    faults = list(EventLog.made_of(events).of("fault"))
    strikes = []
    for index, event in enumerate(faults):
        if event.fields.get("phase") == "undo":
            continue
        action = str(event.fields.get("action"))
        target = str(event.fields.get("target"))
        undone = None
        for later in faults[index + 1 :]:
            if _undoes(later, action, target):
                undone = later.time
                break
        # A fault by a user's command has no intended time and is never late.
        struck = float(event.fields.get("began", event.time))
        intended = float(event.fields.get("intended", struck))
        strikes.append(Strike(action, target, intended, struck, undone))
    return strikes


def _find_cause(
    strikes: Collection[Strike], detected: float, since: float, missing: Collection[str]
) -> Strike | None:
    """Return the most likely fault behind a detection; None without one.

    ``since`` is the time of the last resumption. The latest fault on a missing device is returned, or else the first
    fault since then.
    """
    recent = []
    on_missing = []
    for strike in strikes:
        if strike.is_repair or strike.struck > detected:
            continue
        # A fault before the last resumption was recovered from, and explains a new detection only if it still lasts.
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
    """Return all faults behind a recovery: the cause, and similar faults on missing devices in the time span."""
    if cause is None:
        return ()
    causes = []
    for strike in strikes:
        # Intended times are compared, because simultaneous faults strike one after another in containers.
        is_similar = strike.action == cause.action or strike.intended == cause.intended
        is_within = since <= strike.struck <= until
        is_further = strike.target in missing and is_within and is_similar
        if strike == cause or is_further:
            causes.append(strike)
    return tuple(causes)


def recoveries(events: Sequence[Event]) -> list[Recovery]:
    """Return the recoveries in order; several detections before one resumption are one recovery."""
    strikes = _strikes_without_recovery(events)
    all_recoveries: list[Recovery] = []
    # State of the recovery that has been detected and not resumed.
    detection: Event | None = None
    missing: tuple[str, ...] = ()
    phases: dict[str, Event] = {}
    last_resumption = -math.inf

    def make_recovery(detection: Event, resumption: Event | None) -> Recovery:
        cause = _find_cause(strikes, detection.time, last_resumption, missing)
        until = resumption.time if resumption else math.inf
        return Recovery(
            detected=detection.time,
            struck=cause.struck if cause else None,
            resumed=resumption.time if resumption else None,
            step=(resumption or detection).fields.get("step"),
            missing=missing,
            phases=phases,
            causes=_find_causes(strikes, cause, last_resumption, until, missing),
        )

    # A recovery lasts from the first "detected" to the next "resumed"; other phases are the method's own.
    for event in EventLog.made_of(events).of("recovery"):
        phase = str(event.fields.get("phase"))
        names = _device_names(event.fields.get("missing"))
        missing = tuple(dict.fromkeys((*missing, *names)))
        if phase == "detected":
            # A second detection before the resumption belongs to the same recovery.
            detection = detection or event
            phases = {}
        elif phase == "resumed":
            all_recoveries.append(make_recovery(detection or event, event))
            detection = None
            missing = ()
            phases = {}
            last_resumption = event.time
        elif detection is not None:
            phases[phase] = event
        elif all_recoveries:
            # Some methods report phases after the resumption, such as the last weight that was moved.
            latest = all_recoveries[-1]
            all_recoveries[-1] = replace(latest, phases={**latest.phases, phase: event})
    if detection is not None:
        all_recoveries.append(make_recovery(detection, None))
    return all_recoveries


def strikes(events: Sequence[Event]) -> list[Strike]:
    """Return all injected faults in order, with the times of their reversal and of the method's recovery."""
    recovered: dict[Strike, float | None] = {}
    for recovery in recoveries(events):
        for strike in recovery.causes:
            # The first recovery counts.
            recovered.setdefault(strike, recovery.resumed)
    return [
        replace(strike, recovered=recovered.get(strike))
        for strike in _strikes_without_recovery(events)
    ]
