"""Our value of a row, and the word that compares it with the paper's; papers/README.md defines the words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from testbed.common.intervals import interval
from testbed_comparison.rows import (
    UNITS,
    Difference,
    Expression,
    Ratio,
    Row,
    Saving,
    Value,
    terms,
)

WITHIN = 0.1
"""Largest half width of an interval that agrees, and largest deviation of a calibrated value, as a share."""
ROUNDING = 1e-9
NEGLIGIBLE = 0.001
"""Share by which two times or sizes may differ without a ranking, since single runs differ by such trifles."""
Word = Literal[
    "exact",
    "agrees",
    "same ranking",
    "calibrated",
    "differs",
    "not comparable",
    "not run",
]
WORDS: tuple[Word, ...] = get_args(Word)


@dataclass(frozen=True)
class Ours:
    """Values of our runs for a row, in the paper's unit."""

    low: float
    """The mean; of a range the least mean."""
    high: float
    half_width: float | None
    """Half width of the 95 % confidence interval; None for a single run and for a range."""
    runs: int
    is_timing: bool = True
    """Whether the runs compute times and sizes alone, so that one run is enough."""

    @property
    def least(self) -> float:
        """The lower end of the interval."""
        return self.low - (self.half_width or 0.0)

    @property
    def most(self) -> float:
        """The upper end of the interval."""
        return self.high + (self.half_width or 0.0)


def combine(
    expression: Expression, values: Callable[[Value], Sequence[float | None]]
) -> list[float]:
    """Return an expression's value for each repetition that has it.

    Repetitions share their seed, so both values of a pair come from the same one.
    """
    if isinstance(expression, Value):
        return [number for number in values(expression) if number is not None]
    pairs = []
    for one, other in zip(*map(values, terms(expression)), strict=False):
        if one is not None and other is not None:
            pairs.append((one, other))
    if isinstance(expression, Difference):
        return [one - other for one, other in pairs]
    ratios = [one / other for one, other in pairs if other]
    return [1 - ratio for ratio in ratios] if isinstance(expression, Saving) else ratios


def measure(
    expressions: Sequence[Expression],
    unit: str,
    values: Callable[[Value], Sequence[float | None]],
    *,
    is_timing: bool,
) -> Ours | None:
    """Return our value, or our range of several expressions; None where a run is missing.

    ``values`` returns the numbers of a value by repetition, in seconds, bytes or shares. The result is in ``unit``.
    """
    measured: list[list[float]] = []
    for expression in expressions:
        numbers = combine(expression, values)
        if not numbers:
            return None
        measured.append([number / UNITS[unit] for number in numbers])
    runs = min(map(len, measured))
    if len(measured) == 1:
        mean, half_width = interval(measured[0])
        return Ours(mean, mean, half_width, runs, is_timing)
    means = [interval(numbers)[0] for numbers in measured]
    return Ours(min(means), max(means), None, runs, is_timing)


def word_for(row: Row, ours: Ours | None) -> Word:
    """Return the word for a row; papers/README.md and docs/papers.md define the words."""
    if ours is None:
        return "not run"
    if row.data:
        return "not comparable"
    word, holds = _best_word(row, ours)
    return word if holds else "differs"


def _best_word(row: Row, ours: Ours) -> tuple[Word, bool]:
    """Return the best word that a row can get, and whether our value gets it."""
    if row.kind == "ranking":
        return "same ranking", _has_ranking(row, ours)
    if row.kind == "arithmetic":
        return "exact", _contains(row, ours)
    if row.fitted:
        return "calibrated", _is_near(row, ours)
    return "agrees", _contains(row, ours) and _is_narrow(row, ours)


def _contains(row: Row, ours: Ours) -> bool:
    """Return whether our interval contains the paper's value, or the paper's range contains ours."""
    low, high = _printed_range(row)
    if isinstance(row.paper, tuple):
        return low <= ours.least and ours.most <= high
    return low <= ours.most and ours.least <= high


def _is_near(row: Row, ours: Ours) -> bool:
    low, high = _printed_range(row)
    least, most = low - _margin(row, low), high + _margin(row, high)
    return least <= ours.low and ours.high <= most


def _is_narrow(row: Row, ours: Ours) -> bool:
    """Return whether our interval is known and small."""
    if ours.half_width is None:
        return ours.is_timing or isinstance(row.paper, tuple)
    return ours.half_width <= _margin(row, ours.low)


def _margin(row: Row, value: float) -> float:
    """Return a share of a value; of a ratio, a share of its distance from 1."""
    return WITHIN * abs(value - (row.unit == "x"))


def _printed_range(row: Row) -> tuple[float, float]:
    """Return the least and the largest number that the paper's printed digits stand for."""
    low, high = row.paper if isinstance(row.paper, tuple) else (row.paper, row.paper)
    least, most = -float("inf"), float("inf")
    if low is not None:
        least = float(low) - _rounding_error(low)
    if high is not None:
        most = float(high) + _rounding_error(high)
    return least, most


def _rounding_error(text: str) -> float:
    """Return half a unit of the last printed digit."""
    decimals = len(text.partition(".")[2])
    # A little more, since 0.15 as a float lies below 0.15.
    return 0.5 * 10.0**-decimals + ROUNDING * abs(float(text))


def _has_ranking(row: Row, ours: Ours) -> bool:
    """Return whether our interval lies on the claimed side of equality, or for ``similar`` around and near it."""
    # One run that trains has no interval, so its difference may be chance.
    if not ours.is_timing and ours.runs < 2:
        return False
    even = 1.0 if isinstance(row.expressions[0], Ratio) else 0.0
    even, near = even / UNITS[row.unit], WITHIN / UNITS[row.unit]
    if row.paper == "similar":
        return even - near <= ours.least <= even <= ours.most <= even + near
    margin = NEGLIGIBLE / UNITS[row.unit] if ours.is_timing else 0.0
    return ours.least > even + margin
