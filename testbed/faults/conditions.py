"""The state of devices, links and speeds at one moment, and the faults and repairs (actions) that change it.

States and actions are values: applying an action to a `SystemState` returns a new one. `apply_step` then applies the
difference to a `FaultTarget`: containers on the real clock, or the simulated world on the virtual clock.

Most actions on links and speeds stay in force until their reversal. Each is stored under a handle, a unique name such
as ``fault-0`` for the first fault of a scenario.
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
"""State of a device. A booting device is "up"; a retired device soon becomes "down"."""
FaultPhase = Literal["strike", "undo"]
"""Whether an action is applied or reverted."""
ALL = "all"
"""Target of an action on all devices and links."""

V = TypeVar("V")
"""Type of the value that an action has in the scenario."""


@dataclass(frozen=True)
class FaultContext:
    """Facts of a run for the validation of faults."""

    devices: Sequence[DeviceSpec]
    links: Mapping[Pair, Link]
    """Links of the scenario."""
    traced: Sequence[tuple[Pair, Link]] = ()
    """Each link that the scenario's link trace changes, after each change."""
    time_limit: float = math.inf
    """Seconds after which an unfinished run fails."""
    radio: Radio | None = None
    """The radio by which the devices hear each other."""


@dataclass(frozen=True)
class FaultAction(Generic[V]):
    """A fault or repair. A subclass defines the scenario key, the effect and the reversal.

    Both clocks carry out the effect. An action on devices overrides `apply` and `undo`. An action on links overrides
    `touches`, which selects the links, and `impair`, which changes them; an action on speeds overrides `slows` and
    `slow`. Changes of links and speeds last for as long as the action is in force.

    >>> from dataclasses import replace
    >>> from testbed.faults.conditions import FaultAction
    >>> class Isolate(FaultAction[str]):
    ...     name = "isolate"
    ...     summary = "all links of the device drop everything"
    ...     undone_by = ("heal",)
    ...     def touches(self, pair):
    ...         return self.value in pair
    ...     def impair(self, link, pair, state):
    ...         return replace(link, up=False)
    """

    value: V
    """Value of the scenario key."""

    name: ClassVar[str]
    """The key in a scenario."""
    summary: ClassVar[str] = ""
    """Description in the schema and in the help of `testbed fault`."""
    schema: ClassVar[Any] = Name
    """Type of the value in a scenario: a device name, or a `ConfigModel` with keys."""
    undoes: ClassVar[tuple[str, ...]] = ()
    """Names of the actions on the same target that this action undoes; a repair has at least one."""
    undone_by: ClassVar[tuple[str, ...]] = ()
    """Names of further actions on the same target that undo this action."""
    switches: ClassVar[bool] = False
    """Whether the action only changes the state of a device."""
    waits: ClassVar[bool] = False
    """Whether the action lasts until the device has booted or has handed over its state."""

    @property
    def target(self) -> str:
        """The target as text: a device, a link, groups of devices, or all."""
        return str(self.value)

    def named(self) -> list[tuple[Key, str]]:
        """Return the key relative to the action, and the name, of every device named by the action."""
        return [((), self.target)]

    def problems(self, context: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield the key relative to the action, and the text, of each problem in a run.

        Called only if all named devices exist.
        """
        yield from ()

    @property
    def reason_against_for(self) -> str | None:
        """Reason why the action cannot have a duration; None if it can."""
        if not self.undoes:
            return None
        return f"'{self.name}' is a repair and has no duration: remove 'for'"

    def mends(self, kind: type[FaultAction[Any]], target: str) -> bool:
        """Return whether the action undoes an action of the given class and target."""
        # Either class may state the relation, because a package's fault cannot extend the testbed's repairs.
        if kind.name not in self.undoes and self.name not in kind.undone_by:
            return False
        return self.target in (ALL, target)

    def turns(
        self, began: float, ends: float
    ) -> Iterator[tuple[FaultPhase, float]] | None:
        """Return the phases and times of a repeating action from ``began`` to ``ends``, in seconds.

        None for an action that strikes once.
        """
        return None

    def apply(self, state: SystemState, handle: str) -> SystemState:
        """Return the state after the action: a fault is put in force, a repair ends the matching faults.

        Raises ValueError for a handle in use.
        """
        if not self.undoes:
            return state.with_action(self, handle)
        mended_handles = []
        for fault_handle, fault in state.in_force.items():
            if self.mends(type(fault), fault.target):
                mended_handles.append(fault_handle)
        return state.without_actions(mended_handles)

    def undo(self, state: SystemState, handle: str) -> SystemState:
        """Return the state without the action; unchanged if already undone."""
        return state.without_actions([handle])

    def touches(self, pair: Pair) -> bool:
        """Return whether the action changes a directed link while in force."""
        return False

    def impair(self, link: Link, pair: Pair, state: SystemState) -> Link:
        """Return a touched link as changed by the action, in the given state."""
        return link

    def slows(self, device: str) -> bool:
        """Return whether the action changes the speed of a device while in force."""
        return False

    def slow(self, factor: float, own: float) -> float:
        """Return the share of the device's full speed left by the action.

        ``factor`` is the share before the action, and ``own`` the full speed in FLOP/s.
        """
        return factor


@dataclass(frozen=True)
class StateDiff:
    """Difference between two system states."""

    devices: dict[str, DeviceState] = field(default_factory=dict)
    """New states of the changed devices."""
    links: dict[Pair, Link] = field(default_factory=dict)
    """Current values of the changed links."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Share of full speed by device, for devices whose speed changed."""


@dataclass(frozen=True)
class SystemState:
    """State of the devices, links and speeds of a run at one moment.

    A link trace or a user's command can set properties of links and shares of speed. The actions in force apply on top
    of these values, one after the other.

    >>> state = SystemState.of([DeviceSpec("a", 1e9, 1e9)], {})
    >>> state.set_speed("a", 0.5).speed("a")
    500000000.0
    """

    devices: Mapping[str, DeviceState]
    """State of each device, in the order of the scenario."""
    links: Mapping[Pair, Link]
    """Links of the scenario."""
    speeds: Mapping[str, float]
    """Full speed in FLOP/s by device, as in the scenario."""
    set_links: Mapping[Pair, Link] = field(default_factory=dict)
    """Links set by a link trace or a command, which replace those of the scenario."""
    set_speeds: Mapping[str, float] = field(default_factory=dict)
    """Share of full speed by device, set by a link trace; above 1 is faster than in the scenario."""
    in_force: Mapping[str, FaultAction[Any]] = field(default_factory=dict)
    """Actions on links and speeds by handle, in the order of application."""
    radio: Radio | None = None
    """The radio by which the devices hear each other."""

    @staticmethod
    def of(
        devices: Iterable[DeviceSpec],
        links: Mapping[Pair, Link],
        radio: Radio | None = None,
    ) -> SystemState:
        """Return the state at the start of a run."""
        speeds = {device.name: device.speed for device in devices}
        return SystemState(dict.fromkeys(speeds, "up"), links, speeds, radio=radio)

    def switch(
        self, device: str, transitions: Mapping[DeviceState, DeviceState]
    ) -> SystemState:
        """Return the state after a transition of a device; unchanged if the device's state has no transition."""
        device_state = self.devices[device]
        if device_state not in transitions:
            return self
        devices = {**self.devices, device: transitions[device_state]}
        return replace(self, devices=devices)

    def with_action(self, action: FaultAction[Any], handle: str) -> SystemState:
        """Return the state with an action put in force. Raises ValueError for a handle in use."""
        if handle in self.in_force:
            raise ValueError(
                f"'{handle}' is already active: undo it first, or choose another handle"
            )
        return replace(self, in_force={**self.in_force, handle: action})

    def without_actions(self, handles: Iterable[str]) -> SystemState:
        """Return the state without the actions of some handles; unknown handles are ignored."""
        remaining = dict(self.in_force)
        for handle in handles:
            remaining.pop(handle, None)
        return replace(self, in_force=remaining)

    def with_links(self, links: Mapping[Pair, Link]) -> SystemState:
        """Return the state with links replacing the scenario's links."""
        return replace(self, set_links={**self.set_links, **links})

    def set_speed(self, device: str, factor: float) -> SystemState:
        """Return the state with another share of full speed of a device."""
        return replace(self, set_speeds={**self.set_speeds, device: factor})

    def own_link(self, pair: Pair) -> Link:
        """Return a link without the actions in force. Raises KeyError for an unknown link."""
        return self.set_links.get(pair) or self.links[pair]

    def is_from_first(self, pair: Pair) -> bool:
        """Return whether a link leads away from the first device of the scenario (a preset's down direction)."""
        return pair[0] == next(iter(self.devices))

    def link(self, pair: Pair) -> Link:
        """Return a directed link with all actions in force. Raises KeyError for an unknown link."""
        link = self.own_link(pair)
        for action in self.in_force.values():
            if action.touches(pair):
                link = action.impair(link, pair, self)
        return link

    def speed_factor(self, device: str) -> float:
        """Return the current share of full speed of a device."""
        factor = self.set_speeds.get(device, 1.0)
        for action in self.in_force.values():
            if action.slows(device):
                factor = action.slow(factor, self.speeds[device])
        return factor

    def speed(self, device: str) -> float:
        """Return the current speed of a device in FLOP/s."""
        return self.speeds[device] * self.speed_factor(device)

    def diff_since(self, earlier: SystemState) -> StateDiff:
        """Return the difference to an earlier state of the same run."""
        # A network may have a million links, so only those that these actions touch, or that were set, are compared.
        changed_actions = [
            *_values_not_in(self.in_force, earlier.in_force),
            *_values_not_in(earlier.in_force, self.in_force),
        ]
        diff = StateDiff()
        for name, state in self.devices.items():
            if state != earlier.devices[name]:
                diff.devices[name] = state
        for pair in self._candidate_links(earlier, changed_actions):
            link = self.link(pair)
            if link != earlier.link(pair):
                diff.links[pair] = link
        set_devices = _differing_keys(self.set_speeds, earlier.set_speeds)
        for name in self.speeds:
            is_slowed = any(action.slows(name) for action in changed_actions)
            if name in set_devices or is_slowed:
                factor = self.speed_factor(name)
                if factor != earlier.speed_factor(name):
                    diff.speeds[name] = factor
        return diff

    def _candidate_links(
        self, earlier: SystemState, changed_actions: Collection[FaultAction[Any]]
    ) -> Iterable[Pair]:
        """Return the links that may differ from an earlier state, in order."""
        set_pairs = _differing_keys(self.set_links, earlier.set_links)
        # A change by a link trace needs no pass over all links of the network.
        if not changed_actions:
            return sorted(set_pairs)
        candidates = []
        for pair in self.links:
            is_touched = any(action.touches(pair) for action in changed_actions)
            if pair in set_pairs or is_touched:
                candidates.append(pair)
        return candidates


K = TypeVar("K")


def _differing_keys(one: Mapping[K, object], other: Mapping[K, object]) -> set[K]:
    """Return the keys of either mapping whose values are different objects."""
    if one is other:
        return set()
    keys = one.keys() | other.keys()
    return {key for key in keys if one.get(key) is not other.get(key)}


def _values_not_in(one: Mapping[K, V], other: Mapping[K, V]) -> list[V]:
    """Return the values of ``one`` for which ``other`` has a different object, or none, under the same key."""
    return [value for key, value in one.items() if other.get(key) is not value]


class RecordedStep(Protocol):
    """A change of the system state: an action, its reversal, changes by a link trace, or a user's command."""

    @property
    def switches(self) -> bool:
        """Whether the step only changes the state of a device."""

    def apply(self, state: SystemState) -> SystemState:
        """Return the state after the step."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and fields of each event to record."""


class FaultTarget(Protocol):
    """The devices and links of a run, as containers with a shaper or as a simulated world."""

    @property
    def current(self) -> SystemState:
        """The current links and speeds. The states of devices may be outdated; `states` returns the current ones."""

    def states(self) -> Mapping[str, DeviceState]:
        """Look up the current state of every device."""

    def lock(self) -> AbstractContextManager[object]:
        """Prevent concurrent changes of links and speeds within a block."""

    def apply(self, state: SystemState, changed: StateDiff) -> None:
        """Apply changed links and speeds at once; ``state`` is the complete new state."""

    def kill(self, device: str) -> None:
        """Stop a device abruptly; the memory is lost."""

    def restart(self, device: str) -> None:
        """Boot a stopped device with the current links and speed."""

    def retire(self, device: str) -> None:
        """Ask a device to leave; the device stops when the program returns."""
        ...

    def pause(self, device: str) -> None:
        """Freeze a device; the memory is kept."""

    def resume(self, device: str) -> None:
        """Continue a paused device."""


def apply_step(step: RecordedStep, target: FaultTarget) -> StateDiff:
    """Apply a step and return the resulting changes. State changes take no lock because booting is slow."""
    if step.switches:
        # The stored states may be outdated, since a device may have died by itself.
        before = replace(target.current, devices=target.states())
        diff = step.apply(before).diff_since(before)
        for name, state in diff.devices.items():
            _switch_device(target, name, before.devices[name], state)
        return diff
    # Two concurrent steps would start from the same state, and the second one would undo the first.
    with target.lock():
        before = target.current
        after = step.apply(before)
        diff = after.diff_since(before)
        target.apply(after, diff)
    return diff


def _switch_device(
    target: FaultTarget, device: str, before: DeviceState, after: DeviceState
) -> None:
    """Bring a device from one state to another."""
    if after == "down":
        target.kill(device)
    elif after == "retired":
        target.retire(device)
    elif after == "paused":
        target.pause(device)
    # Up again: a paused device continues where it was, any other one boots.
    elif before == "paused":
        target.resume(device)
    else:
        target.restart(device)
