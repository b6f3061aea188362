from __future__ import annotations

from random import Random

import pytest

from testbed_controller.lab.clocks import HostClock, Sample


class World:
    """A clock that is off and drifts, at the end of a way whose two directions are delayed by chance."""

    def __init__(
        self, offset: float, drift: float, least: float = 1e-4, queueing: float = 2e-3
    ) -> None:
        self.offset, self.drift, self.least, self.queueing = (
            offset,
            drift,
            least,
            queueing,
        )
        self.random = Random(7)

    def shown(self, here: float) -> float:
        return here + self.offset + self.drift * here

    def exchange(self, sent: float) -> Sample:
        there = sent + self.least + self.random.expovariate(1 / self.queueing)
        back = there + 1e-5 + self.least + self.random.expovariate(1 / self.queueing)
        return Sample(sent, self.shown(there), self.shown(there + 1e-5), back)


def clock(world: World, seconds: int) -> HostClock:
    found = HostClock()
    for number in range(16):
        found.add(world.exchange(number / 100))
    for number in range(1, seconds):
        found.add(world.exchange(float(number)))
    return found


@pytest.mark.parametrize("offset", [0.0, 10.0, -3600.0])
def test_offset_is_within_the_reported_uncertainty(offset: float) -> None:
    world = World(offset, 0.0)
    found = clock(world, 2).offset
    assert abs(found.there(1.0) - world.shown(1.0)) <= found.uncertainty
    assert found.uncertainty < 1e-3


def test_the_exchange_with_the_least_round_trip_counts() -> None:
    found = HostClock()
    found.add(Sample(0.0, 10.3, 10.3, 0.3))  # all of the round trip on the way there
    found.add(Sample(1.0, 11.001, 11.001, 1.002))
    found.add(Sample(2.0, 12.0, 12.0, 2.3))
    assert found.offset.seconds == pytest.approx(10.0)
    assert found.offset.uncertainty == pytest.approx(0.001)


def test_a_drift_of_50_ppm_is_followed_and_predicted() -> None:
    world = World(10.0, 50e-6)
    found = clock(world, 200).offset
    assert found.drift == pytest.approx(50e-6, rel=0.1)
    for here in (0.0, 100.0, 200.0):
        assert abs(found.there(here) - world.shown(here)) < 1e-3


def test_clock_conversion_is_invertible() -> None:
    found = clock(World(10.0, 50e-6), 200).offset
    assert found.here(found.there(123.456)) == pytest.approx(123.456, abs=1e-9)


def test_without_an_exchange_the_clocks_are_taken_to_be_one() -> None:
    assert HostClock().offset.there(5.0) == 5.0


def test_noise_is_not_taken_for_a_drift() -> None:
    for seconds in (20, 60, 200):
        assert clock(World(10.0, 0.0), seconds).offset.drift == 0.0


def test_accurate_samples_have_more_weight() -> None:
    world = World(10.0, 0.0)
    found = clock(world, 60)
    found.pin(30.0, 10.00001, 1e-4)
    assert found.offset.there(60.0) - 60.0 == pytest.approx(10.00001, abs=1e-6)
