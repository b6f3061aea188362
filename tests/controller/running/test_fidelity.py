"""Verification of measured links: repetition, the explanation of deviations, and the table of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from testbed.network.link import Link, Pair
from testbed.trace.outcome import LinkMeasurement
from testbed_controller.report.tables import draw_section
from testbed_controller.report.terminal import measurements_table
from testbed_controller.running.fidelity import (
    LinksError,
    advise_rate,
    count_neighbour_refusals,
    verify_links,
)

GOOD_LINK = Link(rate=50e6, delay=0.005)
GOOD = [
    LinkMeasurement("a", "b", GOOD_LINK, 49.6e6, 0.00508, 0.0, 30),
    LinkMeasurement("b", "a", GOOD_LINK, 49.6e6, 0.00508, 0.0, 30),
]
SLOW = LinkMeasurement(
    "a",
    "c",
    Link(rate=5e9, delay=0.001),
    2.31e9,
    0.00104,
    0.0,
    30,
    problem="carries 2310 mbit instead of 5000 mbit",
)
LATE = LinkMeasurement(
    "c",
    "a",
    Link(delay=0.001),
    None,
    0.0024,
    0.0,
    30,
    problem="delays by 2.40 ms instead of 1 ms",
)


class FakeProbe:
    """A measurement with prepared results for each call; further calls return the last results."""

    def __init__(self, *results: list[LinkMeasurement]) -> None:
        self.results = list(results)
        self.calls: list[list[Pair]] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        self.calls.append(list(pairs))
        results = self.results[0]
        if len(self.results) > 1:
            self.results.pop(0)
        return [result for result in results if pair_of(result) in pairs]


def pair_of(measurement: LinkMeasurement) -> Pair:
    return measurement.source, measurement.destination


def verify(
    probe: FakeProbe, *, accept: bool = False, retry_seconds: float = 0.0
) -> list[LinkMeasurement]:
    pairs = [pair_of(measurement) for measurement in probe.results[0]]
    return verify_links(probe, pairs, accept=accept, retry_seconds=retry_seconds)


@pytest.mark.parametrize(
    ("measurements", "accept"),
    [(GOOD, False), ([*GOOD, SLOW], True)],
    ids=["within tolerance", "accepted"],
)
def test_good_or_accepted_links_are_measured_once(
    measurements: list[LinkMeasurement], accept: bool
) -> None:
    probe = FakeProbe(measurements)
    assert verify(probe, accept=accept, retry_seconds=60) == measurements
    assert len(probe.calls) == 1


def test_only_links_outside_tolerance_are_measured_again() -> None:
    recovered = LinkMeasurement("a", "c", SLOW.requested, 4.97e9, 0.00104, 0.0, 30)
    probe = FakeProbe([*GOOD, SLOW], [SLOW], [recovered])
    assert verify(probe, retry_seconds=10) == [*GOOD, recovered]
    assert probe.calls[1:] == [[("a", "c")], [("a", "c")]]


def test_rate_above_the_measured_capacity_is_named_with_a_safe_rate() -> None:
    with pytest.raises(LinksError) as refusal:
        verify(FakeProbe([*GOOD, SLOW, LATE]))
    assert refusal.value.exit_code == 3
    text = str(refusal.value)
    assert "2 of 4 links" in text
    assert (
        "the rate of a -> c, 5gbit, exceeds the measured capacity of this host: use at most 2.1gbit"
        in text
    )
    assert "--accept-links" in text


def describe_error(*failed: LinkMeasurement, **host: float) -> str:
    """Return the message for failed links beside good ones, with measurements of the host."""
    return str(LinksError([*GOOD, *failed], host))


def test_load_is_a_cause_only_on_a_busy_host() -> None:
    busy = describe_error(LATE, host_load=0.97)
    assert "were 97% busy: use a less loaded host" in busy
    idle = describe_error(LATE, host_load=0.31)
    assert "use a less loaded host" not in idle
    assert "31% busy, so load is not the cause" in idle


def test_rate_reached_by_another_link_does_not_exceed_the_capacity() -> None:
    # The good links carry 50 Mbit/s, so the host can carry 64 kbit/s.
    slow = LinkMeasurement(
        "a", "c", Link(rate=64e3), 61e3, 0.005, 0.0, 30, problem="carries 0.061 mbit"
    )
    text = describe_error(slow, host_load=0.2)
    assert "exceeds the measured capacity" not in text


def test_overflow_of_the_neighbour_table_is_named() -> None:
    # A kernel with a full table drops packets to new neighbours without an error.
    lost = LinkMeasurement(
        "a",
        "c",
        Link(rate=2e7),
        None,
        None,
        1.0,
        10,
        problem="none of 10 packets arrived",
    )
    text = describe_error(lost, host_load=0.5, neighbours_refused=7)
    assert "gc_thresh3" in text


def test_refused_neighbours_are_summed_over_processors(tmp_path: Path) -> None:
    # One line for each processor, in hexadecimal: 0xa + 0x2 = 12.
    statistics = tmp_path / "arp_cache"
    statistics.write_text(
        "entries  allocs table_fulls\n00000011 0000006f 0000000a\n00000011 00000072 00000002\n"
    )
    assert count_neighbour_refusals(statistics) == 12
    assert count_neighbour_refusals(tmp_path / "elsewhere") == 0


def test_time_stolen_by_a_hypervisor_is_named_as_the_cause() -> None:
    assert (
        "the hypervisor took 24% of the processor time for other machines: try again later"
        in describe_error(LATE, host_stolen=0.24)
    )
    assert "hypervisor" not in describe_error(LATE, host_stolen=0.01)


def render_table(measurements: list[LinkMeasurement]) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(draw_section(measurements_table(measurements), 140))
    return captured.get()


def test_table_shows_the_limit_of_an_access() -> None:
    limited = LinkMeasurement(
        "hub",
        "board1",
        Link(delay=0.005),
        60.25e6,
        0.00515,
        0.0,
        30,
        "carries 60.25 mbit instead of 50 mbit",
        limit=50e6,
    )
    assert "50 mbit, 5 ms" in render_table([limited])
    assert LinkMeasurement.from_json(limited.to_json()) == limited


def test_table_lists_failed_links_first() -> None:
    table = render_table([*GOOD, SLOW])
    stripped_lines = [line.strip() for line in table.splitlines()]
    lines = [line for line in stripped_lines if line]
    # The second line is a rule.
    header, _, failed, good = lines[:4]
    assert header.split() == ["Link", "Requested", "Measured", "Problem"]
    assert failed.startswith("a → c")
    assert "5 gbit, 1 ms" in failed
    assert "2.31 gbit" in failed
    assert failed.endswith("carries 2310 mbit instead of 5000 mbit")
    # Both directions of equal links share a line.
    assert good.startswith("a ↔ b")


@pytest.mark.parametrize(
    ("carried", "advised"), [(2.31e9, 2.1e9), (987e6, 930e6), (1e6, 950e3)]
)
def test_recommended_rate_is_within_the_capacity(
    carried: float, advised: float
) -> None:
    # 95 % of the carried rate, rounded down to two digits: 2.31 Gbit/s * 0.95 = 2.1945, hence 2.1 Gbit/s.
    assert advise_rate(carried) == pytest.approx(advised)
