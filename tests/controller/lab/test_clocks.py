"""Conversion between the clock of the host and the clock of an engine in a virtual machine."""

from __future__ import annotations

import pytest

from testbed_controller.lab import clocks
from testbed_controller.lab.clocks import EngineClock


class TwoClocks:
    """The clock of the host, and a clock of an engine with a constant offset and delays of the request."""

    def __init__(
        self, offset: float, request_delay: float = 0.002, answer_delay: float = 0.001
    ) -> None:
        self.now = 50.0
        self.offset = offset
        self.request_delay = request_delay
        self.answer_delay = answer_delay

    def monotonic(self) -> float:
        return self.now

    def read_engine(self) -> float:
        self.now += self.request_delay
        engine_time = self.now + self.offset
        self.now += self.answer_delay
        return engine_time


@pytest.mark.parametrize("offset", [1000.0, -1000.0])
def test_clock_of_virtual_machine_is_converted(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = TwoClocks(offset)
    monkeypatch.setattr(clocks.time, "monotonic", both.monotonic)
    clock = EngineClock(both.read_engine)
    assert clock.has_offset
    # The error is at most half of the round trip of 3 ms.
    assert clock.to_host(60.0) == pytest.approx(60.0 + offset, abs=0.0015)
    assert clock.to_controller(60.0 + offset) == pytest.approx(60.0, abs=0.0015)
    both.offset += 1.0
    # Conversions use the stored estimate, without another exchange.
    assert clock.to_host(60.0) == clock.to_host(60.0)


@pytest.mark.parametrize(
    ("request_delay", "answer_delay"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)]
)
def test_slow_answer_is_not_taken_for_offset(
    request_delay: float, answer_delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = TwoClocks(0.0, request_delay, answer_delay)
    monkeypatch.setattr(clocks.time, "monotonic", both.monotonic)
    assert not EngineClock(both.read_engine).has_offset
