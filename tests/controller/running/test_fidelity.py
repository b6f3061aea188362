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
    nearest_rate,
    neighbours_refused,
    verify_links,
)

FINE = [
    LinkMeasurement(
        source, destination, Link(rate=50e6, delay=0.005), 49.6e6, 0.00508, 0.0, 30
    )
    for source, destination in (("a", "b"), ("b", "a"))
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


class Probe:
    """Measures links as it is told to, one list a time; the last one from then on."""

    def __init__(self, *found: list[LinkMeasurement]) -> None:
        self.found = list(found)
        self.asked: list[list[Pair]] = []

    def __call__(self, pairs: Sequence[Pair]) -> list[LinkMeasurement]:
        self.asked.append(list(pairs))
        now = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        return [each for each in now if (each.source, each.destination) in pairs]


def verify(
    probe: Probe, *, accept: bool = False, retry_seconds: float = 0.0
) -> list[LinkMeasurement]:
    every = [(each.source, each.destination) for each in probe.found[0]]
    return verify_links(probe, every, accept=accept, retry_seconds=retry_seconds)


def test_links_within_tolerance_or_accepted_pass_at_once() -> None:
    for probe, accept in ((Probe(FINE), False), (Probe([*FINE, SLOW]), True)):
        found = list(probe.found[0])
        assert verify(probe, accept=accept, retry_seconds=60) == found
        assert len(probe.asked) == 1


def test_only_links_outside_tolerance_are_measured_again() -> None:
    well = LinkMeasurement("a", "c", SLOW.requested, 4.97e9, 0.00104, 0.0, 30)
    probe = Probe([*FINE, SLOW], [SLOW], [well])
    assert verify(probe, retry_seconds=10) == [*FINE, well]
    assert probe.asked[1:] == [[("a", "c")]] * 2


def test_rate_above_the_measured_capacity_is_named_with_a_safe_one() -> None:
    with pytest.raises(LinksError) as refusal:
        verify(Probe([*FINE, SLOW, LATE]))
    assert refusal.value.exit_code == 3
    text = str(refusal.value)
    assert "2 of 4 links" in text
    assert (
        "the rate of a -> c, 5gbit, exceeds the measured capacity of this host: use at most 2.1gbit"
        in text
    )
    assert "--accept-links" in text


def test_load_is_blamed_only_where_it_was_measured() -> None:
    assert "were 97% busy: use a less loaded host" in str(
        LinksError([*FINE, LATE], {"host_load": 0.97})
    )
    idle = str(LinksError([*FINE, LATE], {"host_load": 0.31}))
    assert "use a less loaded host" not in idle
    assert "31% busy, so load is not the cause" in idle


def test_rate_reached_by_another_link_does_not_exceed_the_capacity() -> None:
    slow = LinkMeasurement(
        "a", "c", Link(rate=64e3), 61e3, 0.005, 0.0, 30, problem="carries 0.061 mbit"
    )
    assert "above what this host was measured to carry" not in str(
        LinksError([*FINE, slow], {"host_load": 0.2})
    )


def test_an_overflow_of_the_neighbour_table_is_named(tmp_path: Path) -> None:
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
    assert "gc_thresh3" in str(
        LinksError([*FINE, lost], {"host_load": 0.5, "neighbours_refused": 7})
    )
    table = tmp_path / "arp_cache"
    table.write_text(
        "entries  allocs table_fulls\n00000011 0000006f 0000000a\n00000011 00000072 00000002\n"
    )
    assert neighbours_refused(table) == 12
    assert neighbours_refused(tmp_path / "elsewhere") == 0


def test_time_stolen_by_a_hypervisor_is_named_as_the_cause() -> None:
    text = str(LinksError([*FINE, LATE], {"host_stolen": 0.24}))
    assert (
        "the hypervisor took 24% of the processor time for other machines: try again later"
        in text
    )
    assert "hypervisor" not in str(LinksError([*FINE, LATE], {"host_stolen": 0.01}))


def test_the_table_shows_the_limit_of_an_access() -> None:
    problem = "carries 60.25 mbit instead of 50 mbit"
    limited = LinkMeasurement(
        "hub",
        "board1",
        Link(delay=0.005),
        60.25e6,
        0.00515,
        0.0,
        30,
        problem,
        limit=50e6,
    )
    console = Console(width=140)
    with console.capture() as captured:
        console.print(draw_section(measurements_table([limited]), 140))
    assert "50 mbit, 5 ms" in captured.get()
    assert LinkMeasurement.from_json(limited.to_json()) == limited


def test_table_lists_failed_links_first() -> None:
    console = Console(width=140, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(draw_section(measurements_table([*FINE, SLOW]), 140))
    lines = [line.strip() for line in captured.get().splitlines() if line.strip()]
    assert lines[0].split() == ["Link", "Requested", "Measured", "Problem"]
    assert lines[2].startswith("a → c")
    assert "5 gbit, 1 ms" in lines[2]
    assert "2.31 gbit" in lines[2]
    assert lines[2].endswith("carries 2310 mbit instead of 5000 mbit")
    assert lines[3].startswith("a ↔ b")


@pytest.mark.parametrize(
    ("carried", "advised"), [(2.31e9, 2.1e9), (987e6, 930e6), (1e6, 950e3)]
)
def test_recommended_rate_is_within_the_capacity(
    carried: float, advised: float
) -> None:
    assert nearest_rate(carried) == pytest.approx(advised)
