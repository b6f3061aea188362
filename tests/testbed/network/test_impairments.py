"""The random processes do on average what their parameters say."""

from __future__ import annotations

import itertools
import math
from itertools import groupby
from random import Random
from statistics import fmean, median, pstdev

import pytest

from testbed.network import impairments
from testbed.network.link import Distribution, GilbertElliott, Link
from testbed_controller.shaping.medium import Bottleneck
from testbed_controller.shaping.tolerance import binomial_interval

DISTRIBUTIONS: tuple[Distribution, ...] = ("normal", "uniform", "pareto")


def correlation(values: list[float]) -> float:
    mean = fmean(values)
    products = fmean(
        (one - mean) * (other - mean) for one, other in itertools.pairwise(values)
    )
    return products / pstdev(values) ** 2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tables_have_mean_0_and_deviation_1_and_fit_netem(
    distribution: Distribution,
) -> None:
    table = impairments.quantiles(distribution)
    assert list(table) == sorted(table)
    assert fmean(table) == pytest.approx(0, abs=1e-9)
    assert pstdev(table) == pytest.approx(1)
    assert max(map(abs, table)) < impairments.FURTHEST


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_jitter_is_the_standard_deviation_with_memory_and_without(
    distribution: Distribution, memory: float
) -> None:
    link = Link(
        delay=0.02, jitter=0.005, distribution=distribution, jitter_correlation=memory
    )
    draw = impairments.delay_process(link, "seed")
    assert draw is not None
    values = [draw() for _ in range(40_000)]
    assert fmean(values) == pytest.approx(0.02, rel=0.02)
    assert pstdev(values) == pytest.approx(0.005, rel=0.04)
    assert median(values) == pytest.approx(impairments.median_delay(link), abs=2e-4)
    assert min(values) >= 0
    # Read as quantiles of another distribution, values are a little less correlated than the normal ones behind.
    assert correlation(values) == pytest.approx(
        memory, abs=0.1 if distribution == "pareto" else 0.03
    )


@pytest.mark.parametrize("loss", [0.001, 0.1, 0.5])
def test_independent_loss(loss: float) -> None:
    lost = impairments.loss_process(Link(loss=loss), "seed")
    assert lost is not None
    lowest, highest = binomial_interval(50_000, loss)
    assert lowest <= sum(lost() for _ in range(50_000)) <= highest


@pytest.mark.parametrize(("loss", "memory"), [(0.05, 0.25), (0.3, 0.7)])
def test_correlated_loss_loses_its_share_and_correlates(
    loss: float, memory: float
) -> None:
    lost = impairments.loss_process(Link(loss=loss, loss_correlation=memory), "seed")
    assert lost is not None
    fates = [float(lost()) for _ in range(200_000)]
    assert fmean(fates) == pytest.approx(loss, rel=0.05)
    assert correlation(fates) == pytest.approx(memory, abs=0.02)


def test_bursts_have_their_rate_and_length() -> None:
    lost = impairments.loss_process(Link(bursts=GilbertElliott(p=0.01, r=0.2)), "seed")
    assert lost is not None
    fates = [lost() for _ in range(200_000)]
    assert fmean(fates) == pytest.approx(0.01 / 0.21, rel=0.1)
    assert fmean(len([*run]) for gone, run in groupby(fates) if gone) == pytest.approx(
        5, rel=0.1
    )


def test_bursts_that_lose_a_part_only() -> None:
    states = GilbertElliott(p=0.02, r=0.1, bad_loss=0.6, good_loss=0.01)
    lost = impairments.loss_process(Link(bursts=states), "seed")
    assert lost is not None
    assert fmean(lost() for _ in range(200_000)) == pytest.approx(states.loss, rel=0.05)


def test_how_far_correlated_losses_scatter() -> None:
    link = Link(bursts=GilbertElliott(p=0.02, r=0.2, bad_loss=0.8))
    share = impairments.expected_loss(link)
    counts = []
    for seed in range(400):
        lost = impairments.loss_process(link, str(seed))
        assert lost is not None
        counts.append(sum(lost() for _ in range(2000)))
    independent = 2000 * share * (1 - share)
    assert pstdev(counts) ** 2 / independent == pytest.approx(
        impairments.loss_variance_ratio(link), rel=0.2
    )


def test_reordered_packets_skip_the_delay() -> None:
    draw = impairments.delay_process(Link(delay=0.02, reorder=0.1), "seed")
    assert draw is not None
    values = [draw() for _ in range(10_000)]
    assert set(values) == {0.0, 0.02}
    lowest, highest = binomial_interval(10_000, 0.1)
    assert lowest <= values.count(0.0) <= highest


def test_the_same_seed_gives_the_same_fates() -> None:
    link = Link(delay=0.01, jitter=0.001, loss=0.1)
    for process in (impairments.delay_process, impairments.loss_process):
        one, again, other = (process(link, seed) for seed in ("a", "a", "b"))
        assert one
        assert again
        assert other
        first = [one() for _ in range(50)]
        assert first == [again() for _ in range(50)]
        assert first != [other() for _ in range(50)]


def test_a_link_without_impairments_needs_no_process() -> None:
    link = Link(delay=0.01)
    assert (
        impairments.loss_process(link, "")
        is impairments.delay_process(link, "")
        is None
    )


def test_corruption_turns_one_bit_and_never_one_of_the_header() -> None:
    packet = bytes([0x45]) + bytes(range(1, 60))
    random = Random(1)
    results = [impairments.corrupt_packet(packet, random) for _ in range(3000)]
    condemned = sum(result is None for result in results)
    assert condemned == pytest.approx(1000, rel=0.1)  # 20 of 60 bytes
    for result in results:
        if result is not None:
            assert len(result) == len(packet)
            assert result[:20] == packet[:20]
            assert (
                sum(
                    (one ^ other).bit_count()
                    for one, other in zip(packet, result, strict=True)
                )
                == 1
            )


def test_sources_take_turns_at_a_bottleneck() -> None:
    shared: Bottleneck[str] = Bottleneck(rate=8000, limit=2)  # a byte a millisecond
    assert shared.due == math.inf
    for source, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        assert shared.enter(source, 1.0, 100, item)
    assert not shared.enter("a", 1.0, 100, "a3")
    assert shared.refused == 1
    left = []
    while shared.due < math.inf:
        left.append((round(shared.due, 6), shared.leave()))
    assert left == [(1.0, "a1"), (1.1, "b1"), (1.2, "a2")]
    # It is busy until 1.3, then free; what comes later passes at once.
    assert shared.enter("b", 1.25, 100, "b2")
    assert shared.due == pytest.approx(1.3)
    shared.leave()
    assert shared.enter("b", 5.0, 100, "b3")
    assert shared.due == 5.0


def test_removed_bottleneck_lets_all_messages_pass() -> None:
    shared: Bottleneck[int] = Bottleneck(rate=8, limit=10)
    for number in range(5):
        shared.enter("a", 0.0, 1000, number)
    shared.leave()
    assert shared.due == 1000.0
    shared.alter(2.0, math.inf, 10)
    for _ in range(4):
        assert shared.due == 2.0
        shared.leave()
