import math
from dataclasses import replace

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
"""Of one of the server's eight processors, over the device's: HPL of a desktop's core over that of a whole Raspberry
Pi 3B is 10, and another factor of 2 for the 3B at 32 bits."""


def exhaustive(profile: PairProfile, samples: int, batch_size: int) -> Choice:
    """Return the best of all P and N by formula: what the planner is scored against."""
    counts = range(1, batch_size + 1)
    everything = (
        Choice(split, count)
        for split in range(1, profile.depth + 1)
        for count in counts
    )
    return shortest_epoch(profile, samples, batch_size, everything)


def score(profile: PairProfile, choice: Choice, samples: int, batch_size: int) -> float:
    """Return the shortest possible epoch over that of a choice: equation (15), by formula; 1 is the best."""
    best = exhaustive(profile, samples, batch_size)
    return epoch_time(profile, best, samples, batch_size) / epoch_time(
        profile, choice, samples, batch_size
    )


# Share of each layer in the time of forward and backward, batch 100, torch 2.13, one thread, x86: by FLOPs the first
# would have 10 % and 7 %, but normalisation, activation and pooling take time, too.
SHARES = {
    "vgg5": (0.477, 0.348, 0.130, 0.041, 0.004),
    "resnet18": (0.117, 0.098, 0.097, 0.092, 0.087, 0.119, 0.120, 0.145, 0.123, 0.002),
}
EPOCH = {"vgg5": 495.0, "resnet18": 1130.0}
"""Seconds of training on one device: what the paper's ratios imply for VGG5, as many times that as measured."""


def cell(name: str, network: str) -> PairProfile:
    """A device, the server and the link between them in one of the paper's cells."""
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


def test_mini_batches_have_the_floor_of_the_batch_over_their_number() -> None:
    assert [mini_batch(100, count) for count in (1, 3, 7, 12, 100)] == [
        100,
        33,
        14,
        8,
        1,
    ]
    for wrong in (0, 101):
        with pytest.raises(ValueError, match="take 1 to 100"):
            mini_batch(100, wrong)


def test_an_epoch_leaves_out_what_is_no_whole_iteration() -> None:
    assert iterations(10_000, 100, 1) == 100
    assert iterations(10_000, 100, 12) == 104  # of 96 samples
    assert iterations(30, 100, 1) == 1


def test_durations_are_the_papers_equations_5_to_10() -> None:
    layers = tuple(
        LayerTimes(forward=q, backward=2 * q, update=0.0) for q in (1.0, 2.0, 4.0)
    )
    server = tuple(
        LayerTimes(forward=q / 10, backward=q / 5, update=0.0) for q in (1.0, 2.0, 4.0)
    )
    found = PairProfile(
        layers, server, (1_000_000, 10, 10), (0, 0, 0), Link(rate=8e6), Link(rate=16e6)
    ).durations(1, 3)
    assert found["forward"] == pytest.approx(3 * 1.0)
    assert found["backward"] == pytest.approx(3 * 2.0)
    assert found["server forward"] == pytest.approx(3 * 0.6)
    assert found["server backward"] == pytest.approx(3 * 1.2)
    assert found["upload"] == pytest.approx(3.0, rel=0.06)  # and the headers
    assert found["download"] == pytest.approx(1.5, rel=0.06)


def test_equation_14_sums_over_the_servers_own_layers() -> None:
    device = (LayerTimes(1.0, 2.0, 0.0), LayerTimes(1.0, 2.0, 0.0))
    server = (LayerTimes(100.0, 100.0, 0.0), LayerTimes(1.0, 2.0, 0.0))
    found = PairProfile(device, server, (0, 0), (0, 0), Link(), Link())
    # 1 + ceil((1 + 2) / min(1, 2)): the 100 s that the server would take for layer 1 are not in it.
    assert parallel_batches(found, 1, 100) == 4
    assert parallel_batches(found, 1, 3) == 3


@st.composite
def _profiles(draw: st.DrawFn) -> PairProfile:
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


@given(_profiles(), st.integers(20, 300), st.integers(1, 20))
def test_nothing_is_better_than_the_exhaustive_choice_and_the_optimiser_takes_its_best_candidate(
    found: PairProfile, samples: int, batch: int
) -> None:
    best = exhaustive(found, samples, batch)
    chosen = shortest_epoch(found, samples, batch, all_choices(found, batch))
    times = [
        epoch_time(found, Choice(split, count), samples, batch)
        for split in range(1, found.depth + 1)
        for count in range(1, batch + 1)
    ]
    assert epoch_time(found, best, samples, batch) == min(times)
    assert epoch_time(found, chosen, samples, batch) == min(
        epoch_time(found, each, samples, batch) for each in all_choices(found, batch)
    )
    assert epoch_time(found, best_split(found, samples, batch), samples, batch) <= min(
        times[::batch]
    )


def best_split(found: PairProfile, samples: int, batch: int) -> Choice:
    """Return split-federated learning's: N is 1."""
    return shortest_epoch(
        found, samples, batch, [Choice(split) for split in range(1, found.depth + 1)]
    )


def test_the_shortlist_has_one_number_of_mini_batches_for_each_split_point() -> None:
    found = cell("vgg5", "4g")
    assert [choice.split_point for choice in paper_choices(found, BATCH)] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert set(paper_choices(found, BATCH)) <= set(all_choices(found, BATCH))


def test_no_mini_batch_is_smaller_than_asked_for() -> None:
    found = cell("vgg5", "4g")
    counts = {
        choice.parallel_batches for choice in all_choices(found, BATCH, min_size=8)
    }
    assert max(counts) == 12
    assert {
        choice.parallel_batches for choice in all_choices(found, 4, min_size=8)
    } == {1}


@pytest.mark.parametrize(("name", "network"), CELLS)
def test_the_choice_scores_at_least_96_percent_in_the_papers_cells(
    name: str, network: str
) -> None:
    found = cell(name, network)
    chosen = shortest_epoch(found, SAMPLES, BATCH, all_choices(found, BATCH))
    assert chosen.split_point == 1
    assert score(found, chosen, SAMPLES, BATCH) >= 0.96
    assert (
        score(
            found,
            shortest_epoch(found, SAMPLES, BATCH, paper_choices(found, BATCH)),
            SAMPLES,
            BATCH,
        )
        >= 0.83
    )


@pytest.mark.parametrize(("name", "network"), CELLS)
def test_methods_rank_as_in_figure_4(name: str, network: str) -> None:
    found = cell(name, network)
    # Devices are alike; split learning has them train one after the other, the others average their models.
    aggregation = aggregation_time(
        create(name, {}, (3, 32, 32), 10), DeviceSpec("server", 2e10, 1e9), DEVICES
    )
    split, choice = (
        best_split(found, SAMPLES, BATCH),
        shortest_epoch(found, SAMPLES, BATCH, all_choices(found, BATCH)),
    )
    fl = (
        found.local_training_time(SAMPLES, BATCH)
        + found.exchange_time(found.depth)
        + aggregation
    )
    sfl = epoch_time(found, split, SAMPLES, BATCH) + aggregation
    pipelearn = epoch_time(found, choice, SAMPLES, BATCH) + aggregation
    sl = epoch_time(found, split, SAMPLES, BATCH) * DEVICES
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
def test_devices_that_share_the_servers_processor_find_it_slower(at_once: int) -> None:
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
