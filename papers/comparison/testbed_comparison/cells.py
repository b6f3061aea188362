"""Cells of the tables: the values of the paper and ours as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from testbed_comparison.rows import Row
from testbed_comparison.words import RANKINGS, Ours, ranking_of, shares_of_paper

NONE = "–"
"""Cell of a value that does not exist."""


def format_number(value: float) -> str:
    """Return a number with four significant digits, or with all digits before the point if these are more.

    >>> format_number(3.14159), format_number(37431.0)
    ('3.142', '37431')
    """
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def append_unit(text: str, unit: str) -> str:
    """Return a value with unit; the unit ``x`` of ratios is not shown.

    >>> append_unit("2.1", "s"), append_unit("2.1", "x")
    ('2.1 s', '2.1')
    """
    return f"{text} {unit}".rstrip() if unit != "x" else text


def paper_value(row: Row) -> str:
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


def our_value(ours: Ours | None, unit: str) -> str:
    """Return our value with the confidence interval, or our range, as text.

    >>> our_value(Ours(84.4, 84.4, 0.7, runs=5), "%")
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


def paper_range(rows: Sequence[Row]) -> str:
    """Return the least and the largest value of several rows with one unit."""
    if rows[0].kind == "ranking":
        return f"{len(rows)} rankings"
    ends: list[str] = []
    for row in rows:
        ends += row.ends
    # As text, with the digits of the paper, and sorted as numbers.
    ends.sort(key=float)
    text = ends[0]
    if ends[0] != ends[-1]:
        text = f"{ends[0]}–{ends[-1]}"
    return append_unit(text, rows[0].unit)


def our_range(values: Sequence[Ours], unit: str) -> str:
    """Return the least and the largest of our values, and the widest interval; without values a dash."""
    if not values:
        return NONE
    least = min(value.low for value in values)
    most = max(value.high for value in values)
    text = append_unit(_format_range(least, most), unit)
    widest = max(value.half_width or 0.0 for value in values)
    return f"{text}, each ± {widest:.2g} or less" if widest else text


def comparison(pairs: Iterable[tuple[Row, Ours | None]]) -> str:
    """Return how far ours are from the paper's: the order of rankings, or our values divided by the paper's.

    >>> row = Row(item="", name="", kind="measured", paper="20", scenario="", metric="duration")
    >>> comparison([(row, Ours(19.0, 19.0, None, runs=1)), (row, Ours(25.0, 25.0, None, runs=1))])
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
        least = f"{min(shares):.3g}"
        most = f"{max(shares):.3g}"
        parts.append(least if least == most else f"{least}–{most}")
    for order in RANKINGS:
        if orders[order]:
            parts.append(f"{orders[order]} {order}")
    if parts == ["1 as claimed"]:
        return "as claimed"
    return ", ".join(parts)


def _format_range(least: float, most: float) -> str:
    # A dash before or after a minus sign is hard to read.
    separator = " to " if least < 0 else "–"
    return f"{format_number(least)}{separator}{format_number(most)}"
