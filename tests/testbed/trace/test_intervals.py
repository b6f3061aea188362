"""Unions, differences and lengths of time intervals (start, end)."""

from __future__ import annotations

import itertools
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.trace.intervals import clip, overlaps, subtract, total, union

Intervals = list[tuple[float, float]]
BOUNDS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(BOUNDS, BOUNDS), max_size=12)
"""Lists of intervals with whole bounds; an interval is empty unless it starts before its end."""


def covered_seconds(intervals: Intervals) -> set[int]:
    """Return the seconds that intervals with whole bounds cover; 3 is the second from 3 to 4."""
    seconds: set[int] = set()
    for start, end in intervals:
        seconds |= set(range(int(start), int(end)))
    return seconds


def test_union_merges_overlapping_and_adjacent_and_drops_empty_intervals() -> None:
    merged = union([(3, 4), (0, 1), (1, 2), (1.5, 1.7), (5, 5), (7, 6)])
    assert merged.tolist() == [[0, 2], [3, 4]]


def test_subtract_removes_holes() -> None:
    assert subtract([(0, 10)], [(2, 3), (5, 12)]).tolist() == [[0, 2], [3, 5]]
    assert subtract([(0, 1), (2, 3)], [(0, 3)]).tolist() == []


def test_time_for_subtract_is_linear_in_holes() -> None:
    # Each of the first 60,000 intervals has a hole in its middle, which divides the interval.
    holes = [(start + 0.2, start + 0.4) for start in range(60_000)]
    intervals = [(start, start + 0.7) for start in range(120_000)]
    began = process_time()
    assert len(subtract(intervals, holes)) == 120_000 + 60_000
    # Comparing each interval with each hole would take minutes.
    assert process_time() - began < 2


@given(INTERVALS)
def test_union_covers_same_seconds_once(intervals: Intervals) -> None:
    merged = union(intervals)
    assert covered_seconds(merged) == covered_seconds(intervals)
    assert total(intervals) == len(covered_seconds(intervals))
    for left, right in itertools.pairwise(merged):
        assert left[1] < right[0]


@given(INTERVALS, INTERVALS)
def test_subtract_is_set_difference(intervals: Intervals, holes: Intervals) -> None:
    remaining = covered_seconds(subtract(intervals, holes))
    assert remaining == covered_seconds(intervals) - covered_seconds(holes)


@given(INTERVALS, BOUNDS)
def test_idle_and_busy_time_add_up_to_duration(
    intervals: Intervals, duration: int
) -> None:
    busy = clip(intervals, 0, duration)
    idle = subtract([(0, duration)], busy)
    assert total(busy) + total(idle) == pytest.approx(duration)
    assert not any(overlaps(gap, busy) for gap in idle)
