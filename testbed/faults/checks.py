"""What is wrong with the faults of a scenario, beyond the shape of its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from testbed.errors import Diagnostic, Key
from testbed.faults.parts import FaultPart, TriggerPart
from testbed.faults.replay import Change, traced_links
from testbed.faults.script import target
from testbed.faults.speeds import MIN_FACTOR
from testbed.hardware import DeviceSpec
from testbed.network import checks
from testbed.network.link import Link, Pair
from testbed.network.overlay import FIGURES, given, overlay
from testbed.network.presets import PRESETS
from testbed.quantities import format_speed

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
    "stretch": ("batch",),
    "repartition": ("batch",),
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


@dataclass(frozen=True)
class Setting:
    """What the faults of a run strike."""

    devices: Sequence[DeviceSpec]
    links: Mapping[Pair, Link]
    changes: Sequence[Change] = ()
    """Of links and speeds, as a trace has them."""
    time_limit: float = math.inf
    """Seconds after which the run is over."""


def problems(
    faults: Sequence[FaultPart],
    setting: Setting,
    spans: Callable[[str], Collection[str]],
    batches: int | None = None,
    events: Collection[str] = (),
) -> list[Diagnostic]:
    """Return what is wrong with faults beyond the shape of the file, in such a run.

    ``spans`` gives the names of the spans that a device may begin, ``batches`` is how many batches the workload has,
    ``events`` are those that the method records beside the ones of `testbed.trace.events`. Names of
    devices that do not exist are left to `devices_named`: their other keys are not looked at.
    """
    names = {device.name for device in setting.devices}
    found: list[Diagnostic] = []
    for index, part in enumerate(faults):
        if any(name not in names for _, name in devices_named(part)):
            continue
        wrong = [
            *_time_problems(index, part, setting.time_limit),
            *_partition_problems(part, names),
            *_degrade_problems(part, setting),
            *link_problems(part, setting.links),
            *_throttle_problems(part, setting.devices),
            *_mending_problems(part, faults),
        ]
        if part.when is not None:
            wrong += _trigger_problems(part.when, spans(part.when.device), batches, events)
        found += [Diagnostic(("faults", index, *key), text) for key, text in wrong]
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


def _degrade_problems(part: FaultPart, setting: Setting) -> Wrong:
    worse = part.degrade
    if worse is None:
        return
    if worse.preset is None and not given(worse):
        yield ("degrade",), f"changes nothing: give at least one of preset, {', '.join(FIGURES)}"
    if worse.preset is not None and worse.preset not in PRESETS:
        yield ("degrade", "preset"), f"there is no preset '{worse.preset}': use one of {', '.join(PRESETS)}"
        return
    traced = traced_links(setting.links, setting.changes, setting.devices[0].name)
    states = chain(setting.links.items(), ((pair, link) for _, pair, link in traced))
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


def _throttle_problems(part: FaultPart, devices: Sequence[DeviceSpec]) -> Wrong:
    if part.throttle is None or part.throttle.speed is None:
        return
    own = next(device.speed for device in devices if device.name == part.throttle.device)
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
