"""Super neurons and timeslots against what EdgePipe's paper prints. Layers count from 0 here, in the paper from 1."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.ml.slots import arrangement
from testbed.ml.slots.arrangement import group_device_counts, layer_groups
from testbed.ml.slots.mapping import (
    best_order,
    choose_device_coordinator,
    climbed_order,
    connectivity_matrix,
    count_transmissions,
    generation_count,
    genetic_order,
    random_order,
    reception_matrix,
    score_order,
)
from testbed.ml.slots.timeslots import (
    TIMESLOT_MARGIN,
    draw_timetable,
    make_segments,
    make_timetable,
    naive_slots,
)
from testbed.network.radio import Propagation, Radio, draw_positions
from testbed.wire.cast import size_around
from testbed_edgepipe.method import EdgePipe
from tests.helpers.runs import problem_of, scenario

FIGURE_2 = (10, 8, 8, 8, 8, 10)
EVALUATED = (784, 128, 128, 128, 128, 10)
SHAPES = st.integers(2, 12), st.integers(1, 14)
RATE = 250e3
BUDGET = 2400 * naive_slots(6, 1) * 0.44142
"""Seconds of Table III: 194 minutes, to be exact the time in which the single device trains 2,400 batches."""


def partition(neurons, devices, allocation="hybrid"):
    return arrangement.partition_neurons(
        neurons, [f"d{number}" for number in range(devices)], allocation
    )


def lengths(groups):
    return [len(group) for group in groups]


def schedule(allocation, devices=6):
    return make_timetable(layer_groups(6, devices, allocation))


# Algorithm 1.


def test_the_papers_example_of_six_layers_and_six_devices():
    found = partition(FIGURE_2, 6)
    assert [[layer + 1 for layer in group] for group in found.groups] == [
        [1, 2],
        [3, 4],
        [5, 6],
    ]
    assert [len(found.members(group)) for group in range(3)] == [2, 2, 2]
    device_4 = "d3"
    assert found.members(1).index(device_4) == 1
    assert [found.neurons_of(device_4, layer) for layer in range(6)] == [
        *[range(0)] * 2,
        range(4, 8),
        range(4, 8),
        *[range(0)] * 2,
    ]
    assert [found.neurons_of("d0", layer) for layer in (0, 1)] == [range(5), range(4)]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_up_to_three_devices_are_horizontal(devices):
    assert (
        layer_groups(6, devices, "hybrid")
        == layer_groups(6, devices, "horizontal")
        == [range(6)]
    )


@pytest.mark.parametrize("devices", [12, 13, 14, 30])
def test_twice_as_many_devices_as_layers_are_vertical(devices):
    assert layer_groups(6, devices, "hybrid") == layer_groups(6, devices, "vertical")
    assert lengths(layer_groups(6, devices, "hybrid")) == [1] * 6


@pytest.mark.parametrize(
    ("layers", "devices", "wanted", "held"),
    [
        (6, 4, [3, 3], [2, 2]),
        (6, 5, [3, 3], [3, 2]),
        (6, 8, [1, 1, 2, 2], [1, 1, 3, 3]),
        (7, 6, [2, 2, 3], [2, 2, 2]),
        (5, 4, [2, 3], [2, 2]),
        (8, 6, [2, 3, 3], [2, 2, 2]),
    ],
)
def test_remaining_layers_go_to_the_last_groups(layers, devices, wanted, held):
    groups = layer_groups(layers, devices, "hybrid")
    assert lengths(groups) == wanted
    assert group_device_counts(groups, devices) == held


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        (1, [1] * 6),
        (2, [2, 2, 2]),
        (3, [3, 3]),
        (4, [2, 4]),
        (5, [1, 5]),
        (6, [6]),
        (9, [6]),
    ],
)
def test_a_largest_group_is_filled_from_the_output_on(most, wanted):
    assert lengths(layer_groups(6, 6, most)) == wanted


@given(*SHAPES, st.sampled_from(["vertical", "hybrid", "horizontal"]))
def test_every_neuron_is_on_one_device_and_every_device_has_some(
    layers, devices, allocation
):
    neurons = [20 + layer for layer in range(layers)]
    found = partition(neurons, devices, allocation)
    assert len(found.devices) == devices
    for layer, count in enumerate(neurons):
        parts = [found.neurons_of(name, layer) for name in found.devices]
        assert sorted(neuron for part in parts for neuron in part) == list(range(count))
        sizes = [len(part) for part in parts if part]
        assert max(sizes) - min(sizes) <= 1
    assert all(part for holders in found.layers for part in holders.values())


@given(*SHAPES)
def test_devices_are_rounded_as_in_line_6_if_that_uses_all(layers, devices):
    groups = layer_groups(layers, devices, "hybrid")
    rounded = [int(devices / layers * len(group) + 0.5) for group in groups]
    counts = group_device_counts(groups, devices)
    assert sum(counts) == devices
    assert min(counts) >= 1
    if sum(rounded) == devices:
        assert counts == rounded


def test_more_devices_than_neurons_and_more_groups_than_devices_are_refused():
    with pytest.raises(
        InputError, match="layer 5 has 2 neurons for 6 devices: use fewer devices"
    ):
        partition((784, 128, 128, 128, 128, 2), 6, "horizontal")
    with pytest.raises(
        InputError, match="makes 6 groups of layers for 4 devices: use larger groups"
    ):
        partition(EVALUATED, 4, 1)


# The topology of super neurons, and who takes which.


def test_pairs_of_the_papers_example_exchange_one_two_or_three_passes():
    counted = count_transmissions(partition(FIGURE_2, 6))
    assert counted[0][1] == counted[1][0] == 1
    assert counted[2][3] == counted[3][2] == 2
    assert counted[4][5] == counted[5][4] == 3
    assert all(counted[a][b] == counted[b][a] == 1 for a in (0, 1) for b in (2, 3))
    assert all(counted[a][b] == counted[b][a] == 1 for a in (2, 3) for b in (4, 5))
    assert all(counted[a][b] == counted[b][a] == 0 for a in (0, 1) for b in (4, 5))
    wanted = connectivity_matrix(partition(FIGURE_2, 6))
    assert wanted[4][5] == 1
    assert wanted[2][3] == pytest.approx(2 / 3)


def test_a_vertical_division_passes_on_to_the_next_and_back_but_not_to_the_input():
    counted = count_transmissions(partition(FIGURE_2, 6, "vertical"))
    assert {(a, b) for a in range(6) for b in range(6) if counted[a][b]} == {
        *((layer, layer + 1) for layer in range(5)),
        *((layer + 1, layer) for layer in range(1, 5)),
    }


def test_a_horizontal_division_has_all_pairs_alike():
    counted = count_transmissions(partition(FIGURE_2, 6, "horizontal"))
    assert {counted[a][b] for a in range(6) for b in range(6) if a != b} == {5 + 4 + 1}


def topology(seed, devices=6):
    names = [f"d{number}" for number in range(devices)]
    radio = Radio(
        Propagation(16, -82, 3.1, 46.68, 8),
        draw_positions(names, {}, (50, 50), seed),
        50,
        seed,
    )
    return reception_matrix(
        names,
        {(a, b): radio.reception_ratio((a, b)) for a in names for b in names if a != b},
    )


def misses(mapped, allocation, devices=6, count=100):
    """Return, for random topologies, by which share of the best score a mapping misses it."""
    wanted = connectivity_matrix(partition(EVALUATED, devices, allocation))
    found = []
    for seed in range(count):
        ratios = topology(seed, devices)
        best = score_order(wanted, ratios, best_order(wanted, ratios))
        found.append(
            1 - score_order(wanted, ratios, mapped(wanted, ratios, seed)) / best
        )
    return found


@pytest.mark.parametrize("allocation", ["vertical", "hybrid"])
@pytest.mark.parametrize(
    ("devices", "count"), [(4, 20), (5, 20), (6, 30), (7, 5), (8, 2)]
)
def test_hill_climbs_reach_the_best_of_all_orders(allocation, devices, count):
    assert max(misses(climbed_order, allocation, devices, count)) < 1e-12


def test_algorithm_2_misses_the_best_order_by_little():
    # Of 6 devices in vertical groups, one order in 720 is the best.
    found = misses(genetic_order, "vertical", count=50)
    assert any(found)
    assert fmean(found) < 0.005
    assert max(misses(genetic_order, "hybrid", count=50)) < 1e-12


def test_algorithm_2_takes_an_order_as_good_as_its_best_one():
    every = tuple(tuple(float(a != b) for b in range(4)) for a in range(4))
    ratios = ((0.0, 0.5, 1.0, 1.0), *every[1:])
    draws = random.Random(derive(3, "mapping"))
    expected = tuple(range(4))
    for _ in range(5):
        expected = tuple(draws.sample(expected, 4))
    assert genetic_order(every, ratios, 3, 5) == expected
    assert genetic_order(every, every, 3, 5) == tuple(range(4)), (
        "where all links are alike devices keep their order"
    )


def test_mappings_are_seeded_and_never_worse_than_none():
    wanted = connectivity_matrix(partition(EVALUATED, 6))
    ratios = topology(1)
    assert genetic_order(wanted, ratios, 5) == genetic_order(wanted, ratios, 5)
    assert score_order(
        wanted, ratios, genetic_order(wanted, ratios, 5, 3)
    ) >= score_order(wanted, ratios, (0, 1, 2, 3, 4, 5))
    assert sorted(random_order(6, 1)) == list(range(6))
    assert random_order(6, 1) == random_order(6, 1)
    assert len({random_order(6, seed) for seed in range(20)}) > 10
    assert random_order(6, 1, number=1) == random_order(6, 1)
    assert len({random_order(6, 1, number) for number in range(1, 6)}) == 5
    assert [generation_count(devices) for devices in (6, 7)] == [1_000, 10_000]


def test_scores_are_the_sum_of_the_hadamard_product():
    draws = random.Random(0)
    wanted, ratios = (
        tuple(tuple(draws.random() * (a != b) for b in range(4)) for a in range(4))
        for _ in range(2)
    )
    order = (2, 0, 3, 1)
    expected = sum(
        wanted[a][b] * ratios[order[a]][order[b]] for a in range(4) for b in range(4)
    )
    assert score_order(wanted, ratios, order) == pytest.approx(expected)


def test_too_many_devices_for_all_orders():
    wanted = connectivity_matrix(partition(EVALUATED, 10))
    with pytest.raises(ValueError, match="use 9 at most"):
        best_order(wanted, wanted)


def test_the_coordinator_is_nearest_to_all_in_expected_transmissions():
    # b reaches both in 1 / 0.9; a reaches c better by way of b than by itself.
    links = {("a", "b"): 0.9, ("b", "c"): 0.9, ("a", "c"): 0.1}
    both = {**links, **{(b, a): ratio for (a, b), ratio in links.items()}}
    assert choose_device_coordinator(["a", "b", "c"], both) == "b"
    # Only the way out counts: c hears all and is heard by none.
    out = {
        ("a", "b"): 1.0,
        ("a", "c"): 0.5,
        ("b", "a"): 1.0,
        ("b", "c"): 0.4,
        ("c", "a"): 0.0,
        ("c", "b"): 0.0,
    }
    assert choose_device_coordinator(["c", "b", "a"], out) == "a"


# Timeslots.


def test_device_4_of_the_papers_example():
    # BW4(0) and BW3(0) of the paper are stalls.
    device_4 = [str(action or "stall") for action in schedule("hybrid").actions(1, 100)]
    paper = [
        "stall",
        "stall",
        ("F", 3, 1),
        ("F", 4, 1),
        "stall",
        "stall",
        ("F", 3, 2),
        ("F", 4, 2),
    ]
    paper += [
        ("B", 4, 1),
        ("B", 3, 1),
        ("F", 3, 3),
        ("F", 4, 3),
        ("B", 4, 2),
        ("B", 3, 2),
    ]
    ours = [
        each if each == "stall" else f"{each[0]}{each[2] - 1}.{each[1] - 1}"
        for each in paper
    ]
    assert device_4[: len(ours)] == ours


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 30))
def test_timeslots_of_equal_groups_are_those_of_theorem_1(groups, size, batches):
    layers = groups * size
    table = make_timetable(
        [range(start, start + size) for start in range(0, layers, size)]
    )
    assert table.slot_count(batches) == 2 * layers + 2 * size * (batches - 1) - 1
    for group in range(groups):
        for layer in table.groups[group]:
            assert table.staleness(layer) == (groups - group if layer else 0)


@given(st.integers(2, 12), st.integers(1, 30))
def test_timeslots_of_horizontal_and_vertical_divisions(layers, batches):
    assert (
        make_timetable([range(layers)]).slot_count(batches)
        == naive_slots(layers, batches)
        == (2 * layers - 1) * batches
    )
    assert (
        make_timetable([range(layer, layer + 1) for layer in range(layers)]).slot_count(
            batches
        )
        == 2 * layers + 2 * (batches - 1) - 1
    )


def test_a_horizontal_division_has_no_stale_weights_but_those_of_the_batch_before():
    assert {schedule("horizontal").staleness(layer) for layer in range(1, 6)} == {1}


@given(*SHAPES, st.integers(1, 6))
def test_no_device_does_two_things_in_a_slot_and_every_batch_passes_in_order(
    layers, devices, batches
):
    table = make_timetable(layer_groups(layers, devices, "hybrid"))
    slots = {}
    for group in range(len(table.groups)):
        actions = list(table.actions(group, batches))
        assert len(actions) == table.slot_count(batches)
        for slot, action in enumerate(actions):
            if action is not None:
                slots[action.kind, action.layer, action.batch] = slot
    assert len(slots) == batches * (2 * layers - 1)
    for batch in range(batches):
        forward = [slots["forward", layer, batch] for layer in range(layers)]
        backward = [
            slots["backward", layer, batch] for layer in reversed(range(1, layers))
        ]
        path = forward + backward
        assert path == sorted(set(path))


@pytest.mark.parametrize(
    ("allocation", "batches", "slots"),
    [
        ("hybrid", 9_356, 37_431),
        ("vertical", 10_750, 21_509),
        ("horizontal", 6_128, 67_408),
    ],
)
def test_the_timeslots_of_table_iii(allocation, batches, slots):
    assert schedule(allocation).slot_count(batches) == slots


@pytest.mark.parametrize(
    ("allocation", "computation", "signals", "milliseconds"),
    [
        ("vertical", 0.34142, 784, 541.77),
        ("hybrid", 0.16115, 392, 311.33),
        ("horizontal", 0.05609, 131, 172.86),
    ],
)
def test_the_slot_lengths_of_table_iii(allocation, computation, signals, milliseconds):
    """Equation (4), with 32 bits a signal and nothing around them; the paper's computation is measured."""
    division = partition(EVALUATED, 6, allocation)
    assert (
        max(division.largest_message(name, (1,) * 6) for name in division.devices)
        == signals
    )
    assert 1e3 * (computation + 32 * signals / RATE + TIMESLOT_MARGIN) == pytest.approx(
        milliseconds, abs=0.005
    )


@pytest.mark.parametrize(
    ("workers", "allocation", "signals"),
    [
        (5, "vertical", 784),
        (5, "hybrid", 392),
        (5, "horizontal", 131),
        (0, "hybrid", None),
    ],
)
def test_a_planned_slot_fits_the_message_of_table_iii_and_its_frame(
    workers, allocation, signals
):
    """A single device transmits nothing."""
    workload = {
        "model": {"name": "mlp", "hidden": [128] * 4},
        "data": {"name": "digits-28"},
        "batch_size": 1,
    }
    method, network = (
        {"name": "edgepipe", "allocation": allocation},
        {"link": {"rate": "250kbit"}},
    )
    details = (
        EdgePipe()
        .plan(
            problem_of(
                scenario(workers, workload=workload, method=method, network=network)
            )[0]
        )
        .details
    )
    transmission = 0 if signals is None else 8 * size_around(4 * signals) / RATE
    assert details.timeslot == pytest.approx(
        max(details.forward_seconds + details.backward_seconds)
        + transmission
        + TIMESLOT_MARGIN
    )


@pytest.mark.parametrize(
    ("allocation", "slot", "batches", "epoch", "step"),
    [
        ("vertical", 0.54177, 10_750, 18, 550),
        ("hybrid", 0.31133, 9_356, 16, 356),
        ("horizontal", 0.17286, 6_128, 11, 128),
    ],
)
def test_194_minutes_train_as_many_batches_as_in_table_iii(
    allocation, slot, batches, epoch, step
):
    assert pytest.approx(194 * 60, rel=2e-3) == BUDGET
    # The table rounds slots and their length to the nearest.
    assert schedule(allocation).step_count(round(BUDGET / slot)) == batches
    assert divmod(batches, 600) == (epoch - 1, step)


def test_twenty_epochs_take_249_minutes_and_3_75_transmissions_a_second_and_device():
    division = partition(FIGURE_2, 6)
    table = make_timetable(division.groups)
    assert table.slot_count(20 * 600) * 0.31133 / 60 == pytest.approx(249, abs=0.5)
    a_batch = sum(map(sum, count_transmissions(division)))
    assert a_batch / (table.period * 0.31133) / 6 == pytest.approx(3.75, abs=0.005)


def test_a_schedule_is_drawn_a_line_a_group():
    lines = draw_timetable(schedule("hybrid"), batches=2).splitlines()
    assert len(lines) == 3
    assert (
        " ".join(lines[1].split()[2:])
        == ". . F0.2 F0.3 . . F1.2 F1.3 B0.3 B0.2 . . B1.3 B1.2 ."
    )


def test_training_and_tests_take_turns_each_in_slots_of_its_own():
    table = schedule("hybrid")
    found = list(make_segments(table, 0.5, 7, 2.0, 4, every=3))
    assert [each.is_test for each in found] == [False, True] * 3
    assert [each.batches for each in found[::2]] == [range(3), range(3, 6), range(6, 7)]
    assert [each.trained_steps for each in found] == [3, 3, 6, 6, 7, 7]
    assert [each.first_number for each in found] == [0, 3, 7, 10, 14, 15]
    assert [each.start for each in found[1:]] == [each.end for each in found[:-1]]
    assert found[0].end == table.slot_count(3) * 0.5
    # Forward only: six layers, then two slots a batch.
    assert found[1].end - found[1].start == (6 + 3 * 2) * 2.0
    assert (
        found[1].next_start(found[1].start),
        found[1].next_start(found[1].end - 0.1),
    ) == (
        found[1].start_of(1),
        found[1].end,
    )
    for segment in found:
        for group in range(3):
            work = list(segment.scheduled_work(group))
            assert all(
                segment.start <= segment.start_of(slot) < segment.end
                for slot, _ in work
            )
            assert {action.batch for _, action in work} == set(segment.batches)
            numbers = [
                segment.batch_number(action.batch)
                for _, action in work
                if action.kind == "forward"
            ]
            assert set(numbers) == set(
                range(segment.first_number, segment.first_number + len(segment.batches))
            )
            assert not segment.is_test or all(
                action.kind == "forward" for _, action in work
            )
