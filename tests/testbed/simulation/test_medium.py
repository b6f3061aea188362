"""One transmission at a time: reservations of several media against a schedule made second by second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from testbed.simulation.medium import Medium, occupy

WANTED = st.lists(
    st.tuples(
        st.integers(0, 5), st.sets(st.integers(0, 2), min_size=1), st.integers(0, 4)
    ),
    min_size=1,
    max_size=12,
)


@given(WANTED)
def test_each_gets_the_first_stretch_after_those_before_it_in_which_all_its_media_are_free(
    wanted,
) -> None:
    media = [Medium() for _ in range(3)]
    ends, now = [0, 0, 0], 0
    for later, chosen, seconds in wanted:
        now += later
        start, end = occupy([media[each] for each in chosen], now, seconds)
        assert (start, end) == (
            max(now, *(ends[each] for each in chosen)),
            start + seconds,
        )
        for each in chosen:
            ends[each] = end
    assert [medium.free_at for medium in media] == ends


def test_whoever_has_to_wait_hears_of_each_reservation() -> None:
    heard: list[tuple[float, float]] = []
    cell, own = Medium(lambda start, end: heard.append((start, end))), Medium()
    occupy([cell], 0.0, 2.0)
    occupy([own], 0.0, 9.0)
    occupy([cell, own], 1.0, 3.0)
    assert heard == [(0.0, 2.0), (9.0, 12.0)]


def test_transmission_without_medium_begins_at_once() -> None:
    assert occupy([], 3.0, 2.0) == (3.0, 5.0)
