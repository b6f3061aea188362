"""Tolerances of measured links."""

from __future__ import annotations

import pytest

from testbed.network.link import Link
from testbed_controller.shaping import tolerance


@pytest.mark.parametrize(
    ("packets", "probability", "expected"),
    # scipy.stats.binom.ppf([.005, .995], n, p)
    [
        (1000, 0.01, (3, 19)),
        (30, 0.05, (0, 5)),
        (20_000, 0.5, (9818, 10182)),
        (100, 0.0, (0, 0)),
        (7, 1.0, (7, 7)),
    ],
)
def test_binomial_interval(
    packets: int, probability: float, expected: tuple[int, int]
) -> None:
    assert tolerance.binomial_interval(packets, probability) == expected


def describe(
    link: Link,
    rate: float | None,
    delay: float | None,
    sent: int = 1000,
    lost: int = 12,
    gate: float = 0.0,
) -> str:
    """Return the deviations of a measured link, empty for a link within its tolerances."""
    return tolerance.describe_deviations(link, rate, delay, sent, lost, gate=gate) or ""


def test_deviations_beyond_the_tolerances_are_named() -> None:
    # Tolerated are a rate of 96 to 101 %, a delay within 2 %, and 3 to 19 losses of 1000.
    link = Link(rate=10e6, delay=0.02, loss=0.01)
    assert describe(link, rate=9.7e6, delay=0.0203) == ""
    assert "carries 9.5 mbit instead of 10 mbit" in describe(
        link, rate=9.5e6, delay=0.02
    )
    assert "delays by 20.50 ms instead of 20 ms" in describe(
        link, rate=10e6, delay=0.0205
    )
    assert "loses 40 of 1000" in describe(link, rate=10e6, delay=0.02, lost=40)
    assert "none of 30" in describe(link, rate=None, delay=None, sent=30, lost=30)


def test_packets_over_down_link_are_a_deviation() -> None:
    down = Link(up=False)
    assert describe(down, rate=None, delay=None, sent=30, lost=30) == ""
    assert "is down, yet 1 of 30" in describe(
        down, rate=None, delay=0.1, sent=30, lost=29
    )


def test_tolerance_of_a_delay_includes_the_time_at_the_gate() -> None:
    slow = Link(rate=8e3, delay=0.005)
    # 2 % of the measured 66 + 5 ms are 1.42 ms.
    assert describe(slow, rate=8e3, delay=0.006, sent=10, lost=0, gate=0.066) == ""
    assert "delays by 6.50 ms" in describe(
        slow, rate=8e3, delay=0.0065, sent=10, lost=0, gate=0.066
    )
