"""Estimates of the measurement of link capacity, without a kernel that shapes links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed_controller.shaping import capability


class FakeShaping:
    """A backend without links and with given processor times."""

    def __init__(self, *processor_seconds: float) -> None:
        self._processor_seconds = iter(processor_seconds)

    def set(self, links: object) -> None:
        pass

    def probe(self, pairs: object) -> list[object]:
        return []

    def statistics(self) -> dict[str, float]:
        return {"processor_seconds": next(self._processor_seconds)}


@pytest.mark.parametrize(
    ("busy_seconds", "packets", "cost"),
    [(0.5, 1000, 0.0005), (0.0, 1000, None), (0.5, 0, None)],
    ids=["measured", "no processor time", "no packets"],
)
def test_packet_cost_is_unknown_without_packets_or_processor_time(
    busy_seconds: float,
    packets: int,
    cost: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both counters are read before and after the traffic and start at a value other than zero.
    packet_counts: Iterator[int] = iter([7, 7 + packets])
    monkeypatch.setattr(capability, "_count_received", lambda _: next(packet_counts))
    shaping = FakeShaping(2.0, 2.0 + busy_seconds)
    assert capability._measure_packet_cost(shaping, 1) == cost  # type: ignore[arg-type]
