from __future__ import annotations

import pytest

from testbed_controller.lab import clocks
from testbed_controller.lab.clocks import EngineClock


class World:
    """Two clocks, of which one shows more by an offset; an exchange takes some time there and back."""

    def __init__(
        self, offset: float, there: float = 0.002, back: float = 0.001
    ) -> None:
        self.now, self.offset, self.ways = 50.0, offset, (there, back)

    def monotonic(self) -> float:
        return self.now

    def ask(self) -> float:
        self.now += self.ways[0]
        answer = self.now + self.offset
        self.now += self.ways[1]
        return answer


@pytest.mark.parametrize("offset", [1000.0, -1000.0])
def test_the_clock_of_a_virtual_machine_is_converted(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(offset)
    monkeypatch.setattr(clocks.time, "monotonic", world.monotonic)
    clock = EngineClock(world.ask)
    assert clock.is_other
    assert clock.there(60.0) == pytest.approx(60.0 + offset, abs=0.0015)
    assert clock.here(60.0 + offset) == pytest.approx(60.0, abs=0.0015)
    world.offset += 1.0
    assert clock.there(60.0) == clock.there(
        60.0
    )  # what a device keeps on its disk is kept under it


@pytest.mark.parametrize("ways", [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)])
def test_slow_answers_do_not_make_another_clock(
    ways: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(0.0, *ways)
    monkeypatch.setattr(clocks.time, "monotonic", world.monotonic)
    assert not EngineClock(world.ask).is_other
