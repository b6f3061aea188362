"""Tests of EdgePipe's timeslots against Theorem 1, Figure 2 and Table III of the paper."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.slots.arrangement import layer_groups
from testbed.ml.slots.mapping import count_transmissions
from testbed.ml.slots.timeslots import (
    TIMESLOT_MARGIN,
    draw_timetable,
    make_segments,
    make_timetable,
    naive_slots,
)
from testbed.wire.cast import size_around
from testbed_edgepipe.method import EdgePipe
from tests.helpers.runs import make_scenario, problem_of
from tests.testbed.ml.slots.networks import EVALUATED, FIGURE_2, SHAPES, partition

RATE = 250e3
BUDGET = 2400 * naive_slots(6, 1) * 0.44142
"""Seconds of Table III: 194 minutes, to be exact the time in which the single device trains 2,400 batches."""


def timetable(allocation, devices=6):
    return make_timetable(layer_groups(6, devices, allocation))


def test_actions_of_device_4_match_example_of_paper():
    # In the paper's notation, which counts layers and batches from 1: F32 is FW3(2). BW4(0) and BW3(0) are stalls.
    paper = [
        "-",
        "-",
        "F31",
        "F41",
        "-",
        "-",
        "F32",
        "F42",
        "B41",
        "B31",
        "F33",
        "F43",
        "B42",
        "B32",
    ]
    actions = list(timetable("hybrid").actions(1, 100))[: len(paper)]
    for action, in_paper in zip(actions, paper, strict=True):
        if in_paper == "-":
            assert action is None
        else:
            kind, layer, batch = in_paper
            assert str(action) == f"{kind}{int(batch) - 1}.{int(layer) - 1}"


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 30))
def test_slots_of_equal_groups_follow_theorem_1(groups, size, batches):
    layers = groups * size
    starts = range(0, layers, size)
    table = make_timetable([range(start, start + size) for start in starts])
    assert table.slot_count(batches) == 2 * layers + 2 * size * (batches - 1) - 1
    for number, group in enumerate(table.groups):
        for layer in group:
            # The input layer has no weights.
            assert table.staleness(layer) == (groups - number if layer else 0)


@given(st.integers(2, 12), st.integers(1, 30))
def test_slots_of_horizontal_and_vertical_partitions_follow_formula(layers, batches):
    horizontal = make_timetable([range(layers)]).slot_count(batches)
    assert horizontal == naive_slots(layers, batches)
    assert horizontal == (2 * layers - 1) * batches
    one_layer_each = [range(layer, layer + 1) for layer in range(layers)]
    vertical = make_timetable(one_layer_each).slot_count(batches)
    assert vertical == 2 * layers + 2 * (batches - 1) - 1


def test_weights_of_horizontal_partition_include_previous_batch():
    table = timetable("horizontal")
    assert {table.staleness(layer) for layer in range(1, 6)} == {1}


@given(*SHAPES, st.integers(1, 6))
def test_each_slot_has_one_action_and_each_batch_passes_layers_in_order(
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
    # All layers forward, and all but the input layer backward.
    assert len(slots) == batches * (2 * layers - 1)
    for batch in range(batches):
        path = [slots["forward", layer, batch] for layer in range(layers)]
        for layer in reversed(range(1, layers)):
            path.append(slots["backward", layer, batch])
        assert path == sorted(set(path))


@pytest.mark.parametrize(
    ("allocation", "batches", "slots"),
    [
        ("hybrid", 9_356, 37_431),
        ("vertical", 10_750, 21_509),
        ("horizontal", 6_128, 67_408),
    ],
)
def test_number_of_slots_matches_table_iii(allocation, batches, slots):
    assert timetable(allocation).slot_count(batches) == slots


@pytest.mark.parametrize(
    ("allocation", "computation", "signals", "milliseconds"),
    [
        ("vertical", 0.34142, 784, 541.77),
        ("hybrid", 0.16115, 392, 311.33),
        ("horizontal", 0.05609, 131, 172.86),
    ],
)
def test_slot_length_by_equation_4_matches_table_iii(
    allocation, computation, signals, milliseconds
):
    assignment = partition(EVALUATED, 6, allocation)
    messages = []
    for name in assignment.devices:
        messages.append(assignment.largest_message(name, (1,) * 6))
    assert max(messages) == signals
    # The paper measured the computation; a signal has 32 bits, and the equation counts no headers.
    seconds = computation + 32 * signals / RATE + TIMESLOT_MARGIN
    assert 1e3 * seconds == pytest.approx(milliseconds, abs=0.005)


@pytest.mark.parametrize(
    ("workers", "allocation", "signals"),
    [
        (5, "vertical", 784),
        (5, "hybrid", 392),
        (5, "horizontal", 131),
        # A single device transmits nothing.
        (0, "hybrid", None),
    ],
)
def test_planned_slot_includes_message_of_table_iii_with_headers(
    workers, allocation, signals
):
    workload = {
        "model": {"name": "mlp", "hidden": [128] * 4},
        "data": {"name": "digits-28"},
        "batch_size": 1,
    }
    problem, _ = problem_of(
        make_scenario(
            workers,
            workload=workload,
            method={"name": "edgepipe", "allocation": allocation},
            network={"link": {"rate": "250kbit"}},
        )
    )
    details = EdgePipe().plan(problem).details
    computation = max(details.forward_seconds + details.backward_seconds)
    transmission = 0 if signals is None else 8 * size_around(4 * signals) / RATE
    assert details.timeslot == pytest.approx(
        computation + transmission + TIMESLOT_MARGIN
    )


@pytest.mark.parametrize(
    ("allocation", "slot", "batches", "epoch", "step"),
    [
        ("vertical", 0.54177, 10_750, 18, 550),
        ("hybrid", 0.31133, 9_356, 16, 356),
        ("horizontal", 0.17286, 6_128, 11, 128),
    ],
)
def test_batches_trained_in_194_minutes_match_table_iii(
    allocation, slot, batches, epoch, step
):
    assert pytest.approx(194 * 60, rel=2e-3) == BUDGET
    # The table rounds slots and their length to the nearest.
    assert timetable(allocation).step_count(round(BUDGET / slot)) == batches
    # An epoch of the paper has 600 batches.
    assert divmod(batches, 600) == (epoch - 1, step)


def test_duration_of_20_epochs_and_rate_of_transmissions_match_paper():
    assignment = partition(FIGURE_2, 6)
    table = make_timetable(assignment.groups)
    slot = 0.31133
    minutes = table.slot_count(20 * 600) * slot / 60
    assert minutes == pytest.approx(249, abs=0.5)
    per_batch = sum(map(sum, count_transmissions(assignment)))
    per_second_and_device = per_batch / (table.period * slot) / 6
    assert per_second_and_device == pytest.approx(3.75, abs=0.005)


def test_timetable_is_drawn_with_one_line_per_group():
    lines = draw_timetable(timetable("hybrid"), batches=2).splitlines()
    assert len(lines) == 3
    # The first two words of a line are the layers of the group.
    cells = lines[1].split()[2:]
    expected = ". . F0.2 F0.3 . . F1.2 F1.3 B0.3 B0.2 . . B1.3 B1.2 ."
    assert cells == expected.split()


def make_test_segments():
    """Return 7 training steps of 0.5 s a slot, with 4 test batches of 2 s a slot after every third step."""
    table = timetable("hybrid")
    segments = make_segments(table, slot=0.5, steps=7, test_slot=2.0, tests=4, every=3)
    return table, list(segments)


def test_segments_alternate_between_training_and_tests():
    table, segments = make_test_segments()
    rows = []
    for segment in segments:
        rows.append(
            (
                segment.is_test,
                segment.batches,
                segment.trained_steps,
                segment.first_number,
            )
        )
    # Batches of training and tests are numbered in one sequence: three, four, three, four, one, four.
    assert rows == [
        (False, range(3), 3, 0),
        (True, range(4), 3, 3),
        (False, range(3, 6), 6, 7),
        (True, range(4), 6, 10),
        (False, range(6, 7), 7, 14),
        (True, range(4), 7, 15),
    ]
    for before, after in pairwise(segments):
        assert after.start == before.end
    assert segments[0].end == table.slot_count(3) * 0.5


def test_test_segment_has_only_forwards_in_slots_of_its_own_length():
    _, segments = make_test_segments()
    first_tests = segments[1]
    # Forward only: six layers, then two slots a batch.
    assert first_tests.end - first_tests.start == (6 + 3 * 2) * 2.0
    assert first_tests.next_start(first_tests.start) == first_tests.start_of(1)
    assert first_tests.next_start(first_tests.end - 0.1) == first_tests.end


def test_work_of_segment_is_within_its_time_and_its_batches():
    _, segments = make_test_segments()
    for segment in segments:
        first = segment.first_number
        expected_numbers = set(range(first, first + len(segment.batches)))
        for group in range(3):
            batches = set()
            forward_numbers = set()
            for slot, action in segment.scheduled_work(group):
                assert segment.start <= segment.start_of(slot) < segment.end
                batches.add(action.batch)
                if action.kind == "forward":
                    forward_numbers.add(segment.batch_number(action.batch))
                else:
                    assert not segment.is_test
            assert batches == set(segment.batches)
            assert forward_numbers == expected_numbers
