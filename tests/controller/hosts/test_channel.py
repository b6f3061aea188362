"""Estimates of a host's clock from exchanges of times."""

from __future__ import annotations

from random import Random

import pytest

from testbed_controller.lab.clocks import OffsetEstimator, TimeExchange

PROCESSING_SECONDS = 1e-5
"""Time of the host between the arrival of a request and its response."""
MIN_DELAY = 1e-4
QUEUEING_DELAY = 2e-3
"""Mean of the random part of a delay."""


class RemoteClock:
    """A clock with an offset and a drift, at the end of a path with random delays in both directions."""

    def __init__(self, offset: float, drift: float) -> None:
        self.offset = offset
        self.drift = drift
        self.random = Random(7)

    def read(self, here: float) -> float:
        """Return the remote time at an instant of the local clock."""
        return here + self.offset + self.drift * here

    def exchange(self, sent: float) -> TimeExchange:
        arrived = sent + self._draw_delay()
        returned = arrived + PROCESSING_SECONDS
        back = returned + self._draw_delay()
        return TimeExchange(sent, self.read(arrived), self.read(returned), back)

    def _draw_delay(self) -> float:
        return MIN_DELAY + self.random.expovariate(1 / QUEUEING_DELAY)


def estimate_clock(remote: RemoteClock, seconds: int) -> OffsetEstimator:
    """Return the estimate after 16 exchanges in quick succession and one in each following second."""
    clock = OffsetEstimator()
    for number in range(16):
        clock.add(remote.exchange(number / 100))
    for number in range(1, seconds):
        clock.add(remote.exchange(float(number)))
    return clock


@pytest.mark.parametrize("offset", [0.0, 10.0, -3600.0])
def test_offset_is_within_the_reported_uncertainty(offset: float) -> None:
    remote = RemoteClock(offset, drift=0.0)
    estimate = estimate_clock(remote, 2).offset
    assert abs(estimate.to_host(1.0) - remote.read(1.0)) <= estimate.uncertainty
    assert estimate.uncertainty < 1e-3


def test_exchange_with_the_smallest_round_trip_determines_the_offset() -> None:
    clock = OffsetEstimator()
    # The whole round trip of 0.3 s is on the way to the host.
    clock.add(TimeExchange(0.0, 10.3, 10.3, 0.3))
    # A round trip of 2 ms has an error of 1 ms at most.
    clock.add(TimeExchange(1.0, 11.001, 11.001, 1.002))
    # The whole round trip of 0.3 s is on the way back.
    clock.add(TimeExchange(2.0, 12.0, 12.0, 2.3))
    assert clock.offset.seconds == pytest.approx(10.0)
    assert clock.offset.uncertainty == pytest.approx(0.001)


def test_drift_of_50_ppm_is_estimated_and_extrapolated() -> None:
    remote = RemoteClock(10.0, drift=50e-6)
    estimate = estimate_clock(remote, 200).offset
    assert estimate.drift == pytest.approx(50e-6, rel=0.1)
    for here in (0.0, 100.0, 200.0):
        assert abs(estimate.to_host(here) - remote.read(here)) < 1e-3


def test_clock_conversion_is_invertible() -> None:
    estimate = estimate_clock(RemoteClock(10.0, drift=50e-6), 200).offset
    there = estimate.to_host(123.456)
    assert estimate.to_controller(there) == pytest.approx(123.456, abs=1e-9)


def test_clocks_are_equal_before_the_first_exchange() -> None:
    assert OffsetEstimator().offset.to_host(5.0) == 5.0


@pytest.mark.parametrize("seconds", [20, 60, 200])
def test_noise_is_not_estimated_as_drift(seconds: int) -> None:
    remote = RemoteClock(10.0, drift=0.0)
    assert estimate_clock(remote, seconds).offset.drift == 0.0


def test_accurate_samples_have_more_weight() -> None:
    clock = estimate_clock(RemoteClock(10.0, drift=0.0), 60)
    clock.add_permanent(30.0, 10.00001, 1e-4)
    assert clock.offset.to_host(60.0) - 60.0 == pytest.approx(10.00001, abs=1e-6)
