"""Arithmetic on sets of time intervals, so that overlapping activity is counted once.

A set is an array of shape (n, 2), in seconds: starts and ends. Intervals that only touch do not overlap. `union`,
`clip` and `subtract` return no empty intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

from testbed.common.lazy import np, npt

Interval = tuple[float, float]
"""(start, end) in seconds; empty unless start < end."""
Intervals: TypeAlias = "npt.NDArray[np.float64]"
"""Intervals as an array of shape (n, 2)."""


def intervals(values: Intervals | Iterable[Interval]) -> Intervals:
    """Return intervals as an array."""
    rows = values if isinstance(values, np.ndarray) else list(values)
    return np.asarray(rows, dtype=float).reshape(-1, 2)


def in_order(values: Intervals) -> Intervals:
    """Return intervals in the order of their starts, and of their ends where these are equal."""
    return values[np.lexsort((values[:, 1], values[:, 0]))]


def union(values: Intervals | Iterable[Interval]) -> Intervals:
    """Return the same points as disjoint ordered intervals; adjacent ones are joined.

    >>> union([(3.0, 4.0), (0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]).tolist()
    [[0.0, 4.0], [5.0, 6.0]]
    """
    ordered = in_order(_without_empty(intervals(values)))
    if not len(ordered):
        return ordered
    latest_ends = np.maximum.accumulate(ordered[:, 1])
    # A new interval begins where all earlier ones have ended.
    begins = ordered[1:, 0] > latest_ends[:-1]
    return _merge_rows(ordered, latest_ends, begins)


def join_close(
    values: Intervals, separators: Sequence[Interval], gap: float
) -> Intervals:
    """Join ordered intervals whose distance is at most ``gap`` seconds, unless a separator overlaps the gap.

    >>> spans = intervals([(0.0, 1.0), (1.5, 2.0), (2.5, 3.0), (6.0, 7.0)])
    >>> join_close(spans, separators=[(2.1, 2.2)], gap=1.0).tolist()
    [[0.0, 2.0], [2.5, 3.0], [6.0, 7.0]]
    """
    if not len(values):
        return values
    latest_ends = np.maximum.accumulate(values[:, 1])
    gap_starts, gap_ends = latest_ends[:-1], values[1:, 0]
    begins = gap_ends - gap_starts > gap
    for start, end in separators:
        begins |= (gap_starts < end) & (start < gap_ends)
    return _merge_rows(values, latest_ends, begins)


def _merge_rows(
    ordered: Intervals, latest_ends: Intervals, begins: npt.NDArray[np.bool_]
) -> Intervals:
    """Merge rows; ``begins`` marks, for each row after the first, the beginning of a new interval."""
    is_first = np.concatenate(([True], begins))
    is_last = np.append(begins, True)
    return np.stack((ordered[is_first, 0], latest_ends[is_last]), axis=1)


def clip(values: Intervals | Iterable[Interval], start: float, end: float) -> Intervals:
    """Restrict intervals to the range from ``start`` to ``end``."""
    rows = intervals(values)
    starts = np.maximum(rows[:, 0], start)
    ends = np.minimum(rows[:, 1], end)
    return _without_empty(np.stack((starts, ends), axis=1))


def subtract(
    values: Intervals | Iterable[Interval], holes: Intervals | Iterable[Interval]
) -> Intervals:
    """Return the parts of intervals outside all holes, as disjoint ordered intervals.

    >>> subtract([(0.0, 10.0)], [(2.0, 3.0), (9.0, 12.0)]).tolist()
    [[0.0, 2.0], [3.0, 9.0]]
    """
    minuends = union(values)
    disjoint_holes = union(holes)
    # The free stretches before, between and after the holes.
    free_starts = np.concatenate(([-np.inf], disjoint_holes[:, 1]))
    free_ends = np.concatenate((disjoint_holes[:, 0], [np.inf]))
    # For each minuend, the first stretch that overlaps it, and the number of such stretches.
    first = np.searchsorted(free_ends, minuends[:, 0], side="right")
    after_last = np.searchsorted(free_starts, minuends[:, 1], side="left")
    count = np.maximum(after_last - first, 0)
    # One row for each overlapping pair: the index of the minuend, and the index of the stretch.
    minuend = np.repeat(np.arange(len(minuends)), count)
    # Within the rows of one minuend, the stretches are numbered first, first + 1, ...
    first_row = np.cumsum(count) - count
    stretch = np.arange(len(minuend)) - np.repeat(first_row - first, count)
    starts = np.maximum(minuends[minuend, 0], free_starts[stretch])
    ends = np.minimum(minuends[minuend, 1], free_ends[stretch])
    return _without_empty(np.stack((starts, ends), axis=1))


def total(values: Intervals | Iterable[Interval]) -> float:
    """Return the seconds covered, each instant counted once.

    >>> total([(0.0, 2.0), (1.0, 3.0)])
    3.0
    """
    return length(union(values))


def length(values: Intervals) -> float:
    """Return the total length in seconds, counting overlaps repeatedly."""
    # Python's sum adds row by row; numpy's adds pairs, which rounds differently and would change recorded results.
    return float(sum((values[:, 1] - values[:, 0]).tolist()))


def contains(
    values: Intervals, times: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return a mask, (n,), of the times contained in one of the disjoint ordered intervals.

    The start of an interval is outside and its end inside: an event is recorded at the end of its activity.
    """
    candidate = np.searchsorted(values[:, 0], times, side="left") - 1
    # The last element is the end of candidate -1: no interval starts before the time.
    ends = np.append(values[:, 1], -np.inf)
    return times <= ends[candidate]


def overlaps(interval: Interval, others: Iterable[Interval]) -> bool:
    """Return whether an interval shares a point with any other.

    >>> overlaps((0.0, 1.0), [(1.0, 2.0)])
    False
    """
    return any(interval[0] < end and start < interval[1] for start, end in others)


def lanes(values: Intervals | Iterable[Interval]) -> npt.NDArray[np.int64]:
    """Return the row of each interval in a chart, (n,): as few rows as possible, without overlaps within a row.

    The intervals must be in the order of their starts.

    >>> lanes([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]).tolist()
    [0, 1, 0]
    """
    ordered = intervals(values)
    rows = np.zeros(len(ordered), dtype=np.int64)
    # A heap of (end, row): the row that is free first.
    busy: list[tuple[float, int]] = []
    for index, (start, end) in enumerate(ordered.tolist()):
        row = len(busy)
        if busy and busy[0][0] <= start:
            _, row = heappop(busy)
        rows[index] = row
        heappush(busy, (end, row))
    return rows


def _without_empty(values: Intervals) -> Intervals:
    return values[values[:, 0] < values[:, 1]]
