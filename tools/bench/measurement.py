"""One measured value beside its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A measured value with a target, with bounds on both sides, or with neither.

    >>> Measurement("delay", 5.2, "ms", target=5.5).reached
    True
    >>> Measurement("rate", 97.0, "%", between=(96.0, 101.0)).to_json()["target"]
    '96 to 101'
    """

    name: str
    """The measured property, in words."""
    value: float
    unit: str
    """Unit of value, target and bounds; empty for ratios and shares."""
    target: float | None = None
    """A single bound; see `at_most`."""
    at_most: bool = True
    """Whether the target is an upper bound, else a lower one."""
    detail: str = ""
    """Further information for the reader, such as the number of repetitions."""
    between: tuple[float, float] | None = None
    """Lower and upper bound, instead of a target."""

    @property
    def reached(self) -> bool | None:
        """Whether the value is within its bounds; None without bounds."""
        if self.between is not None:
            lowest, highest = self.between
            return lowest <= self.value <= highest
        if self.target is None:
            return None
        if self.at_most:
            return self.value <= self.target
        return self.value >= self.target

    @property
    def bounds_text(self) -> str | None:
        """The bounds as text; None without bounds."""
        if self.between is not None:
            lowest, highest = self.between
            return f"{lowest:.4g} to {highest:.4g}"
        if self.target is None:
            return None
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.target:g}"

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values; ``target`` has the bounds as text."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "target": self.bounds_text,
            "reached": self.reached,
            "detail": self.detail,
        }
