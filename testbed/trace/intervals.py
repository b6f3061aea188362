"""Arithmetic on sets of half-open time intervals, so that overlapping activity is counted once.

A set is an array of shape (n, 2), in seconds: starts and ends. Empty intervals are no part of what is returned.
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
    reached = np.maximum.accumulate(ordered[:, 1])
    # An interval begins where no earlier one has reached.
    begins = np.concatenate(([True], ordered[1:, 0] > reached[:-1]))
    ends = np.append(begins[1:], True)
    return np.stack((ordered[begins, 0], reached[ends]), axis=1)


def joined(values: Intervals, apart: Sequence[Interval], gap: float) -> Intervals:
    """Join ordered intervals at most ``gap`` apart, unless an interval of ``apart`` lies between them.

    >>> joined(intervals([(0.0, 1.0), (1.5, 2.0), (4.0, 5.0)]), apart=[], gap=1.0).tolist()
    [[0.0, 2.0], [4.0, 5.0]]
    """
    if not len(values):
        return values
    reached = np.maximum.accumulate(values[:, 1])
    ends, starts = reached[:-1], values[1:, 0]
    between = [(ends < end) & (start < starts) for start, end in apart]
    separate = np.logical_or.reduce([starts - ends > gap, *between])
    begins = np.concatenate(([True], separate))
    last = np.append(begins[1:], True)
    return np.stack((values[begins, 0], reached[last]), axis=1)


def clip(values: Intervals | Iterable[Interval], start: float, end: float) -> Intervals:
    """Restrict intervals to the range from ``start`` to ``end``."""
    rows = intervals(values)
    starts = np.maximum(rows[:, 0], start)
    ends = np.minimum(rows[:, 1], end)
    return _without_empty(np.stack((starts, ends), axis=1))


def subtract(
    values: Intervals | Iterable[Interval], holes: Intervals | Iterable[Interval]
) -> Intervals:
    """Return the points outside all holes, as disjoint ordered intervals.

    >>> subtract([(0.0, 10.0)], [(2.0, 3.0), (9.0, 12.0)]).tolist()
    [[0.0, 2.0], [3.0, 9.0]]
    """
    wholes, gaps = union(values), union(holes)
    # The free stretches before, between and after the holes.
    starts = np.concatenate(([-np.inf], gaps[:, 1]))
    ends = np.concatenate((gaps[:, 0], [np.inf]))
    # For each whole, the first free stretch that it meets, and how many it meets.
    first = np.searchsorted(ends, wholes[:, 0], side="right")
    after_last = np.searchsorted(starts, wholes[:, 1], side="left")
    count = np.maximum(after_last - first, 0)
    # One row for each meeting: the whole, and the free stretch.
    whole = np.repeat(np.arange(len(wholes)), count)
    offsets = np.repeat(np.cumsum(count) - count - first, count)
    free = np.arange(len(whole)) - offsets
    left = np.maximum(wholes[whole, 0], starts[free])
    right = np.minimum(wholes[whole, 1], ends[free])
    return _without_empty(np.stack((left, right), axis=1))


def total(values: Intervals | Iterable[Interval]) -> float:
    """Return the seconds covered, each instant counted once.

    >>> total([(0.0, 2.0), (1.0, 3.0)])
    3.0
    """
    return length(union(values))


def length(values: Intervals) -> float:
    """Return the total length in seconds, counting overlaps repeatedly."""
    # Python's sum keeps the order of the rows, in which results were always rounded; numpy's does not.
    return float(sum((values[:, 1] - values[:, 0]).tolist()))


def within(
    values: Intervals, moments: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return, for each time, whether a disjoint ordered interval contains the time (start excluded, end included)."""
    place = np.searchsorted(values[:, 0], moments, side="left") - 1
    return (place >= 0) & (moments <= np.append(values[:, 1], -np.inf)[place])


def overlaps(interval: Interval, others: Iterable[Interval]) -> bool:
    """Return whether an interval shares a point with any other.

    >>> overlaps((0.0, 1.0), [(1.0, 2.0)])
    False
    """
    return any(interval[0] < end and start < interval[1] for start, end in others)


def lanes(values: Intervals | Iterable[Interval]) -> npt.NDArray[np.int64]:
    """Return the row of each interval, (n,), given in the order of starts: as few rows as possible without overlap.

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
