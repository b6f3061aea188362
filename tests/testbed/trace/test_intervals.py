from __future__ import annotations

import itertools
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.trace.intervals import clip, overlaps, subtract, total, union

BOUNDS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(BOUNDS, BOUNDS), max_size=12)


def covered(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells that integer intervals cover: the obvious way to say what the arithmetic must give."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


def test_union_joins_what_overlaps_and_touches_and_drops_the_empty() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (1.5, 1.7), (5, 5), (7, 6)]).tolist() == [
        [0, 2],
        [3, 4],
    ]


def test_subtract_cuts_holes() -> None:
    assert subtract([(0, 10)], [(2, 3), (5, 12)]).tolist() == [[0, 2], [3, 5]]
    assert subtract([(0, 1), (2, 3)], [(0, 3)]).tolist() == []


def test_subtract_takes_no_longer_for_each_of_many_holes() -> None:
    holes = [(at + 0.2, at + 0.4) for at in range(60_000)]
    began = process_time()
    assert len(subtract([(at, at + 0.7) for at in range(120_000)], holes)) == 180_000
    assert process_time() - began < 2


@given(INTERVALS)
def test_union_covers_the_same_points_once(
    intervals: list[tuple[float, float]],
) -> None:
    merged = union(intervals)
    assert covered(merged) == covered(intervals)
    assert total(intervals) == len(covered(intervals))
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(INTERVALS, INTERVALS)
def test_subtract_is_set_difference(
    intervals: list[tuple[float, float]], holes: list[tuple[float, float]]
) -> None:
    assert covered(subtract(intervals, holes)) == covered(intervals) - covered(holes)


@given(INTERVALS, BOUNDS)
def test_idle_and_busy_make_up_the_duration(
    intervals: list[tuple[float, float]], duration: int
) -> None:
    busy = clip(intervals, 0, duration)
    idle = subtract([(0, duration)], busy)
    assert total(busy) + total(idle) == pytest.approx(duration)
    assert not any(overlaps(gap, union(busy)) for gap in idle)
