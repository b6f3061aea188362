"""The estimates of the measurement of link capacity, without a kernel that shapes links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testbed_controller.shaping import capability


class FakeShaping:
    """A backend that measures nothing and reports given processor times."""

    def __init__(self, *processor_seconds: float) -> None:
        self._processor_seconds = iter(processor_seconds)

    def set(self, links: object) -> None:
        pass

    def probe(self, pairs: object) -> list[object]:
        return []

    def statistics(self) -> dict[str, float]:
        return {"processor_seconds": next(self._processor_seconds)}


@pytest.mark.parametrize(
    ("busy", "packets", "cost"),
    [(0.5, 1000, 0.0005), (0.0, 1000, None), (0.5, 0, None)],
)
def test_cost_of_a_packet_is_unknown_if_nothing_was_counted(
    busy: float, packets: int, cost: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters: Iterator[int] = iter([7, 7 + packets])
    monkeypatch.setattr(capability, "_count_received", lambda _: next(counters))
    shaping = FakeShaping(2.0, 2.0 + busy)
    assert capability._packet_cost(shaping, 1) == cost  # type: ignore[arg-type]
