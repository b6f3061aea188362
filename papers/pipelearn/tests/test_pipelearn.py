"""PipeLearn's time model and its choice of split point and number of mini-batches."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.hardware import DeviceSpec
from testbed.ml.models.catalog import create
from testbed.ml.rounds.estimate import (
    Choice,
    LayerTimes,
    PairProfile,
    aggregation_time,
    epoch_time,
    iterations,
    layer_times,
    make_profile,
    mini_batch,
    shortest_epoch,
)
from testbed.network.link import Link
from testbed.network.parts import PRESETS
from testbed_pipelearn.method import all_choices, paper_choices, parallel_batches
from tests.helpers.training import sgd_config

SAMPLES, BATCH, DEVICES = 10_000, 100, 4
NETWORKS = ("4g", "4g+", "wifi")
SERVER_SPEED = 20.0
"""Speed of one of the eight processors of the server, relative to a device.

In HPL a core of a desktop is 10 times as fast as a Raspberry Pi 3B; its 32-bit system takes another factor of 2.
"""


def best_of_all_choices(profile: PairProfile, samples: int, batch_size: int) -> Choice:
    """Return the choice with the shortest predicted epoch of all split points and batch numbers."""
    counts = range(1, batch_size + 1)
    splits = range(1, profile.depth + 1)
    choices = (Choice(split, count) for split, count in product(splits, counts))
    return shortest_epoch(profile, samples, batch_size, choices)


def score_of(
    profile: PairProfile, choice: Choice, samples: int, batch_size: int
) -> float:
    """Return the score of equation (15): the shortest predicted epoch divided by the epoch of a choice."""
    best = best_of_all_choices(profile, samples, batch_size)
    return epoch_time(profile, best, samples, batch_size) / epoch_time(
        profile, choice, samples, batch_size
    )


# Share of each layer in the time of forward and backward passes, measured with batch 100, torch 2.13, one thread, x86.
# By FLOPs the first layers would have 10 % and 7 %, but normalisation, activation and pooling take time, too.
SHARES = {
    "vgg5": (0.477, 0.348, 0.130, 0.041, 0.004),
    "resnet18": (0.117, 0.098, 0.097, 0.092, 0.087, 0.119, 0.120, 0.145, 0.123, 0.002),
}
EPOCH = {"vgg5": 495.0, "resnet18": 1130.0}
"""Seconds of an epoch on one device, from the ratios of the paper for VGG5 and the measured ratio of both models."""


def make_profile_of_cell(name: str, network: str) -> PairProfile:
    """Return the profile of a device, the server and their link in one of the cells of the paper."""
    model = create(name, {}, (3, 32, 32), 10)
    spec = DeviceSpec("device", 1e9, 1e9)
    preset = PRESETS[network]
    times = layer_times(model, sgd_config(), spec)
    plain = make_profile(
        model, times, times, Link(rate=preset.up), Link(rate=preset.down)
    )
    sample = EPOCH[name] / SAMPLES

    def layers(speed: float) -> tuple[LayerTimes, ...]:
        return tuple(
            LayerTimes(sample * share / 3 / speed, sample * share * 2 / 3 / speed, 0.0)
            for share in SHARES[name]
        )

    return replace(plain, device=layers(1.0), server=layers(SERVER_SPEED))


CELLS = [(name, network) for name in SHARES for network in NETWORKS]


def test_mini_batch_size_is_rounded_down() -> None:
    assert [mini_batch(100, count) for count in (1, 3, 7, 12, 100)] == [
        100,
        33,
        14,
        8,
        1,
    ]
    for wrong in (0, 101):
        with pytest.raises(ValueError, match="has 1 to 100 mini-batches"):
            mini_batch(100, wrong)


def test_epoch_has_only_whole_iterations() -> None:
    assert iterations(10_000, 100, 1) == 100
    assert iterations(10_000, 100, 12) == 104  # 12 mini-batches of 8 make 96 samples
    assert iterations(30, 100, 1) == 1


def test_durations_match_equations_5_to_10() -> None:
    layers = tuple(
        LayerTimes(forward=q, backward=2 * q, update=0.0) for q in (1.0, 2.0, 4.0)
    )
    server = tuple(
        LayerTimes(forward=q / 10, backward=q / 5, update=0.0) for q in (1.0, 2.0, 4.0)
    )
    durations = PairProfile(
        layers, server, (1_000_000, 10, 10), (0, 0, 0), Link(rate=8e6), Link(rate=16e6)
    ).durations(1, 3)
    assert durations["forward"] == pytest.approx(3 * 1.0)
    assert durations["backward"] == pytest.approx(3 * 2.0)
    assert durations["server forward"] == pytest.approx(3 * 0.6)
    assert durations["server backward"] == pytest.approx(3 * 1.2)
    assert durations["upload"] == pytest.approx(
        3.0, rel=0.06
    )  # the values and up to 6 % headers
    assert durations["download"] == pytest.approx(1.5, rel=0.06)


def test_equation_14_sums_over_layers_of_server() -> None:
    device = (LayerTimes(1.0, 2.0, 0.0), LayerTimes(1.0, 2.0, 0.0))
    server = (LayerTimes(100.0, 100.0, 0.0), LayerTimes(1.0, 2.0, 0.0))
    profile = PairProfile(device, server, (0, 0), (0, 0), Link(), Link())
    # N = 1 + ceil((1 + 2) / min(1, 2)) = 4, without the 100 s of layer 1, which the device computes.
    assert parallel_batches(profile, 1, 100) == 4
    assert parallel_batches(profile, 1, 3) == 3


@st.composite
def profiles(draw: st.DrawFn) -> PairProfile:
    depth = draw(st.integers(1, 4))
    seconds = st.floats(1e-4, 1e-1)
    layers = [
        tuple(
            LayerTimes(draw(seconds) / speed, draw(seconds) / speed, 0.0)
            for _ in range(depth)
        )
        for speed in (1, 20)
    ]
    volumes = tuple(draw(st.integers(100, 100_000)) for _ in range(depth))
    up, down = (
        Link(rate=draw(st.floats(1e6, 1e8)), delay=draw(st.floats(0, 0.05)))
        for _ in range(2)
    )
    return PairProfile(layers[0], layers[1], volumes, volumes, up, down)


@given(profiles(), st.integers(20, 300), st.integers(1, 20))
def test_optimiser_takes_best_candidate_and_never_beats_exhaustive_search(
    profile: PairProfile, samples: int, batch: int
) -> None:
    best = best_of_all_choices(profile, samples, batch)
    chosen = shortest_epoch(profile, samples, batch, all_choices(profile, batch))
    times = [
        epoch_time(profile, Choice(split, count), samples, batch)
        for split in range(1, profile.depth + 1)
        for count in range(1, batch + 1)
    ]
    assert epoch_time(profile, best, samples, batch) == min(times)
    assert epoch_time(profile, chosen, samples, batch) == min(
        epoch_time(profile, choice, samples, batch)
        for choice in all_choices(profile, batch)
    )
    assert epoch_time(
        profile, best_split_without_pipelining(profile, samples, batch), samples, batch
    ) <= min(times[::batch])


def best_split_without_pipelining(
    profile: PairProfile, samples: int, batch: int
) -> Choice:
    """Return the best split point of split-federated learning, where N is 1."""
    return shortest_epoch(
        profile,
        samples,
        batch,
        [Choice(split) for split in range(1, profile.depth + 1)],
    )


def test_paper_choices_have_one_batch_number_per_split_point() -> None:
    profile = make_profile_of_cell("vgg5", "4g")
    assert [choice.split_point for choice in paper_choices(profile, BATCH)] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert set(paper_choices(profile, BATCH)) <= set(all_choices(profile, BATCH))


def test_minimum_size_limits_number_of_mini_batches() -> None:
    profile = make_profile_of_cell("vgg5", "4g")
    counts = {
        choice.parallel_batches for choice in all_choices(profile, BATCH, min_size=8)
    }
    assert max(counts) == 12
    assert {
        choice.parallel_batches for choice in all_choices(profile, 4, min_size=8)
    } == {1}


@pytest.mark.parametrize(("name", "network"), CELLS)
def test_choice_scores_at_least_96_percent_in_cells_of_paper(
    name: str, network: str
) -> None:
    profile = make_profile_of_cell(name, network)
    chosen = shortest_epoch(profile, SAMPLES, BATCH, all_choices(profile, BATCH))
    assert chosen.split_point == 1
    assert score_of(profile, chosen, SAMPLES, BATCH) >= 0.96
    assert (
        score_of(
            profile,
            shortest_epoch(profile, SAMPLES, BATCH, paper_choices(profile, BATCH)),
            SAMPLES,
            BATCH,
        )
        >= 0.83
    )


@pytest.mark.parametrize(("name", "network"), CELLS)
def test_methods_rank_as_in_figure_4(name: str, network: str) -> None:
    profile = make_profile_of_cell(name, network)
    # Devices are identical. In split learning they train one after another; the other methods average models.
    aggregation = aggregation_time(
        create(name, {}, (3, 32, 32), 10), DeviceSpec("server", 2e10, 1e9), DEVICES
    )
    split = best_split_without_pipelining(profile, SAMPLES, BATCH)
    choice = shortest_epoch(profile, SAMPLES, BATCH, all_choices(profile, BATCH))
    fl = (
        profile.local_training_time(SAMPLES, BATCH)
        + profile.exchange_time(profile.depth)
        + aggregation
    )
    sfl = epoch_time(profile, split, SAMPLES, BATCH) + aggregation
    pipelearn = epoch_time(profile, choice, SAMPLES, BATCH) + aggregation
    sl = epoch_time(profile, split, SAMPLES, BATCH) * DEVICES
    assert pipelearn < min(fl, sfl)
    assert sl > sfl
    if name == "vgg5":
        assert fl == pytest.approx(500, rel=0.03)
        assert (fl < sfl) == (network == "4g")
        assert fl / pipelearn >= 1.5
        assert sfl / pipelearn >= 1.1
    else:
        assert sfl < fl


@given(st.integers(1, 8))
def test_server_is_slower_for_devices_that_share_processor(at_once: int) -> None:
    model = create("vgg5", {}, (3, 32, 32), 10)
    server = DeviceSpec("server", 1e10, 1e9)
    device = layer_times(model, sgd_config(), DeviceSpec("device", 1e9, 1e9))
    alone, shared = (
        make_profile(
            model,
            device,
            layer_times(model, sgd_config(), server, share),
            Link(),
            Link(),
        ).durations(1, 10)
        for share in (1, at_once)
    )
    assert math.isclose(shared["server forward"], at_once * alone["server forward"])
    assert shared["forward"] == alone["forward"]
