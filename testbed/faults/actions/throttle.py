"""A device that computes more slowly, and at its own speed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import Field, model_validator

from testbed.common.errors import Key
from testbed.common.part import Name, Part
from testbed.common.quantities import Speed, format_speed
from testbed.faults.conditions import FaultAction
from testbed.faults.setting import Setting

MIN_FACTOR = 1e-6
"""Least share of its own speed at which a device can compute."""


class ThrottlePart(Part):
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
        """Return what is left of a share of a device's own speed, which is ``own`` FLOP/s.

        A speed counts whatever was before it, a slowdown slows what is left.
        """
        return self.speed / own if self.speed is not None else factor / (self.slowdown or 1.0)


class Throttle(FaultAction[ThrottlePart]):
    """A device computes more slowly, as when it is hot."""

    name = "throttle"

    @property
    def target(self) -> str:
        """The device."""
        return self.value.device

    def named(self) -> list[tuple[Key, str]]:
        """Return the device."""
        return [(("device",), self.value.device)]

    def problems(self, setting: Setting) -> Iterator[tuple[Key, str]]:
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
    undoes = (Throttle.name,)
