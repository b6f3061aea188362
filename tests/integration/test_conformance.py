"""Conformance of links with their requested properties, on each backend that this kernel supports.

The cases and tolerances are those of the benchmark (`tools.bench.conformance`), at fewer points. The virtual machine of
`tests/netem` has the same tolerances, with still fewer points and packets: it emulates its only processor at 1000
instructions per microsecond. At 1 gbit a full packet takes 12 microseconds, too few for that processor to send, delay
and receive it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from testbed_controller.shaping.backend import LINK_BACKENDS
from tools.bench import conformance
from tools.bench.conformance import NamespaceLab, repeat_failed
from tools.bench.measurement import Measurement

pytestmark = [
    pytest.mark.root,
    pytest.mark.timed,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

IN_VM = os.environ.get("TESTBED_IN_VM") == "1"


@pytest.fixture(scope="module", params=sorted(LINK_BACKENDS.own))
def lab(request: pytest.FixtureRequest) -> Iterator[NamespaceLab]:
    with NamespaceLab(request.param) as namespace_lab:
        yield namespace_lab


def check(case: Callable[[], Iterator[Measurement]]) -> None:
    measurements = list(repeat_failed(case))
    failures = []
    for measurement in measurements:
        value = f"{measurement.value:.5g} {measurement.unit}"
        target = measurement.to_json()["target"]
        print(f"{measurement.name}: {value} {target}")
        if not measurement.reached:
            failures.append(measurement.to_json())
    assert measurements
    assert not failures


def test_delays_match_request(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_delays(lab))


def test_jitters_match_request(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_jitters(lab, packets=1500))


def test_losses_match_request(lab: NamespaceLab) -> None:
    losses = (0.01, 0.5) if IN_VM else conformance.LOSSES
    check(lambda: conformance.measure_losses(lab, losses))


def test_burst_losses_match_request(lab: NamespaceLab) -> None:
    packets = 20_000 if IN_VM else 40_000
    check(lambda: conformance.measure_bursts(lab, packets=packets))


def test_duplication_reordering_and_corruption_match_request(lab: NamespaceLab) -> None:
    packets = 5000 if IN_VM else 10_000
    check(lambda: conformance.measure_alterations(lab, packets=packets))


def test_rates_of_slow_links_match_request(lab: NamespaceLab) -> None:
    # (rate, delay) of each link
    cases = [(250e3, 0.02), (1e6, 0.0), (10e6, 0.1)]
    if IN_VM:
        cases = [(1e6, 0.0), (10e6, 0.02)]
    check(lambda: conformance.measure_rates(lab, cases, patience=0.6))


@pytest.mark.parametrize(
    ("rate", "delay"), [(100e6, 0.02), (1e9, 0.0), (250e6 if IN_VM else 1e9, 0.02)]
)
def test_rates_of_fast_links_match_request(
    lab: NamespaceLab, rate: float, delay: float
) -> None:
    check(lambda: conformance.measure_rates(lab, [(rate, delay)], patience=0.6))


def test_link_change_is_quick_and_leaves_other_links(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_live_change(lab, packets=4000))


def test_access_limits_match_request(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_access(lab.backend))


def test_many_concurrent_pairs_match_request(lab: NamespaceLab) -> None:
    # The benchmark expects 20 pairs of two processors; the virtual machine has one slow processor.
    pairs = 4 if IN_VM else 20
    check(lambda: conformance.measure_many_pairs(lab.backend, pairs=pairs))
