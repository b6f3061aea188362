"""Unions, differences and lengths of intervals."""

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


def covered_cells(intervals: Intervals) -> set[int]:
    """Return the cells of unit length inside of intervals with integer bounds."""
    cells: set[int] = set()
    for start, end in intervals:
        cells |= set(range(int(start), int(end)))
    return cells


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
    assert process_time() - began < 2


@given(INTERVALS)
def test_union_covers_same_points_once(
    intervals: Intervals,
) -> None:
    merged = union(intervals)
    assert covered_cells(merged) == covered_cells(intervals)
    assert total(intervals) == len(covered_cells(intervals))
    for left, right in itertools.pairwise(merged):
        assert left[1] < right[0]


@given(INTERVALS, INTERVALS)
def test_subtract_is_set_difference(intervals: Intervals, holes: Intervals) -> None:
    remaining = covered_cells(subtract(intervals, holes))
    assert remaining == covered_cells(intervals) - covered_cells(holes)


@given(INTERVALS, BOUNDS)
def test_idle_and_busy_time_add_up_to_duration(
    intervals: Intervals, duration: int
) -> None:
    busy = clip(intervals, 0, duration)
    idle = subtract([(0, duration)], busy)
    assert total(busy) + total(idle) == pytest.approx(duration)
    assert not any(overlaps(gap, union(busy)) for gap in idle)
