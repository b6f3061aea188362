"""The state of devices, links and speeds at one moment, the actions that change it, and `apply_step`.

States and actions are values: applying an action returns a new `SystemState`. Containers and the simulator each
implement `FaultTarget`, which brings a state about.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from testbed.common.errors import Key
from testbed.common.part import Name
from testbed.hardware import DeviceSpec
from testbed.network.link import Link, Pair
from testbed.network.radio import Radio

DeviceState = Literal["up", "down", "paused", "retired"]
"""State of a device. One that boots is up. One that has retired is down by the time one looks."""
FaultPhase = Literal["strike", "undo"]
ALL = "all"
"""The target of an action that concerns everything."""

V = TypeVar("V")


@dataclass(frozen=True)
class FaultContext:
    """The facts of a run against which its faults are checked before it begins."""

    devices: Sequence[DeviceSpec]
    links: Mapping[Pair, Link]
    """Links of the scenario."""
    traced: Sequence[tuple[Pair, Link]] = ()
    """Links as the scenario's trace leaves them, one entry for each of its changes."""
    time_limit: float = math.inf
    """Seconds after which the run is over."""
    radio: Radio | None = None
    """The radio by which the devices hear each other."""


@dataclass(frozen=True)
class FaultAction(Generic[V]):
    """One thing that breaks or mends. A subclass defines its key in a scenario, its effect, and its reversal.

    Both clocks carry out the effect: `apply` and `undo` change states of devices; `touches` with `impair`, and `slows`
    with `slow`, change links and speeds for as long as the action is in force under its handle.

    >>> from dataclasses import replace
    >>> from testbed.faults.conditions import FaultAction
    >>> class Isolate(FaultAction[str]):
    ...     name = "isolate"
    ...     summary = "all links of the device drop everything"
    ...     undone_by = ("heal",)
    ...     def touches(self, pair):
    ...         return self.value in pair
    ...     def impair(self, link, pair, now):
    ...         return replace(link, up=False)
    """

    value: V
    """What a scenario gives for its key."""

    name: ClassVar[str]
    """The key in a scenario."""
    summary: ClassVar[str] = ""
    """Its description in the schema and the help of `testbed fault`."""
    schema: ClassVar[Any] = Name
    """The type of the value in a scenario: a name of a device, or a `Part` with keys of its own."""
    undoes: ClassVar[tuple[str, ...]] = ()
    """Names of the actions that it undoes where they have its target."""
    undone_by: ClassVar[tuple[str, ...]] = ()
    """Names of further actions that undo this one where they have its target."""
    switches: ClassVar[bool] = False
    """Whether it changes the state of a device and nothing else."""
    waits: ClassVar[bool] = False
    """Whether it lasts as long as the device takes for it: to boot, or to hand over what it holds."""

    @property
    def target(self) -> str:
        """What it concerns, in words: a device, a link, groups of devices, or all."""
        return str(self.value)

    def named(self) -> list[tuple[Key, str]]:
        """Return every device that it names, with the key of the name below the action's own."""
        return [((), self.target)]

    def problems(self, setting: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield what is wrong with it in such a run; each key is below the action's own. All names exist."""
        yield from ()

    @property
    def takes_no_for(self) -> str | None:
        """Why it cannot be undone after some time; None where it can."""
        return f"'{self.name}' mends something: it takes no 'for'" if self.undoes else None

    def mends(self, kind: type[FaultAction[Any]], target: str) -> bool:
        """Return whether it undoes an action of that kind with that target."""
        return (kind.name in self.undoes or self.name in kind.undone_by) and self.target in (ALL, target)

    def turns(self, began: float, ends: float) -> Iterator[tuple[FaultPhase, float]] | None:
        """Yield the times at which an action that repeats strikes and is undone; None for one that does not repeat."""
        return None

    def apply(self, now: SystemState, handle: str) -> SystemState:
        """Return the conditions after it; raise ValueError when the handle is in use."""
        if self.undoes:
            return now.without(key for key, each in now.in_force.items() if self.mends(type(each), each.target))
        return now.put(self, handle)

    def undo(self, now: SystemState, handle: str) -> SystemState:
        """Return the conditions without it; nothing changes when something else has undone it already."""
        return now.without([handle])

    def touches(self, pair: Pair) -> bool:
        """Return whether a directed link is different while it is in force."""
        return False

    def impair(self, link: Link, pair: Pair, now: SystemState) -> Link:
        """Return what becomes of a link that it touches, in such conditions."""
        return link

    def slows(self, device: str) -> bool:
        """Return whether a device computes at another speed while it is in force."""
        return False

    def slow(self, factor: float, own: float) -> float:
        """Return what is left of a share of a device's own speed, which is ``own`` FLOP/s."""
        return factor


@dataclass(frozen=True)
class StateDiff:
    """What became different."""

    devices: dict[str, DeviceState] = field(default_factory=dict)
    """Their new states."""
    links: dict[Pair, Link] = field(default_factory=dict)
    """The links that changed, as they are now."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Device -> share of its own speed, of those whose speed changed."""


@dataclass(frozen=True)
class SystemState:
    """States of the devices, their links and their speeds at one moment.

    Actions in force pile up: each is laid over those before it. Figures that a trace or a user has set lie under all
    of them.
    """

    devices: Mapping[str, DeviceState]
    """State of each device, in the order of the scenario."""
    links: Mapping[Pair, Link]
    """Links of the scenario."""
    speeds: Mapping[str, float]
    """Device -> FLOP/s that the scenario gives it."""
    set_links: Mapping[Pair, Link] = field(default_factory=dict)
    """Links whose own figures have been set."""
    set_speeds: Mapping[str, float] = field(default_factory=dict)
    """Device -> share of its own speed that has been set; above 1 where it is faster."""
    in_force: Mapping[str, FaultAction[Any]] = field(default_factory=dict)
    """Actions on links and speeds by their handles, in the order in which they were applied."""
    radio: Radio | None = None
    """The radio by which the devices hear each other."""

    @staticmethod
    def of(devices: Iterable[DeviceSpec], links: Mapping[Pair, Link], radio: Radio | None = None) -> SystemState:
        """Return conditions in which nothing has happened yet."""
        speeds = {device.name: device.speed for device in devices}
        return SystemState(dict.fromkeys(speeds, "up"), links, speeds, radio=radio)

    def switch(self, device: str, states: Mapping[DeviceState, DeviceState]) -> SystemState:
        """Give a device the state that ``states`` has for its present one, if any."""
        state = self.devices[device]
        if state not in states:
            return self
        return replace(self, devices={**self.devices, device: states[state]})

    def put(self, action: FaultAction[Any], handle: str) -> SystemState:
        """Put an action in force; raise ValueError when the handle is in use."""
        if handle in self.in_force:
            raise ValueError(f"'{handle}' is in force already: undo it first, or choose another handle")
        return replace(self, in_force={**self.in_force, handle: action})

    def without(self, handles: Iterable[str]) -> SystemState:
        """Take back the actions with these handles; one that is not in force is no error."""
        gone = set(handles)
        return replace(self, in_force={key: each for key, each in self.in_force.items() if key not in gone})

    def set_figures(self, links: Mapping[Pair, Link]) -> SystemState:
        """Give links other figures of their own."""
        return replace(self, set_links={**self.set_links, **links})

    def set_speed(self, device: str, factor: float) -> SystemState:
        """Give a device this share of its own speed."""
        return replace(self, set_speeds={**self.set_speeds, device: factor})

    def own_link(self, pair: Pair) -> Link:
        """Return a link without the actions in force; raise KeyError where there is none."""
        return self.set_links.get(pair) or self.links[pair]

    def from_first(self, pair: Pair) -> bool:
        """Return whether a link leads away from the first device of the scenario (a preset's down direction)."""
        return pair[0] == next(iter(self.devices))

    def link(self, pair: Pair) -> Link:
        """Return a directed link as it is now; raise KeyError where there is none."""
        link = self.own_link(pair)
        for action in self.in_force.values():
            if action.touches(pair):
                link = action.impair(link, pair, self)
        return link

    def factor(self, device: str) -> float:
        """Return the share of its own speed at which a device computes now."""
        factor = self.set_speeds.get(device, 1.0)
        for action in self.in_force.values():
            if action.slows(device):
                factor = action.slow(factor, self.speeds[device])
        return factor

    def speed(self, device: str) -> float:
        """Return the FLOP/s at which a device computes now."""
        return self.speeds[device] * self.factor(device)

    def changed(self, since: SystemState) -> StateDiff:
        """Return what differs from earlier conditions of the same run."""
        differing = [
            action
            for one, other in ((self, since), (since, self))
            for handle, action in one.in_force.items()
            if other.in_force.get(handle) is not action
        ]
        reset = _differing(self.set_speeds, since.set_speeds)
        links = {pair: (self.link(pair), since.link(pair)) for pair in self._suspects(since, differing)}
        speeds = {
            name: (self.factor(name), since.factor(name))
            for name in self.speeds
            if name in reset or any(action.slows(name) for action in differing)
        }
        return StateDiff(
            {name: state for name, state in self.devices.items() if state != since.devices[name]},
            {pair: link for pair, (link, before) in links.items() if link != before},
            {name: factor for name, (factor, before) in speeds.items() if factor != before},
        )

    def _suspects(self, since: SystemState, differing: Collection[FaultAction[Any]]) -> Iterable[Pair]:
        """Return the links that may differ, in order: there may be a million, and most changes are to one."""
        reset = _differing(self.set_links, since.set_links)
        if not differing:
            return sorted(reset)
        return [pair for pair in self.links if pair in reset or any(action.touches(pair) for action in differing)]


K = TypeVar("K")


def _differing(one: Mapping[K, object], other: Mapping[K, object]) -> set[K]:
    """Return the keys whose values are not the same objects."""
    if one is other:
        return set()
    return {key for key in one.keys() | other.keys() if one.get(key) is not other.get(key)}


class RecordedStep(Protocol):
    """Something that changes conditions: an action, its undoing, entries of a trace, a setting made by hand."""

    @property
    def switches(self) -> bool:
        """Whether it changes the state of a device and nothing else."""

    def apply(self, now: SystemState) -> SystemState:
        """Return the conditions after it."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the fields of each event to record for it."""


class FaultTarget(Protocol):
    """The devices of a run and what links them: containers and their shaper, or a simulated world."""

    @property
    def shown(self) -> SystemState:
        """The links and speeds in force; what it says of the devices' states may be out of date."""

    def states(self) -> Mapping[str, DeviceState]:
        """Look up the state of every device."""

    def lock(self) -> AbstractContextManager[object]:
        """Keep others from changing links and speeds within a block."""

    def show(self, now: SystemState, changed: StateDiff) -> None:
        """Let the devices have the links and speeds that changed, at once; ``now`` is what is in force with them."""

    def kill(self, device: str) -> None:
        """End a device at once: its memory is lost."""

    def restart(self, device: str) -> None:
        """Boot a device that is down, with the links and the speed that are in force."""

    def retire(self, device: str) -> None:
        """Ask a device to leave; once its program has returned, it is off."""
        ...

    def pause(self, device: str) -> None:
        """Let a device stand still: its memory is kept."""

    def resume(self, device: str) -> None:
        """Let a paused device go on."""


def apply_step(step: RecordedStep, machines: FaultTarget) -> StateDiff:
    """Bring about the conditions after a step; return what changed. A boot takes long, so switches take no lock."""
    if step.switches:
        before = replace(machines.shown, devices=machines.states())
        changed = step.apply(before).changed(before)
        for name, state in changed.devices.items():
            _switch(machines, name, before.devices[name], state)
        return changed
    with machines.lock():
        before = machines.shown
        after = step.apply(before)
        changed = after.changed(before)
        machines.show(after, changed)
    return changed


def _switch(machines: FaultTarget, device: str, before: DeviceState, after: DeviceState) -> None:
    if after == "down":
        machines.kill(device)
    elif after == "retired":
        machines.retire(device)
    elif after == "paused":
        machines.pause(device)
    elif before == "paused":
        machines.resume(device)
    else:
        machines.restart(device)
