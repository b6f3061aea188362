"""Confidence intervals of means, after Student."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev

CONFIDENCE = 0.95
"""Probability with which an interval contains the mean, as in the tables of most papers."""


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the half width of the mean's confidence interval, by Student's distribution.

    The half width is None for a single value, which has no spread. Raises ValueError for an empty sequence.

    >>> mean, half_width = interval([1.0, 2.0, 3.0])
    >>> mean, round(half_width, 3)
    (2.0, 2.484)
    """
    if not values:
        raise ValueError("no values to take a mean of")
    if len(values) == 1:
        return values[0], None
    quantile = student_quantile(len(values) - 1, CONFIDENCE)
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


@cache
def student_quantile(freedom: int, confidence: float) -> float:
    """Return t such that a share ``confidence`` of Student's distribution lies between -t and t.

    The share is a finite sum for whole degrees of freedom (Abramowitz and Stegun, equations 26.7.3 and 26.7.4), which
    bisection inverts.

    >>> round(student_quantile(9, 0.95), 3)
    2.262
    """
    low, high = 0.0, 1.0
    while _student_share(high, freedom) < confidence:
        high *= 2
    # 80 halvings exhaust the 53 bits of a float, whatever the first interval was.
    for _ in range(80):
        middle = (low + high) / 2
        if _student_share(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return high


def _student_share(t: float, freedom: int) -> float:
    """Return the share of Student's distribution between -t and t for ``freedom`` degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    is_odd = freedom % 2 == 1
    total = 0.0
    # Odd degrees have the series cos + 2/3 cos^3 + ..., even degrees the series 1 + 1/2 cos^2 + ...
    term = cosine if is_odd else 1.0
    for index in range(freedom // 2):
        total += term
        divisor = 2 * index + (3 if is_odd else 2)
        term *= cosine * cosine * (divisor - 1) / divisor
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
