"""When which fault strikes and is undone: a pure state machine that either runtime executes.

The runtime asks `FaultScript.next_deadline`, takes what is `due`, shows it every event (`observe`), does what each
`Strike` says and reports it `done`. Whatever counts from another fault (``after``, ``for``) counts from the
instant at which that one really took effect.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from testbed.network import checks
from testbed.network.overlay import FIGURES, given, overlay
from testbed.network.presets import PRESETS
from testbed.replay import traced_links
from testbed.scenario.quantities import format_speed
from testbed.scenario.schema import FaultPart, FlapPart, TriggerPart
from testbed.scenario.source import Key, Problem
from testbed.speeds import MIN_FACTOR

if TYPE_CHECKING:
    from testbed.network.link import Pair
    from testbed.scenario.experiment import Experiment

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


_DEVICE_EVENTS: Mapping[str, tuple[str, ...]] = {
    "begin": ("batch", "micro"),
    "compute": ("batch", "micro"),
    "send": (),
    "receive": (),
    "cast": (),
    "state": (),
    "step": ("batch",),
    "evaluate": ("batch",),
    "request": ("batch",),
    "recovery": ("batch",),
    "log": (),
}
"""Events that a device writes, and which keys of a trigger can match them."""


def devices_named(part: FaultPart) -> list[tuple[Key, str]]:
    """Return every device that a fault names, with the key that names it."""
    named: list[tuple[Key, str]] = [
        ((action,), getattr(part, action))
        for action in ("kill", "restart", "pause", "resume", "unthrottle")
        if getattr(part, action) is not None
    ]
    for number, group in enumerate(part.partition or ()):
        named += [(("partition", number, place), name) for place, name in enumerate(group)]
    for action, links in (("degrade", part.degrade), ("flap", part.flap)):
        if links is not None:
            named += [((action, *key), name) for key, name in links.named()]
    if part.throttle is not None:
        named.append((("throttle", "device"), part.throttle.device))
    if part.when is not None:
        named.append((("when", "device"), part.when.device))
    return named


def problems(
    experiment: Experiment,
    spans: Callable[[str], Collection[str]],
    batches: int | None = None,
    events: Collection[str] = (),
) -> list[Problem]:
    """Return what is wrong with the faults of an experiment beyond the shape of the file.

    ``spans`` gives the names of the spans that a device may begin, ``batches`` is how many batches the workload has,
    ``events`` are those that the method records beside the ones of `testbed.trace.events`. Names of
    devices that do not exist are left to `devices_named`: their other keys are not looked at.
    """
    names = {device.name for device in experiment.devices}
    faults = experiment.scenario.faults
    found: list[Problem] = []
    for index, part in enumerate(faults):
        if any(name not in names for _, name in devices_named(part)):
            continue
        wrong = [
            *_time_problems(index, part, experiment.scenario.time_limit),
            *_partition_problems(part, names),
            *_degrade_problems(part, experiment),
            *link_problems(part, experiment.links),
            *_throttle_problems(part, experiment),
            *_mending_problems(part, faults),
        ]
        if part.when is not None:
            wrong += _trigger_problems(part.when, spans(part.when.device), batches, events)
        found += [Problem(("faults", index, *key), text) for key, text in wrong]
    return found


Wrong = Iterator[tuple[Key, str]]


def _time_problems(index: int, part: FaultPart, time_limit: float) -> Wrong:
    if part.after is not None and index == 0:
        yield ("after",), "there is no fault before the first one: use 'at' or 'when'"
    if part.at is not None and part.at >= time_limit:
        yield ("at",), f"the run is over at its time_limit of {time_limit:g}s: strike earlier or raise the limit"


def _partition_problems(part: FaultPart, names: Collection[str]) -> Wrong:
    groups = part.partition
    if groups is None:
        return
    listed = [name for group in groups for name in group]
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        yield ("partition",), f"'{name}' is named twice: a device is in one group"
    kept = len([group for group in groups if group]) + (len(set(listed)) < len(names))
    if kept < 2:
        yield ("partition",), "separates nobody: name at least two groups, or leave devices out of the only one"


def _degrade_problems(part: FaultPart, experiment: Experiment) -> Wrong:
    worse = part.degrade
    if worse is None:
        return
    if worse.preset is None and not given(worse):
        yield ("degrade",), f"changes nothing: give at least one of preset, {', '.join(FIGURES)}"
    if worse.preset is not None and worse.preset not in PRESETS:
        yield ("degrade", "preset"), f"there is no preset '{worse.preset}': use one of {', '.join(PRESETS)}"
        return
    traced = traced_links(experiment.links, experiment.changes, experiment.devices[0].name)
    states = chain(experiment.links.items(), ((pair, link) for _, pair, link in traced))
    # By identity: a mesh of a thousand devices has a million links, but few values.
    for link in {id(link): link for pair, link in states if worse.touches(pair)}.values():
        # Which direction a preset has is of no matter here: presets state nothing that could clash.
        for figure, text in checks.problems(overlay(link, worse, from_first=True)):
            key = figure.partition(".")[0]
            yield ("degrade", key) if getattr(worse, key) is not None else ("degrade",), text


def link_problems(part: FaultPart, there: Collection[Pair]) -> Wrong:
    """Name a link that a fault strikes and that is not there."""
    for action, links in (("degrade", part.degrade), ("flap", part.flap)):
        if links is not None and links.device is None:
            pair = links.between or (str(links.from_), str(links.to))
            if pair not in there:
                yield (action,), f"there is no link from '{pair[0]}' to '{pair[1]}' to {action}"


def _throttle_problems(part: FaultPart, experiment: Experiment) -> Wrong:
    if part.throttle is None or part.throttle.speed is None:
        return
    own = next(device.speed for device in experiment.devices if device.name == part.throttle.device)
    if part.throttle.speed < own * MIN_FACTOR:
        lowest = format_speed(own * MIN_FACTOR)
        yield ("throttle", "speed"), f"is less than a millionth of the device's own speed: use at least {lowest}"


def _mending_problems(part: FaultPart, faults: Sequence[FaultPart]) -> Wrong:
    for mending, breaking in (("restart", "kill"), ("resume", "pause"), ("unthrottle", "throttle")):
        name = getattr(part, mending)
        if name is not None and not any(other.action == breaking and target(other) == name for other in faults):
            yield (mending,), f"no fault of this scenario {breaking}s '{name}': nothing to {mending}"


def _trigger_problems(
    trigger: TriggerPart, spans: Collection[str], batches: int | None, events: Collection[str]
) -> Wrong:
    if trigger.begins is not None and trigger.begins not in spans:
        known = f"it begins {', '.join(sorted(spans))}" if spans else "it has no part in this plan"
        yield ("when", "begins"), f"'{trigger.device}' never begins '{trigger.begins}': {known}"
        return
    if trigger.event is not None:
        if trigger.event in events:
            return
        if trigger.event not in _DEVICE_EVENTS:
            known = ", ".join([*_DEVICE_EVENTS, *events])
            yield ("when", "event"), f"no device records an event '{trigger.event}': use one of {known}"
            return
        for key in ("batch", "micro"):
            if getattr(trigger, key) is not None and key not in _DEVICE_EVENTS[trigger.event]:
                yield ("when", key), f"the event '{trigger.event}' has no {key}: leave it out"
    if trigger.batch is not None and batches is not None and trigger.event != "evaluate" and trigger.batch >= batches:
        yield ("when", "batch"), f"there are {batches} batches, counted from 0: the last one is {batches - 1}"
