"""Statistics of the random impairments of links, and the shared bottleneck."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from itertools import groupby
from random import Random
from statistics import fmean, median, pstdev

import pytest

from testbed.network import impairments
from testbed.network.link import Distribution, GilbertElliott, Link
from testbed_controller.shaping.medium import Bottleneck
from testbed_controller.shaping.tolerance import binomial_interval

DISTRIBUTIONS: tuple[Distribution, ...] = ("normal", "uniform", "pareto")


def autocorrelation(values: list[float]) -> float:
    """Return the correlation of successive values."""
    mean = fmean(values)
    products = []
    for value, successor in itertools.pairwise(values):
        products.append((value - mean) * (successor - mean))
    return fmean(products) / pstdev(values) ** 2


def draw_losses(link: Link, count: int, seed: str = "seed") -> list[bool]:
    """Return whether each of ``count`` packets is lost."""
    is_lost = impairments.loss_process(link, seed)
    assert is_lost is not None
    return [is_lost() for _ in range(count)]


def draw_delays(link: Link, count: int) -> list[float]:
    delay = impairments.delay_process(link, "seed")
    assert delay is not None
    return [delay() for _ in range(count)]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_quantile_table_is_standardised_and_within_netem_range(
    distribution: Distribution,
) -> None:
    table = impairments.quantiles(distribution)
    assert list(table) == sorted(table)
    assert fmean(table) == pytest.approx(0, abs=1e-9)
    assert pstdev(table) == pytest.approx(1)
    assert max(map(abs, table)) < impairments.MAX_DEVIATIONS


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_delays_have_given_mean_deviation_and_correlation(
    distribution: Distribution, correlation: float
) -> None:
    link = Link(
        delay=0.02,
        jitter=0.005,
        distribution=distribution,
        jitter_correlation=correlation,
    )
    delays = draw_delays(link, 40_000)
    assert fmean(delays) == pytest.approx(0.02, rel=0.02)
    assert pstdev(delays) == pytest.approx(0.005, rel=0.04)
    assert median(delays) == pytest.approx(impairments.median_delay(link), abs=2e-4)
    assert min(delays) >= 0
    # Correlated normal values become quantiles of the distribution, which are a little less correlated.
    tolerance = 0.1 if distribution == "pareto" else 0.03
    assert autocorrelation(delays) == pytest.approx(correlation, abs=tolerance)


@pytest.mark.parametrize("loss", [0.001, 0.1, 0.5])
def test_independent_losses_have_given_share(loss: float) -> None:
    lowest, highest = binomial_interval(50_000, loss)
    assert lowest <= sum(draw_losses(Link(loss=loss), 50_000)) <= highest


@pytest.mark.parametrize(("loss", "correlation"), [(0.05, 0.25), (0.3, 0.7)])
def test_correlated_losses_have_given_share_and_correlation(
    loss: float, correlation: float
) -> None:
    link = Link(loss=loss, loss_correlation=correlation)
    losses = [float(is_lost) for is_lost in draw_losses(link, 200_000)]
    assert fmean(losses) == pytest.approx(loss, rel=0.05)
    assert autocorrelation(losses) == pytest.approx(correlation, abs=0.02)


def test_bursts_have_expected_share_and_length() -> None:
    losses = draw_losses(Link(bursts=GilbertElliott(p=0.01, r=0.2)), 200_000)
    # The share of time in the bad state is p / (p + r), and a burst has 1 / r packets.
    assert fmean(losses) == pytest.approx(0.01 / 0.21, rel=0.1)
    burst_lengths = []
    for is_lost, packets in groupby(losses):
        if is_lost:
            burst_lengths.append(len([*packets]))
    assert fmean(burst_lengths) == pytest.approx(5, rel=0.1)


def test_bursts_with_partial_loss_have_expected_share() -> None:
    bursts = GilbertElliott(p=0.02, r=0.1, bad_loss=0.6, good_loss=0.01)
    losses = draw_losses(Link(bursts=bursts), 200_000)
    assert fmean(losses) == pytest.approx(bursts.loss, rel=0.05)


def test_variance_ratio_predicts_scatter_of_correlated_losses() -> None:
    link = Link(bursts=GilbertElliott(p=0.02, r=0.2, bad_loss=0.8))
    packets = 2000
    counts = [sum(draw_losses(link, packets, str(seed))) for seed in range(400)]
    share = impairments.expected_loss(link)
    # The variance of the binomial distribution.
    independent_variance = packets * share * (1 - share)
    expected_ratio = impairments.loss_variance_ratio(link)
    ratio = pstdev(counts) ** 2 / independent_variance
    assert ratio == pytest.approx(expected_ratio, rel=0.2)


def test_reordered_packets_have_no_delay() -> None:
    delays = draw_delays(Link(delay=0.02, reorder=0.1), 10_000)
    assert set(delays) == {0.0, 0.02}
    lowest, highest = binomial_interval(10_000, 0.1)
    assert lowest <= delays.count(0.0) <= highest


@pytest.mark.parametrize(
    "make_process", [impairments.delay_process, impairments.loss_process]
)
def test_seed_determines_random_process(
    make_process: Callable[[Link, str], Callable[[], float] | None],
) -> None:
    link = Link(delay=0.01, jitter=0.001, loss=0.1)
    sequences = []
    for seed in ("a", "a", "b"):
        draw = make_process(link, seed)
        assert draw is not None
        sequences.append([draw() for _ in range(50)])
    assert sequences[0] == sequences[1]
    assert sequences[0] != sequences[2]


def test_link_without_impairments_has_no_random_process() -> None:
    link = Link(delay=0.01)
    assert impairments.loss_process(link, "") is None
    assert impairments.delay_process(link, "") is None


def test_corruption_flips_one_bit_after_ip_header() -> None:
    # 0x45 begins an IPv4 header of 20 bytes.
    packet = bytes([0x45]) + bytes(range(1, 60))
    random = Random(1)
    results = [impairments.corrupt_packet(packet, random) for _ in range(3000)]
    # A packet with a wrong header is dropped, and the header has 20 of 60 bytes.
    assert results.count(None) == pytest.approx(1000, rel=0.1)
    for result in results:
        if result is None:
            continue
        assert len(result) == len(packet)
        assert result[:20] == packet[:20]
        difference = int.from_bytes(result) ^ int.from_bytes(packet)
        assert difference.bit_count() == 1


def test_sources_take_turns_at_bottleneck() -> None:
    # One byte a millisecond, and two waiting packets of each source.
    shared: Bottleneck[str] = Bottleneck(rate=8000, limit=2)
    assert shared.next_departure == math.inf
    for source, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        assert shared.enter(source, 1.0, 100, item)
    assert not shared.enter("a", 1.0, 100, "a3")
    assert shared.dropped == 1
    departures = []
    while shared.next_departure < math.inf:
        departures.append((round(shared.next_departure, 6), shared.leave()))
    # 100 bytes take a tenth of a second.
    assert departures == [(1.0, "a1"), (1.1, "b1"), (1.2, "a2")]
    # The bottleneck is busy until 1.3; a packet that arrives later passes at once.
    assert shared.enter("b", 1.25, 100, "b2")
    assert shared.next_departure == pytest.approx(1.3)
    shared.leave()
    assert shared.enter("b", 5.0, 100, "b3")
    assert shared.next_departure == 5.0


def test_waiting_messages_pass_once_bottleneck_is_unlimited() -> None:
    shared: Bottleneck[int] = Bottleneck(rate=8, limit=10)
    for number in range(5):
        shared.enter("a", 0.0, 1000, number)
    shared.leave()
    # 1,000 bytes take 1,000 seconds at a byte a second.
    assert shared.next_departure == 1000.0
    shared.alter(2.0, math.inf, 10)
    for _ in range(4):
        assert shared.next_departure == 2.0
        shared.leave()
