"""Rates, from the instants at which frames came."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from testbed.network.link import Link
from testbed_controller.shaping.plan import FRAME, burst
from testbed_controller.shaping.trains import (
    SMALL_FRAME,
    FarEnds,
    Listener,
    Train,
    _burst_frames,
    make_train,
    slope_below,
)

ENDS = {name: FarEnds(("127.0.0.1", 1)) for name in "ab"}
PAIR = ("a", "b")


def came(rate: float, late: bool = False, lost: int = 0, **link: float) -> Train:
    """Return a train of which frames came at this rate, after a bucketful at once; the first ones metered are lost."""
    train = make_train(PAIR, Link(rate=10e6, **link), ENDS, is_bound_by_downlink=late)
    skipped = _burst_frames(10e6, train.frame)
    train.stamps = {
        number: 5.0 + max(0, number - skipped) * train.frame * 8 / rate
        for number in range(train.frames)
        if not skipped <= number < skipped + lost
    }
    return train


@pytest.mark.parametrize("rate", [1e6, 10e6, 12e6])
@pytest.mark.parametrize("lost", [0, 5])
def test_the_rate_is_that_of_the_frames_after_the_bucket(
    rate: float, lost: int
) -> None:
    assert came(rate, lost=lost).rate() == pytest.approx(rate)
    assert came(rate, lost=lost, jitter=0.001, delay=0.005).rate() == pytest.approx(
        rate
    )
    # Of a downlink nobody knows which frames came to it: all that came count.
    assert came(rate, late=True, lost=0).rate() == pytest.approx(rate)


@pytest.mark.parametrize(
    "noticed",
    [
        lambda index, when: max(when, 0.048),
        lambda index, when: 0.140 if when > 0.07 else when,
        lambda index, when: when + 0.003 * (index % 7),
    ],
    ids=[
        "sender still busy",
        "reader kept from the processor at the end",
        "reader late now and then",
    ],
)
def test_arrivals_that_are_noticed_late_do_not_change_the_rate_of_a_downlink(
    noticed: Callable[[int, float], float],
) -> None:
    spacing = FRAME * 8 / 50e6
    assert slope_below(
        [noticed(index, index * spacing) for index in range(495)]
    ) == pytest.approx(spacing, rel=0.002)


@pytest.mark.parametrize("rate", [8e3, 16e3, 27e3, 64e3, 128e3, 250e3, 1e6, 100e6])
def test_frames_of_a_slow_link_go_one_by_one_and_take_seconds_that_are_bounded(
    rate: float,
) -> None:
    train = make_train(PAIR, Link(rate=rate), ENDS, is_bound_by_downlink=False)
    assert train.together == 1, (
        "several in one piece leave at once and arrive at the rate of no link"
    )
    assert train.frames * train.frame_seconds < 5


def test_too_few_frames_give_no_rate() -> None:
    train = came(1e6)
    last = max(train.stamps)
    for stamps in ({}, {last: 1.0}, {last - 1: 2.0, last: 2.0}, {0: 1.0, 1: 2.0}):
        train.stamps = stamps
        assert train.rate() is None


def test_frames_are_small_on_slow_links_and_never_too_few() -> None:
    slow, fast = (
        make_train(PAIR, Link(rate=rate), ENDS, is_bound_by_downlink=False)
        for rate in (8e3, 1e9)
    )
    assert slow.frame == SMALL_FRAME
    assert fast.frame == FRAME
    for train in (slow, fast):
        # Half of what the bucket lets through at once: the rest of the train keeps the pace.
        assert train.together * train.frame <= burst(train.link.rate or 0) / 2
        assert train.frames >= 24 + _burst_frames(train.link.rate or 0, train.frame)
    assert (
        make_train(
            PAIR, Link(rate=1e6, delay=0.5), ENDS, is_bound_by_downlink=False
        ).seconds
        > 0.7
    )


def test_listener_reports_readable_sockets() -> None:
    receivers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    with receivers[0] as one, receivers[1] as other:
        for each in receivers:
            each.bind(("127.0.0.1", 0))
        with Listener(receivers) as listener:
            assert listener.ready(0.001) == []
            one.sendto(b"x", other.getsockname())
            assert listener.ready(2.0) == [other]
