"""Link rates computed from the arrival times of frames."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from testbed.network.link import Link
from testbed_controller.shaping.plan import FRAME, burst
from testbed_controller.shaping.trains import (
    SMALL_FRAME,
    Listener,
    RemoteReceiver,
    Train,
    _burst_frames,
    make_train,
    slope_below,
)

ENDS = {name: RemoteReceiver(("127.0.0.1", 1)) for name in "ab"}
PAIR = ("a", "b")
LINK_RATE = 10e6


def received_train(
    rate: float, is_bound_by_downlink: bool = False, lost: int = 0, **link: float
) -> Train:
    """Return a train that arrived at a rate; a bucket of frames arrived at once, and the next ``lost`` were lost."""
    train = make_train(
        PAIR,
        Link(rate=LINK_RATE, **link),
        ENDS,
        is_bound_by_downlink=is_bound_by_downlink,
    )
    bucket = _burst_frames(LINK_RATE, train.frame_bytes)
    frame_seconds = train.frame_bytes * 8 / rate
    train.arrivals = {}
    for number in range(train.frame_count):
        is_lost = bucket <= number < bucket + lost
        if not is_lost:
            train.arrivals[number] = 5.0 + max(0, number - bucket) * frame_seconds
    return train


@pytest.mark.parametrize("rate", [1e6, 10e6, 12e6])
@pytest.mark.parametrize("lost", [0, 5])
def test_rate_is_measured_after_the_bucket(rate: float, lost: int) -> None:
    assert received_train(rate, lost=lost).rate() == pytest.approx(rate)
    jittery = received_train(rate, lost=lost, jitter=0.001, delay=0.005)
    assert jittery.rate() == pytest.approx(rate)
    # The frames that the bucket of a downlink passed at once are not known, so all arrivals count.
    by_downlink = received_train(rate, is_bound_by_downlink=True)
    assert by_downlink.rate() == pytest.approx(rate)


@pytest.mark.parametrize(
    "recorded",
    [
        lambda index, arrival: max(arrival, 0.048),
        lambda index, arrival: 0.140 if arrival > 0.07 else arrival,
        lambda index, arrival: arrival + 0.003 * (index % 7),
    ],
    ids=[
        "sender still busy",
        "reader without processor at the end",
        "reader late now and then",
    ],
)
def test_late_recorded_arrivals_do_not_change_the_rate_of_a_downlink(
    recorded: Callable[[int, float], float],
) -> None:
    # 495 full frames of 50 Mbit/s take 0.12 s, the duration of a train.
    spacing = FRAME * 8 / 50e6
    times = [recorded(index, index * spacing) for index in range(495)]
    assert slope_below(times) == pytest.approx(spacing, rel=0.002)


@pytest.mark.parametrize("rate", [8e3, 16e3, 27e3, 64e3, 128e3, 250e3, 1e6, 100e6])
def test_slow_links_have_short_trains_of_single_frames(rate: float) -> None:
    train = make_train(PAIR, Link(rate=rate), ENDS, is_bound_by_downlink=False)
    # Frames sent as one piece would leave at once and arrive at a rate above that of the link.
    assert train.frames_per_piece == 1
    assert train.frame_count * train.frame_seconds < 5


def test_too_few_frames_have_no_rate() -> None:
    train = received_train(1e6)
    last = max(train.arrivals)
    # No frame, one frame, two frames at one instant, and only frames of the bucket.
    for stamps in ({}, {last: 1.0}, {last - 1: 2.0, last: 2.0}, {0: 1.0, 1: 2.0}):
        train.arrivals = stamps
        assert train.rate() is None


def test_trains_of_slow_links_have_small_frames() -> None:
    slow = make_train(PAIR, Link(rate=8e3), ENDS, is_bound_by_downlink=False)
    fast = make_train(PAIR, Link(rate=1e9), ENDS, is_bound_by_downlink=False)
    assert slow.frame_bytes == SMALL_FRAME
    assert fast.frame_bytes == FRAME
    for train in (slow, fast):
        link_rate = train.link.rate or 0
        # A piece is at most half of the bucket, so that the train keeps its pace.
        assert train.frames_per_piece * train.frame_bytes <= burst(link_rate) / 2
        assert train.frame_count >= 24 + _burst_frames(link_rate, train.frame_bytes)


def test_duration_of_a_train_includes_the_delay() -> None:
    delayed = Link(rate=1e6, delay=0.5)
    train = make_train(PAIR, delayed, ENDS, is_bound_by_downlink=False)
    assert train.seconds > 0.7


def test_listener_reports_readable_sockets() -> None:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sender, receiver:
        sender.bind(("127.0.0.1", 0))
        receiver.bind(("127.0.0.1", 0))
        with Listener([sender, receiver]) as listener:
            assert listener.ready(0.001) == []
            sender.sendto(b"x", receiver.getsockname())
            assert listener.ready(2.0) == [receiver]
