"""The `faults` section of a scenario file: its model, the registry of fault actions, and the checks of a run's faults.

An action is a fault or a repair, such as `kill` or `heal`. `FaultPart`, one entry of the section, combines an action
with its time or trigger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, create_model, model_validator

from testbed.common.errors import Diagnostic, InputError, Key
from testbed.common.part import ConfigModel, Name
from testbed.common.plugins import Registry, subclass_of
from testbed.common.quantities import Duration
from testbed.faults.conditions import ALL, FaultAction, FaultContext

FAULTS = Registry(
    "testbed.faults",
    {
        "kill": "testbed.faults.device_actions:Kill",
        "restart": "testbed.faults.device_actions:Restart",
        "retire": "testbed.faults.device_actions:Retire",
        "join": "testbed.faults.device_actions:Join",
        "pause": "testbed.faults.device_actions:Pause",
        "resume": "testbed.faults.device_actions:Resume",
        "partition": "testbed.faults.link_actions:NetworkPartition",
        "degrade": "testbed.faults.link_actions:Degrade",
        "obstruct": "testbed.faults.link_actions:Obstruct",
        "flap": "testbed.faults.link_actions:Flap",
        "heal": "testbed.faults.link_actions:Heal",
        "throttle": "testbed.faults.device_actions:Throttle",
        "unthrottle": "testbed.faults.device_actions:Unthrottle",
    },
    "fault",
    subclass_of(FaultAction),
)
"""Action classes by scenario key, in the order of the documentation."""


def _action_of(name: str) -> type[FaultAction[Any]]:
    """Return the class of an action; for an unusable package, a class rejecting every value."""
    try:
        return FAULTS.find(name)
    except InputError as error:
        # A broken package must not prevent the loading of scenarios without its action.
        attributes = {"schema": _reject_value(error.text), "summary": error.text}
        return type(name, (FaultAction,), attributes)


def _reject_value(text: str) -> Any:
    def refuse(_value: object) -> None:
        raise ValueError(text)

    return Annotated[Any, BeforeValidator(refuse)]


ACTIONS = {name: _action_of(name) for name in FAULTS}
"""Action classes by scenario key, those of installed packages included."""
_FIELDS: dict[str, Any] = {
    name: (kind.schema | None, Field(None, description=kind.summary))
    for name, kind in ACTIONS.items()
}
# Created from the registry, so that a scenario can have the actions of installed packages, too.
_Keys: Any = create_model("_Keys", __base__=ConfigModel, **_FIELDS)
"""A model with one optional field for each action."""


def repair_action(name: str, target: str) -> FaultAction[str] | None:
    """Return the action of a recorded ``fault`` event, given name and target; None unless the action is a repair."""
    kind = ACTIONS.get(name)
    return kind(target) if kind is not None and kind.undoes else None


class TriggerPart(ConfigModel):
    """A moment of the work of a device, as in 'when worker1 begins backward of batch 205'."""

    device: Name = Field(description="device whose computation or event is the moment")
    begins: str | None = Field(
        None, description="name of a span, e.g. forward, backward, update"
    )
    event: str | None = Field(
        None, description="name of a recorded event, e.g. recovery"
    )
    batch: int | None = Field(
        None,
        ge=0,
        description=(
            "batch of the computation or event, counted from 0; default: the next one"
        ),
    )
    micro: int | None = Field(
        None,
        ge=0,
        description="micro-batch of the computation or event, counted from 0 in its batch",
    )

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if (self.begins is None) == (self.event is None):
            raise ValueError("set exactly one of 'begins' and 'event'")
        return self

    @property
    def recorded(self) -> str:
        """Name of the triggering event."""
        return "begin" if self.event is None else self.event


class ActionPart(_Keys):
    """A fault or repair: exactly one of the keys."""

    @staticmethod
    def of(action: FaultAction[Any]) -> ActionPart:
        """Return an action in the form of a scenario file."""
        return ActionPart(**{action.name: action.value})

    @property
    def action(self) -> FaultAction[Any]:
        """The action of the only key set in the section."""
        (action,) = self._actions()
        return action

    def _actions(self) -> list[FaultAction[Any]]:
        actions = []
        for name, kind in ACTIONS.items():
            value = getattr(self, name)
            if value is not None:
                actions.append(kind(value))
        return actions

    @model_validator(mode="after")
    def _check_one_action(self) -> Self:
        if len(self._actions()) != 1:
            raise ValueError("a fault has exactly one of " + ", ".join(ACTIONS))
        return self


class FaultPart(ActionPart):
    """A fault or repair with a time or trigger: exactly one of ``at``, ``when`` and ``after``."""

    at: Duration | None = Field(
        None, description="time since the start of the workload"
    )
    when: TriggerPart | None = Field(
        None, description="a computation or event of a device"
    )
    after: Duration | None = Field(
        None, description="time since the previous fault of the file"
    )
    for_: Duration | None = Field(
        None, alias="for", description="time after which the fault is reverted"
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if [self.at, self.when, self.after].count(None) != 2:
            raise ValueError("a fault needs exactly one of 'at', 'when' and 'after'")
        reason = self.action.reason_against_for
        if self.for_ is not None and reason is not None:
            raise ValueError(reason)
        return self


def devices_named(part: FaultPart) -> list[tuple[Key, str]]:
    """Return the key relative to the fault, and the name, of every device named in the fault or the trigger."""
    action = part.action
    named: list[tuple[Key, str]] = []
    for key, name in action.named():
        named.append(((action.name, *key), name))
    if part.when is not None:
        named.append((("when", "device"), part.when.device))
    return named


def problems(
    faults: Sequence[FaultPart],
    context: FaultContext,
    spans: Callable[[str], Collection[str] | None],
    events: Mapping[str, Collection[str]],
    batches: int | None = None,
) -> list[Diagnostic]:
    """Return the problems of faults in the context of the other sections and of the plan of a run.

    ``spans`` returns the names of the spans that a device may begin, None if unknown. ``events`` maps recorded events
    to the trigger keys that can match each. ``batches`` is the number of batches of the workload, None if unknown. A
    fault with an unknown device is skipped; callers report the name by `devices_named`.
    """
    names = {device.name for device in context.devices}
    diagnostics: list[Diagnostic] = []
    for index, part in enumerate(faults):
        action = part.action
        # The checks look up the devices by name.
        if any(name not in names for _, name in devices_named(part)):
            continue
        fault_problems = list(_time_problems(index, part, context.time_limit))
        for key, text in action.problems(context):
            fault_problems.append(((action.name, *key), text))
        fault_problems += _repair_problems(part, faults)
        if part.when is not None:
            device_spans = spans(part.when.device)
            fault_problems += _trigger_problems(
                part.when, device_spans, batches, events
            )
        for key, text in fault_problems:
            diagnostics.append(Diagnostic(("faults", index, *key), text))
    return diagnostics


Problems = Iterator[tuple[Key, str]]
"""Key relative to a fault, and text of each problem."""


def _time_problems(index: int, part: FaultPart, time_limit: float) -> Problems:
    if part.after is not None and index == 0:
        yield ("after",), "the first fault has no predecessor: use 'at' or 'when'"
    if part.at is not None and part.at >= time_limit:
        yield (
            ("at",),
            f"the run is over at its time_limit of {time_limit:g}s: strike earlier or raise the limit",
        )


def _repair_problems(part: FaultPart, parts: Sequence[FaultPart]) -> Problems:
    """Yield an error for a repair without an earlier fault on the same target."""
    action = part.action
    if not action.undoes or action.target == ALL:
        return
    fault_times = []
    for other in parts:
        if action.mends(type(other.action), other.action.target):
            # A fault with a trigger may strike at any time.
            fault_times.append(-math.inf if other.at is None else other.at)
    # As in "kills or retires".
    verbs = " or ".join(f"{name}s" for name in action.undoes)
    if not fault_times:
        yield (
            (action.name,),
            f"no fault of this scenario {verbs} '{action.target}': nothing to {action.name}",
        )
    elif part.at is not None and min(fault_times) >= part.at:
        yield (
            ("at",),
            f"nothing {verbs} '{action.target}' before that: {action.name} it later",
        )


def _trigger_problems(
    trigger: TriggerPart,
    spans: Collection[str] | None,
    batches: int | None,
    events: Mapping[str, Collection[str]],
) -> Problems:
    # Any name may be right if the spans are unknown.
    if trigger.begins is not None and spans is not None and trigger.begins not in spans:
        reason = "it has no part in this plan"
        if spans:
            reason = f"it begins {', '.join(sorted(spans))}"
        yield (
            ("when", "begins"),
            f"'{trigger.device}' has no computation '{trigger.begins}': {reason}",
        )
        return
    if trigger.event is not None:
        if trigger.event not in events:
            text = f"no device records an event '{trigger.event}': use one of {', '.join(events)}"
            yield ("when", "event"), text
            return
        for key in ("batch", "micro"):
            if getattr(trigger, key) is not None and key not in events[trigger.event]:
                yield (
                    ("when", key),
                    f"the event '{trigger.event}' has no {key}: remove the key",
                )
    # The last evaluation has the number `batches`, since it follows the last batch, `batches` - 1.
    if batches is None or trigger.event == "evaluate":
        return
    if trigger.batch is not None and trigger.batch >= batches:
        yield (
            ("when", "batch"),
            f"out of range: batches are counted from 0 to {batches - 1}",
        )
