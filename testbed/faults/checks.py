"""What is wrong with the faults of a scenario, beyond the shape of its file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from testbed.common.errors import Diagnostic, Key
from testbed.faults.conditions import ALL, FaultSetting
from testbed.faults.parts import FaultPart, TriggerPart


def devices_named(part: FaultPart) -> list[tuple[Key, str]]:
    """Return every device that a fault names, with the key that names it."""
    action = part.action
    named: list[tuple[Key, str]] = [((action.name, *key), name) for key, name in action.named()]
    return [*named, (("when", "device"), part.when.device)] if part.when is not None else named


def problems(
    faults: Sequence[FaultPart],
    setting: FaultSetting,
    spans: Callable[[str], Collection[str] | None],
    events: Mapping[str, Collection[str]],
    batches: int | None = None,
) -> list[Diagnostic]:
    """Return what is wrong with faults beyond the shape of the file, in such a run.

    ``spans`` gives the names of the spans that a device may begin, None where nobody knows; ``events`` are those that
    devices record, each with the keys of a trigger that can match it; ``batches`` is how many batches the workload has.
    Names of devices that do not exist are left to `devices_named`: the other keys of such a fault are not looked at.
    """
    names = {device.name for device in setting.devices}
    found: list[Diagnostic] = []
    for index, part in enumerate(faults):
        action = part.action
        if any(name not in names for _, name in devices_named(part)):
            continue
        wrong = [
            *_time_problems(index, part, setting.time_limit),
            *(((action.name, *key), text) for key, text in action.problems(setting)),
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


def _mending_problems(part: FaultPart, parts: Sequence[FaultPart]) -> Wrong:
    action = part.action
    if not action.undoes or action.target == ALL:
        return
    breaking = [other for other in parts if action.mends(other.action.name, other.action.target)]
    breaks = " or ".join(f"{name}s" for name in action.undoes)
    if not breaking:
        yield (action.name,), f"no fault of this scenario {breaks} '{action.target}': nothing to {action.name}"
    elif part.at is not None and all(other.at is not None and other.at >= part.at for other in breaking):
        yield ("at",), f"nothing {breaks} '{action.target}' before that: {action.name} it later"


def _trigger_problems(
    trigger: TriggerPart, spans: Collection[str] | None, batches: int | None, events: Mapping[str, Collection[str]]
) -> Wrong:
    if trigger.begins is not None and spans is not None and trigger.begins not in spans:
        begun = f"it begins {', '.join(sorted(spans))}" if spans else "it has no part in this plan"
        yield ("when", "begins"), f"'{trigger.device}' never begins '{trigger.begins}': {begun}"
        return
    if trigger.event is not None:
        if trigger.event not in events:
            text = f"no device records an event '{trigger.event}': use one of {', '.join(events)}"
            yield ("when", "event"), text
            return
        for key in ("batch", "micro"):
            if getattr(trigger, key) is not None and key not in events[trigger.event]:
                yield ("when", key), f"the event '{trigger.event}' has no {key}: leave it out"
    if trigger.batch is not None and batches is not None and trigger.event != "evaluate" and trigger.batch >= batches:
        yield ("when", "batch"), f"there are {batches} batches, counted from 0: the last one is {batches - 1}"
