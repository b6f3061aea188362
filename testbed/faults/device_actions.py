"""What can happen to one device: it loses its power, leaves, stands still or computes more slowly, and recovers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from testbed.common.errors import Key
from testbed.common.part import ConfigModel, Name
from testbed.common.quantities import Speed, format_speed
from testbed.faults.conditions import DeviceState, FaultAction, FaultContext, SystemState

States = Mapping[DeviceState, DeviceState]
"""The state that a device is in -> the one that it is given; in every other state it stays."""
_BOOTS: States = {"down": "up", "retired": "up"}
MIN_FACTOR = 1e-6
"""Least share of its own speed at which a device can compute."""


class StateAction(FaultAction[str]):
    """Changes the state of a device and nothing else."""

    switches = True
    changes: ClassVar[States]
    restores: ClassVar[States] = {}
    """What undoing it changes."""

    def apply(self, now: SystemState, handle: str) -> SystemState:
        """Give the device its next state."""
        return now.switch(self.value, self.changes)

    def undo(self, now: SystemState, handle: str) -> SystemState:
        """Give the device back the state that it had."""
        return now.switch(self.value, self.restores)


class Kill(StateAction):
    """A device ends at once: its memory is lost, its disk is kept."""

    name = "kill"
    summary = "the device ends at once, its memory is lost"
    changes: ClassVar[States] = {"up": "down", "paused": "down"}
    restores = _BOOTS


class Restart(StateAction):
    """A killed device boots."""

    name = "restart"
    summary = "a killed device boots again"
    undoes: ClassVar[tuple[str, ...]] = (Kill.name,)
    waits = True
    changes = _BOOTS


class Retire(StateAction):
    """A device is asked to leave; it is off as soon as its program, which hands over what it holds, has returned."""

    name = "retire"
    summary = "the device is told to leave, hands over what it holds and is off"
    waits = True
    changes: ClassVar[States] = {"up": "retired"}
    restores = _BOOTS


class Join(Restart):
    """A device that was killed or has retired boots."""

    name = "join"
    summary = "a device that was killed or has retired boots again"
    undoes = (Kill.name, Retire.name)


class Pause(StateAction):
    """A device stands still: its memory and its connections are kept."""

    name = "pause"
    summary = "the device stands still, its memory is kept"
    changes: ClassVar[States] = {"up": "paused"}
    restores: ClassVar[States] = {"paused": "up"}


class Resume(StateAction):
    """A paused device goes on."""

    name = "resume"
    summary = "a paused device goes on"
    undoes = (Pause.name,)
    changes = Pause.restores


class ThrottlePart(ConfigModel):
    """A device that computes more slowly than its own speed."""

    device: Name = Field(description="which one")
    speed: Speed | None = Field(None, gt=0, description="compute at this speed")
    slowdown: float | None = Field(None, ge=1, le=1e6, description="factor by which work takes longer")

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        if (self.speed is None) == (self.slowdown is None):
            raise ValueError("say how slow with exactly one of 'speed' and 'slowdown'")
        return self

    def slowed(self, factor: float, own: float) -> float:
        """Return what is left of a share of its own speed, ``own`` FLOP/s: a speed replaces it, a slowdown slows it."""
        return self.speed / own if self.speed is not None else factor / (self.slowdown or 1.0)


class Throttle(FaultAction[ThrottlePart]):
    """A device computes more slowly, as when it is hot."""

    name = "throttle"
    summary = "a device computes more slowly, as when it is hot"
    schema = ThrottlePart

    @property
    def target(self) -> str:
        """The device."""
        return self.value.device

    def named(self) -> list[tuple[Key, str]]:
        """Return the device."""
        return [(("device",), self.value.device)]

    def problems(self, setting: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield a speed that is too low."""
        if self.value.speed is None:
            return
        own = next(device.speed for device in setting.devices if device.name == self.value.device)
        if self.value.speed < own * MIN_FACTOR:
            lowest = format_speed(own * MIN_FACTOR)
            yield ("speed",), f"is less than a millionth of the device's own speed: use at least {lowest}"

    def slows(self, device: str) -> bool:
        """Return whether this is the device."""
        return device == self.value.device

    def slow(self, factor: float, own: float) -> float:
        """Return the share that the throttle leaves."""
        return self.value.slowed(factor, own)


class Unthrottle(FaultAction[str]):
    """A throttled device has its own speed again."""

    name = "unthrottle"
    summary = "a throttled device has its own speed again"
    undoes = (Throttle.name,)
