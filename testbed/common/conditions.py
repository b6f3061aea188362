"""Conditions on values: comparisons (``>= 0.9``, ``== true``) and tolerances (``within 10% of 0.25s``).

Times and sizes are compared with written units, shares with a number or per cent.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testbed.common.formats import MetricKind
from testbed.common.quantities import parse_duration, parse_fraction, parse_size

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_COMPARISON = re.compile(r"(>=|<=|==|!=|>|<)\s*(\S.*)")
_TOLERANCE = re.compile(r"within\s+(\S+)\s+of\s+(\S.*)")


@dataclass(frozen=True)
class Condition:
    """A comparison of one metric with a value or tolerance.

    >>> Condition("within", 0.25, tolerance=0.1).holds(0.26)
    True
    >>> Condition(">=", 0.9).holds(None)
    False
    """

    operator: str
    """One of >= <= > < == != within."""
    target: float | str | bool
    """The value to compare with, in base units."""
    tolerance: float = 0.0
    """For ``within``, a fraction of the target."""

    def holds(self, value: object) -> bool:
        """Return whether a value fulfils the condition; false for a missing value or text."""
        if isinstance(self.target, str | bool):
            # Types must agree, since True == 1 in Python.
            if type(value) is not type(self.target):
                return False
            return _COMPARE[self.operator](value, self.target)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        # Every comparison with NaN is false except `!=`, which a diverged run must not fulfil.
        if math.isnan(value):
            return False
        if self.operator == "within":
            return abs(value - self.target) <= self.tolerance * abs(self.target)
        return _COMPARE[self.operator](value, self.target)


def parse_condition(text: str, kind: MetricKind) -> Condition:
    """Parse a condition for a metric of the given kind. Raises ValueError with a suggestion.

    >>> parse_condition("<= 250ms", "seconds")
    Condition(operator='<=', target=0.25, tolerance=0.0)
    """
    has_order = kind not in ("bool", "text")
    if match := _TOLERANCE.fullmatch(text.strip()):
        if not has_order:
            raise ValueError(
                f"'{text}' asks for a tolerance, which this metric cannot have: write '== ...'"
            )
        target = parse_target(match[2], kind)
        return Condition("within", target, parse_fraction(match[1]))
    match = _COMPARISON.fullmatch(text.strip())
    if not match:
        raise ValueError(
            f"'{text}' is not a condition: write one such as '>= 0.9', '== 1', or 'within 10% of 0.25s'"
        )
    if not has_order and match[1] not in ("==", "!="):
        raise ValueError(
            f"'{text}' uses an order comparison for a value without an order: write '== ...'"
        )
    return Condition(match[1], parse_target(match[2], kind))


def parse_target(text: str, kind: MetricKind) -> float | str | bool:
    """Parse a value of the given kind to base units. Raises ValueError with a suggestion.

    >>> parse_target("4ms", "seconds")
    0.004
    """
    text = text.strip()
    # Times and sizes need a unit, because users would expect different units.
    if kind == "seconds":
        return parse_duration(text)
    if kind == "bytes":
        return parse_size(text)
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError(f"'{text}' is neither true nor false")
        return text == "true"
    if kind == "text":
        return text
    if kind == "share" and text.endswith("%"):
        return parse_fraction(text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"'{text}' is not a finite number")
    return number
