"""Links do what is asked of them, on each backend that this kernel serves.

The cases and their bounds are those of the bench (`tools.bench.conformance`), at fewer points. The virtual machine
of `tests/netem` is held to the same bounds, at fewer points still and with fewer packets, since it emulates every
instruction: its one processor has 1000 of them for a microsecond, and 1 gbit through netem leaves 12 microseconds for a
packet to be sent, delayed and received, which is too little.
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
    with NamespaceLab(request.param) as made:
        yield made


def check(case: Callable[[], Iterator[Measurement]]) -> None:
    measurements = list(repeat_failed(case))
    for measurement in measurements:
        print(
            f"{measurement.name}: {measurement.value:.5g} {measurement.unit} {measurement.to_json()['target']}"
        )
    outside = [
        measurement.to_json() for measurement in measurements if not measurement.reached
    ]
    assert measurements
    assert not outside


def test_delay(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_delays(lab))


def test_jitter(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_jitters(lab, packets=1500))


def test_loss(lab: NamespaceLab) -> None:
    check(
        lambda: conformance.measure_losses(
            lab, (0.01, 0.5) if IN_VM else conformance.LOSSES
        )
    )


def test_loss_in_bursts(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_bursts(lab, packets=20_000 if IN_VM else 40_000))


def test_duplication_reordering_corruption(lab: NamespaceLab) -> None:
    check(
        lambda: conformance.measure_alterations(lab, packets=5000 if IN_VM else 10_000)
    )


def test_rates_of_slow_links(lab: NamespaceLab) -> None:
    check(
        lambda: conformance.measure_rates(
            lab,
            [(1e6, 0.0), (10e6, 0.02)]
            if IN_VM
            else [(250e3, 0.02), (1e6, 0.0), (10e6, 0.1)],
            patience=0.6,
        )
    )


@pytest.mark.parametrize(
    ("rate", "delay"), [(100e6, 0.02), (1e9, 0.0), (250e6 if IN_VM else 1e9, 0.02)]
)
def test_rates_of_fast_links(lab: NamespaceLab, rate: float, delay: float) -> None:
    check(lambda: conformance.measure_rates(lab, [(rate, delay)], patience=0.6))


def test_a_change_is_quick_and_spares_others(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_live_change(lab, packets=4000))


def test_access_limits(lab: NamespaceLab) -> None:
    check(lambda: conformance.measure_access(lab.backend))


def test_many_pairs_at_once(lab: NamespaceLab) -> None:
    # Twenty pairs are asked of two processors, and the virtual machine has one.
    check(lambda: conformance.measure_many_pairs(lab.backend, pairs=4 if IN_VM else 20))
