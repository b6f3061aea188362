"""Our value of a row, and the word that compares our value with the paper's.

A word is a grade such as "agrees" or "differs"; papers/README.md and docs/papers.md define the words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
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
    operands,
)

WITHIN = 0.1
"""Maximum half width of an interval for "agrees", and maximum deviation for "calibrated", as a share of the value."""
SIMILAR = 0.05
"""Maximum distance of an interval from equality for `similar`: five points, or 5 % of a ratio."""
ROUNDING = 1e-9
"""Relative error of floats that is ignored in a comparison with printed digits."""
SYSTEMATIC = 0.03
"""Share by which two times or sizes of single runs must differ for a ranking.

Times in containers and simulated times differ by up to 2.8 % in trusted runs, so a smaller difference may be an error
of the simulation.
"""
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
Ranking = Literal["as claimed", "undecided", "opposite"]
"""The order of our values: the order of the paper, no significant order, or the opposite order."""
RANKINGS: tuple[Ranking, ...] = get_args(Ranking)


@dataclass(frozen=True)
class OurValue:
    """Values of our runs for a row, in the paper's unit."""

    low: float
    """The mean; for a range the minimum of the means."""
    high: float
    """The mean; for a range the maximum of the means."""
    half_width: float | None
    """Half width of the 95 % confidence interval; None for a single run and for a range."""
    runs: int
    is_timing: bool = True
    """Whether the runs compute only times and sizes, which are equal in every run, so that one run suffices."""

    @property
    def minimum(self) -> float:
        """The lower end of the confidence interval.

        >>> ours = OurValue(low=84.0, high=84.0, half_width=0.5, runs=5)
        >>> ours.minimum, ours.maximum
        (83.5, 84.5)
        """
        return self.low - (self.half_width or 0.0)

    @property
    def maximum(self) -> float:
        """The upper end of the confidence interval."""
        return self.high + (self.half_width or 0.0)


def evaluate(
    expression: Expression, values: Callable[[Value], Sequence[float | None]]
) -> list[float]:
    """Return the value of an expression for each repetition with all metrics of the expression.

    Both values of a pair come from the same repetition, since they share the seed.

    >>> two = Value(metric="duration", at={"devices": 2})
    >>> one = Value(metric="duration", at={"devices": 1})
    >>> evaluate(Ratio(ratio=(one, two)), lambda value: [8.0] if value == one else [4.0])
    [2.0]
    """
    if isinstance(expression, Value):
        return [number for number in values(expression) if number is not None]
    first, second = operands(expression)
    first_values = _values_by_repetition(first, values)
    second_values = _values_by_repetition(second, values)
    results = []
    # An interrupted run may have fewer repetitions of one point than of the other.
    for one, other in zip(first_values, second_values, strict=False):
        if one is None or other is None:
            continue
        if isinstance(expression, Difference):
            results.append(one - other)
        elif not other:
            # A ratio to zero has no value.
            continue
        elif isinstance(expression, Saving):
            results.append(1 - one / other)
        else:
            results.append(one / other)
    return results


def _values_by_repetition(
    operand: Value | Ratio, values: Callable[[Value], Sequence[float | None]]
) -> list[float | None]:
    """Return a value, or a ratio of values, of each repetition; None where a metric is missing."""
    if isinstance(operand, Value):
        return list(values(operand))
    first, second = operands(operand)
    first_values = _values_by_repetition(first, values)
    second_values = _values_by_repetition(second, values)
    ratios: list[float | None] = []
    for one, other in zip(first_values, second_values, strict=False):
        if one is None or not other:
            ratios.append(None)
        else:
            ratios.append(one / other)
    return ratios


def compute_our_value(
    expressions: Sequence[Expression],
    unit: str,
    values: Callable[[Value], Sequence[float | None]],
    *,
    is_timing: bool,
) -> OurValue | None:
    """Return our value, or our range of several expressions; None if a run is missing.

    ``values`` returns the numbers of a value by repetition, in seconds, bytes or shares. The result is in ``unit``.
    """
    measured: list[list[float]] = []
    for expression in expressions:
        numbers = evaluate(expression, values)
        if not numbers:
            return None
        measured.append([number / UNITS[unit] for number in numbers])
    # An interrupted run may have fewer repetitions of one value than of another.
    runs = min(map(len, measured))
    if len(measured) == 1:
        mean, half_width = interval(measured[0])
        return OurValue(mean, mean, half_width, runs, is_timing)
    means = [interval(numbers)[0] for numbers in measured]
    return OurValue(min(means), max(means), None, runs, is_timing)


def word_for(row: Row, ours: OurValue | None) -> Word:
    """Return the word for a row; ``ours`` is None if a run is missing."""
    if ours is None:
        return "not run"
    # With other data, accuracies differ for any method.
    if row.data:
        return "not comparable"
    word, holds = _best_word(row, ours)
    if not holds:
        return "differs"
    # By another metric than the paper's, a difference counts, but an agreement may be chance.
    return "not comparable" if row.other_metric else word


def _best_word(row: Row, ours: OurValue) -> tuple[Word, bool]:
    """Return the best word that a row can have, and whether our value meets the condition of this word."""
    if row.kind == "ranking":
        word: Word = "calibrated" if row.fitted else "same ranking"
        return word, ranking_of(row, ours) == "as claimed"
    if row.kind == "arithmetic":
        return "exact", _contains(row, ours)
    if row.fitted:
        return "calibrated", _is_near(row, ours)
    return "agrees", _contains(row, ours) and _is_narrow(row, ours)


def _contains(row: Row, ours: OurValue) -> bool:
    """Return whether our interval contains the paper's value, or the paper's range contains ours."""
    low, high = _printed_range(row)
    if isinstance(row.paper, tuple):
        return low <= ours.minimum and ours.maximum <= high
    return low <= ours.maximum and ours.minimum <= high


def _is_near(row: Row, ours: OurValue) -> bool:
    """Return whether our value deviates from the paper's by a share of at most `WITHIN`."""
    low, high = _printed_range(row)
    minimum = low - _margin(row, low)
    maximum = high + _margin(row, high)
    return minimum <= ours.low and ours.high <= maximum


def _is_narrow(row: Row, ours: OurValue) -> bool:
    """Return whether our value is certain enough: exact, or with a small interval."""
    if ours.half_width is None:
        # Times of single runs are exact, and a range in the paper takes the place of an interval.
        return ours.is_timing or isinstance(row.paper, tuple)
    return ours.half_width <= _margin(row, ours.low)


def _margin(row: Row, value: float) -> float:
    """Return the accepted deviation from a value; for a ratio, a share of the distance from 1."""
    # A speed-up of 1.1 means 10 % faster. A deviation of 10 % of 1.1 would accept a speed-up of 1, which means no gain.
    neutral = 1.0 if row.unit == "x" else 0.0
    return WITHIN * abs(value - neutral)


def _printed_range(row: Row) -> tuple[float, float]:
    """Return the range of all numbers giving the paper's printed digits when rounded."""
    if isinstance(row.paper, tuple):
        low, high = row.paper
    else:
        low = high = row.paper
    minimum = -inf
    maximum = inf
    if low is not None:
        minimum = float(low) - _rounding_error(low)
    if high is not None:
        maximum = float(high) + _rounding_error(high)
    return minimum, maximum


def _rounding_error(text: str) -> float:
    """Return half a unit of the last printed digit."""
    decimals = len(text.partition(".")[2])
    # A little more, since the float nearest to a decimal number such as 0.15 may be below it.
    return 0.5 * 10.0**-decimals + ROUNDING * abs(float(text))


def ranking_of(row: Row, ours: OurValue) -> Ranking:
    """Return how the order of our two values relates to the claim of the paper.

    With ``larger``, the first value is the one that the paper claims to be larger, so a ratio above 1 or a positive
    difference is as claimed. ``similar`` is a test of equivalence: a wide interval, such as that of few runs, proves
    nothing.
    """
    # A single run that trains has no interval, so its difference may be chance.
    if not ours.is_timing and ours.runs < 2:
        return "undecided"
    scale = UNITS[row.unit]
    # The result for equal values: a ratio of 1 or a difference of 0, in the unit of the row.
    is_ratio = isinstance(row.expressions[0], Ratio)
    equality = 1.0 / scale if is_ratio else 0.0
    if row.paper == "similar":
        low = equality - SIMILAR / scale
        high = equality + SIMILAR / scale
        if low <= ours.minimum and ours.maximum <= high:
            return "as claimed"
        is_outside = ours.maximum < low or high < ours.minimum
        return "opposite" if is_outside else "undecided"
    margin = SYSTEMATIC / scale if ours.is_timing else 0.0
    if ours.minimum > equality + margin:
        return "as claimed"
    return "opposite" if ours.maximum < equality - margin else "undecided"


def shares_of_paper(row: Row, ours: OurValue) -> tuple[float, ...]:
    """Return our value divided by the paper's, or both ends of our range divided by the ends of the paper's range.

    Open ends and zeros of the paper are omitted.
    """
    if isinstance(row.paper, tuple):
        pairs = zip((ours.low, ours.high), row.paper, strict=True)
    else:
        values = sorted({ours.low, ours.high})
        pairs = zip(values, [row.paper] * len(values), strict=True)
    shares = []
    for value, text in pairs:
        if text is not None and float(text):
            shares.append(value / float(text))
    return tuple(shares)
