"""One measured figure beside its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A measured value with a target or bounds.

    >>> Measurement("delay", 5.2, "ms", target=5.5).reached
    True
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = True
    """Whether the target is an upper bound, else a lower one."""
    detail: str = ""
    between: tuple[float, float] | None = None
    """Lower and upper bound, instead of a target."""

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.between is not None:
            return self.between[0] <= self.value <= self.between[1]
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values."""
        bound = None
        if self.target is not None:
            bound = f"{'<=' if self.at_most else '>='} {self.target:g}"
        if self.between is not None:
            bound = f"{self.between[0]:.4g} to {self.between[1]:.4g}"
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": bound,
            "reached": self.reached,
            "detail": self.detail,
        }
