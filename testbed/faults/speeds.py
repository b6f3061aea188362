"""What faults and a trace have done to the devices' speeds so far, as a value: each change returns a new state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.faults.parts import ThrottlePart
    from testbed.hardware import DeviceSpec

MIN_FACTOR = 1e-6
"""Least share of its own speed at which a device can compute."""


@dataclass(frozen=True)
class Speeds:
    """How fast each device computes right now, as a share of its own speed.

    Throttles of one device pile up: a speed counts whatever was before it, a slowdown slows what is left. Each goes by
    the handle that its maker chose. What a trace says stands below all of them.
    """

    own: Mapping[str, float]
    """Device -> FLOP/s that its scenario gives it."""
    traced: Mapping[str, float] = field(default_factory=dict)
    """Device -> share of its own speed that a trace has given it."""
    throttles: Mapping[str, ThrottlePart] = field(default_factory=dict)
    """In the order in which they were made."""

    @staticmethod
    def of(devices: Iterable[DeviceSpec]) -> Speeds:
        """Return the speeds of devices that nothing has happened to."""
        return Speeds({device.name: device.speed for device in devices})

    def throttle(self, part: ThrottlePart, handle: str) -> Speeds:
        """Slow a device down."""
        if handle in self.throttles:
            raise ValueError(f"'{handle}' is in force already: undo it first, or choose another handle")
        return replace(self, throttles={**self.throttles, handle: part})

    def undo(self, handle: str) -> Speeds:
        """Take back one throttle; one that is gone already is no error."""
        return replace(self, throttles={key: part for key, part in self.throttles.items() if key != handle})

    def unthrottle(self, device: str) -> Speeds:
        """Take back every throttle of a device."""
        return replace(self, throttles={key: part for key, part in self.throttles.items() if part.device != device})

    def set(self, device: str, factor: float) -> Speeds:
        """Give a device this share of its own speed, under whatever throttles are in force."""
        return replace(self, traced={**self.traced, device: factor})

    def factor(self, device: str) -> float:
        """Return the share of its own speed at which a device computes; above 1 where it is faster."""
        factor = self.traced.get(device, 1.0)
        for part in self.throttles.values():
            if part.device == device:
                factor = slowed(factor, part, self.own[device])
        return factor

    def speed(self, device: str) -> float:
        """Return FLOP/s of a device as they are now."""
        return self.own[device] * self.factor(device)

    def changed(self, since: Speeds) -> dict[str, float]:
        """Return the factors that differ from an earlier state of the same devices."""
        parts = [part for state in (self, since) for part in state.throttles.values()]
        devices = dict.fromkeys([*self.traced, *since.traced, *(part.device for part in parts)])
        return {name: self.factor(name) for name in devices if self.factor(name) != since.factor(name)}


def slowed(factor: float, part: ThrottlePart, own: float) -> float:
    """Return the share of a device's own speed that a throttle leaves of the share it had."""
    return part.speed / own if part.speed is not None else factor / (part.slowdown or 1.0)
