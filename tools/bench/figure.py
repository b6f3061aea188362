"""One measured figure beside its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """A value, what it should be, and whether it is."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = True
    """Whether the target bounds from above; from below otherwise."""
    detail: str = ""
    between: tuple[float, float] | None = None
    """Bounds from both sides, instead of a target."""

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.between is not None:
            return self.between[0] <= self.value <= self.between[1]
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        """Return the figure as JSON values."""
        bound = (
            None
            if self.target is None
            else f"{'<=' if self.at_most else '>='} {self.target:g}"
        )
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
