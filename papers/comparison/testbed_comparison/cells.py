"""Cells of the tables: values of the paper, our values, and their comparison as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from testbed_comparison.rows import Row
from testbed_comparison.words import RANKINGS, OurValue, ranking_of, shares_of_paper

NONE = "–"
"""Cell of a missing value."""


def format_number(value: float) -> str:
    """Return a number with four significant digits, or without decimals from 10,000 on.

    >>> format_number(3.14159), format_number(37431.0)
    ('3.142', '37431')
    """
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def append_unit(text: str, unit: str) -> str:
    """Return a value with its unit, except the unit ``x`` of ratios.

    >>> append_unit("2.1", "s"), append_unit("2.1", "x")
    ('2.1 s', '2.1')
    """
    return f"{text} {unit}".rstrip() if unit != "x" else text


def format_paper_value(row: Row) -> str:
    """Return the paper's value of a row."""
    if row.kind == "ranking":
        return str(row.paper)
    if isinstance(row.paper, str):
        return append_unit(row.paper, row.unit)
    low, high = row.paper
    text = f"{low}–{high}"
    if low is None:
        text = f"at most {high}"
    elif high is None:
        text = f"at least {low}"
    return append_unit(text, row.unit)


def format_our_value(ours: OurValue | None, unit: str) -> str:
    """Return our value with the confidence interval, or our range, as text.

    >>> format_our_value(OurValue(84.4, 84.4, 0.7, runs=5), "%")
    '84.4 ± 0.7 %'
    """
    if ours is None:
        return NONE
    if ours.low != ours.high:
        return append_unit(_format_range(ours.low, ours.high), unit)
    text = format_number(ours.low)
    if ours.half_width is not None:
        text = f"{text} ± {ours.half_width:.2g}"
    return append_unit(text, unit)


def format_paper_range(rows: Sequence[Row]) -> str:
    """Return the smallest and the largest value of the paper in several rows with one unit."""
    if rows[0].kind == "ranking":
        return f"{len(rows)} rankings"
    ends: list[str] = []
    for row in rows:
        ends += row.ends
    # Texts keep the digits of the paper, and are sorted as numbers.
    ends.sort(key=float)
    text = ends[0]
    if ends[0] != ends[-1]:
        text = f"{ends[0]}–{ends[-1]}"
    return append_unit(text, rows[0].unit)


def format_our_range(values: Sequence[OurValue], unit: str) -> str:
    """Return the smallest and the largest of our values, and the widest interval; without values a dash."""
    if not values:
        return NONE
    smallest = min(value.low for value in values)
    largest = max(value.high for value in values)
    text = append_unit(_format_range(smallest, largest), unit)
    widest = max(value.half_width or 0.0 for value in values)
    return f"{text}, each ± {widest:.2g} or less" if widest else text


def format_comparison(pairs: Iterable[tuple[Row, OurValue | None]]) -> str:
    """Return our values divided by the paper's, and for rankings whether they are as claimed.

    >>> row = Row(item="", name="", kind="measured", paper="20", scenario="", metric="duration")
    >>> format_comparison([(row, OurValue(19.0, 19.0, None, runs=1)), (row, OurValue(25.0, 25.0, None, runs=1))])
    '0.95–1.25'
    """
    orders: Counter[str] = Counter()
    shares: list[float] = []
    for row, ours in pairs:
        if ours is None:
            continue
        if row.kind == "ranking":
            orders[ranking_of(row, ours)] += 1
        else:
            shares += shares_of_paper(row, ours)
    parts = []
    if shares:
        smallest = f"{min(shares):.3g}"
        largest = f"{max(shares):.3g}"
        parts.append(smallest if smallest == largest else f"{smallest}–{largest}")
    for order in RANKINGS:
        if orders[order]:
            parts.append(f"{orders[order]} {order}")
    if parts == ["1 as claimed"]:
        return "as claimed"
    return ", ".join(parts)


def _format_range(low: float, high: float) -> str:
    # A dash beside a minus sign would be hard to read.
    separator = " to " if low < 0 else "–"
    return f"{format_number(low)}{separator}{format_number(high)}"
