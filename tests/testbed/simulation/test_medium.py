"""Reservations of media that carry one transmission at a time, against a schedule computed second by second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from testbed.simulation.medium import Medium, occupy

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 5), st.sets(st.integers(0, 2), min_size=1), st.integers(0, 4)
    ),
    min_size=1,
    max_size=12,
)
"""Seconds since the previous request, the numbers of its media, and its duration in seconds."""


@given(REQUESTS)
def test_transmission_begins_when_all_media_are_free(requests) -> None:
    media = [Medium() for _ in range(3)]
    free_times = [0, 0, 0]
    now = 0
    for pause, chosen, seconds in requests:
        now += pause
        expected_start = max(now, *(free_times[index] for index in chosen))
        start, end = occupy([media[index] for index in chosen], now, seconds)
        assert (start, end) == (expected_start, expected_start + seconds)
        for index in chosen:
            free_times[index] = end
    assert [medium.free_at for medium in media] == free_times


def test_reservations_of_medium_are_reported_to_observer() -> None:
    reservations: list[tuple[float, float]] = []
    cell = Medium(lambda start, end: reservations.append((start, end)))
    access = Medium()
    occupy([cell], 0.0, 2.0)
    # A reservation of another medium is not reported.
    occupy([access], 0.0, 9.0)
    occupy([cell, access], 1.0, 3.0)
    assert reservations == [(0.0, 2.0), (9.0, 12.0)]


def test_transmission_without_medium_begins_at_once() -> None:
    assert occupy([], 3.0, 2.0) == (3.0, 5.0)
