"""Arithmetic on sets of half-open time intervals, so that overlapping activity is never counted twice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""(start, end) in seconds; empty unless start < end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as disjoint intervals in order, those that touch being joined."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return what lies between ``start`` and ``end``."""
    clipped = ((max(left, start), min(right, end)) for left, right in intervals)
    return [interval for interval in clipped if interval[0] < interval[1]]


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """Return the points of ``intervals`` that are not in ``holes``, as disjoint intervals in order."""
    gaps = union(holes)
    rest: list[Interval] = []
    first = 0
    for start, end in union(intervals):
        while first < len(gaps) and gaps[first][1] <= start:
            first += 1
        position, gap = start, first
        while gap < len(gaps) and gaps[gap][0] < end:
            if position < gaps[gap][0]:
                rest.append((position, gaps[gap][0]))
            position = max(position, gaps[gap][1])
            gap += 1
        if position < end:
            rest.append((position, end))
    return rest


def total(intervals: Iterable[Interval]) -> float:
    """Return the seconds covered, each instant counted once."""
    return sum(end - start for start, end in union(intervals))


def holds(intervals: Sequence[Interval], moment: float) -> bool:
    """Say whether a moment is in one of disjoint intervals in order: after its start, at most at its end."""
    place = bisect_left(intervals, (moment,)) - 1
    return place >= 0 and moment <= intervals[place][1]


def overlaps(interval: Interval, others: Iterable[Interval]) -> bool:
    """Say whether an interval shares any point with one of the others."""
    return any(interval[0] < end and start < interval[1] for start, end in others)
