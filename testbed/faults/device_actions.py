"""Actions on one device: kill, restart, retire, join, pause, resume, throttle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from testbed.common.errors import Key
from testbed.common.part import ConfigModel, Name
from testbed.common.quantities import Speed, format_speed
from testbed.faults.conditions import (
    DeviceState,
    FaultAction,
    FaultContext,
    SystemState,
)

States = Mapping[DeviceState, DeviceState]
"""Transitions between device states; states without an entry stay unchanged."""
_BOOTS: States = {"down": "up", "retired": "up"}
"""Transitions of a device that is switched on."""
MIN_FACTOR = 1e-6
"""Lowest share of full speed of a device."""


class StateAction(FaultAction[str]):
    """Base of actions changing only the state of a device.

    Such an action is never in force under a handle: a killed device that a user has restarted is simply up.
    """

    switches = True
    changes: ClassVar[States]
    """Transitions of the action."""
    restores: ClassVar[States] = {}
    """Transitions of the reversal; none by default, since a repair is not reverted."""

    def apply(self, state: SystemState, handle: str) -> SystemState:
        """Move the device to the next state."""
        return state.switch(self.value, self.changes)

    def undo(self, state: SystemState, handle: str) -> SystemState:
        """Restore the previous state of the device."""
        return state.switch(self.value, self.restores)


class Kill(StateAction):
    """Stop a device abruptly: memory is lost, the disk is kept."""

    name = "kill"
    summary = "the device ends at once, its memory is lost"
    changes: ClassVar[States] = {"up": "down", "paused": "down"}
    restores = _BOOTS


class Restart(StateAction):
    """Boot a killed device."""

    name = "restart"
    summary = "a killed device boots again"
    undoes: ClassVar[tuple[str, ...]] = (Kill.name,)
    waits = True
    changes = _BOOTS


class Retire(StateAction):
    """Ask a device to leave; the device stops when the program has handed over the state and returned."""

    name = "retire"
    summary = "graceful shutdown: the device hands over its state, then stops"
    waits = True
    changes: ClassVar[States] = {"up": "retired"}
    restores = _BOOTS


class Join(Restart):
    """Boot a killed or retired device."""

    name = "join"
    summary = "a device that was killed or has retired boots again"
    undoes = (Kill.name, Retire.name)


class Pause(StateAction):
    """Freeze a device: memory and connections are kept."""

    name = "pause"
    summary = "the device freezes; its memory is kept"
    changes: ClassVar[States] = {"up": "paused"}
    restores: ClassVar[States] = {"paused": "up"}


class Resume(StateAction):
    """Continue a paused device."""

    name = "resume"
    summary = "continue a paused device"
    undoes = (Pause.name,)
    changes = Pause.restores


class ThrottlePart(ConfigModel):
    """A device with a reduced speed."""

    device: Name = Field(description="the device")
    speed: Speed | None = Field(None, gt=0, description="speed during the fault")
    slowdown: float | None = Field(
        None, ge=1, le=1e6, description="factor by which computations take longer"
    )

    @model_validator(mode="after")
    def _check_one_value(self) -> Self:
        if (self.speed is None) == (self.slowdown is None):
            raise ValueError("set exactly one of 'speed' and 'slowdown'")
        return self

    def slowed(self, factor: float, own: float) -> float:
        """Return the share of full speed left of the share ``factor``; ``own`` is the full speed in FLOP/s.

        A speed replaces the share, a slowdown divides it.
        """
        if self.speed is not None:
            return self.speed / own
        return factor / (self.slowdown or 1.0)


class Throttle(FaultAction[ThrottlePart]):
    """Slow down a device, as overheating would."""

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

    def problems(self, context: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield an error for a speed below the minimum."""
        if self.value.speed is None:
            return
        speeds = {device.name: device.speed for device in context.devices}
        minimum = speeds[self.value.device] * MIN_FACTOR
        if self.value.speed < minimum:
            yield (
                ("speed",),
                f"is less than a millionth of the device's own speed: use at least {format_speed(minimum)}",
            )

    def slows(self, device: str) -> bool:
        """Return whether the device is the target."""
        return device == self.value.device

    def slow(self, factor: float, own: float) -> float:
        """Return the share of speed left by the throttle."""
        return self.value.slowed(factor, own)


class Unthrottle(FaultAction[str]):
    """Restore the full speed of a throttled device."""

    name = "unthrottle"
    summary = "a throttled device has its own speed again"
    undoes = (Throttle.name,)
