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
    return np.asarray(
        values if isinstance(values, np.ndarray) else list(values), dtype=float
    ).reshape(-1, 2)


def in_order(values: Intervals) -> Intervals:
    """Return intervals in the order of their starts, and of their ends where these are equal."""
    return values[np.lexsort((values[:, 1], values[:, 0]))]


def union(values: Intervals | Iterable[Interval]) -> Intervals:
    """Return the same points as disjoint ordered intervals; adjacent ones are joined."""
    made = _without_empty(intervals(values))
    if not len(made):
        return made
    made = in_order(made)
    reached = np.maximum.accumulate(made[:, 1])
    begins = np.concatenate(([True], made[1:, 0] > reached[:-1]))
    return np.stack((made[begins, 0], reached[np.append(begins[1:], True)]), axis=1)


def joined(values: Intervals, apart: Sequence[Interval], gap: float) -> Intervals:
    """Join ordered intervals at most ``gap`` apart, unless an interval of ``apart`` lies between them."""
    if not len(values):
        return values
    reached = np.maximum.accumulate(values[:, 1])
    ends, starts = reached[:-1], values[1:, 0]
    between = [(ends < end) & (start < starts) for start, end in apart]
    begins = np.concatenate(
        ([True], np.logical_or.reduce([starts - ends > gap, *between]))
    )
    return np.stack((values[begins, 0], reached[np.append(begins[1:], True)]), axis=1)


def clip(values: Intervals | Iterable[Interval], start: float, end: float) -> Intervals:
    """Restrict intervals to the range from ``start`` to ``end``."""
    made = intervals(values)
    return _without_empty(
        np.stack((np.maximum(made[:, 0], start), np.minimum(made[:, 1], end)), axis=1)
    )


def subtract(
    values: Intervals | Iterable[Interval], holes: Intervals | Iterable[Interval]
) -> Intervals:
    """Return the points outside all holes, as disjoint ordered intervals."""
    made, gaps = union(values), union(holes)
    # Between the holes, and before and after them.
    starts, ends = (
        np.concatenate(([-np.inf], gaps[:, 1])),
        np.concatenate((gaps[:, 0], [np.inf])),
    )
    first = np.searchsorted(ends, made[:, 0], side="right")
    count = np.maximum(np.searchsorted(starts, made[:, 1], side="left") - first, 0)
    whole = np.repeat(np.arange(len(made)), count)
    between = np.arange(len(whole)) - np.repeat(np.cumsum(count) - count - first, count)
    rest = (
        np.maximum(made[whole, 0], starts[between]),
        np.minimum(made[whole, 1], ends[between]),
    )
    return _without_empty(np.stack(rest, axis=1))


def total(values: Intervals | Iterable[Interval]) -> float:
    """Return the seconds covered, each instant counted once."""
    return length(union(values))


def length(values: Intervals) -> float:
    """Return the total length in seconds, counting overlaps repeatedly."""
    return float(
        sum((values[:, 1] - values[:, 0]).tolist())
    )  # in order: numpy's own sum adds up in another


def within(
    values: Intervals, moments: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """Return, for each time, whether a disjoint ordered interval contains the time (start excluded, end included)."""
    place = np.searchsorted(values[:, 0], moments, side="left") - 1
    return (place >= 0) & (moments <= np.append(values[:, 1], -np.inf)[place])


def overlaps(interval: Interval, others: Iterable[Interval]) -> bool:
    """Return whether an interval shares a point with any other."""
    return any(interval[0] < end and start < interval[1] for start, end in others)


def lanes(values: Intervals | Iterable[Interval]) -> npt.NDArray[np.int64]:
    """Return the row of each interval, (n,), given in the order of starts: as few rows as possible without overlap."""
    made = intervals(values)
    rows = np.zeros(len(made), dtype=np.int64)
    free: list[tuple[float, int]] = []
    for place, (start, end) in enumerate(
        zip(made[:, 0].tolist(), made[:, 1].tolist(), strict=True)
    ):
        rows[place] = heappop(free)[1] if free and free[0][0] <= start else len(free)
        heappush(free, (end, int(rows[place])))
    return rows


def _without_empty(values: Intervals) -> Intervals:
    return values[values[:, 0] < values[:, 1]]
